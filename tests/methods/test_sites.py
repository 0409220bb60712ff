"""What the option `sites` selects computes, or is refused before anything runs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import AdapterhubError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.selection import ALL, part_of

WITH_SITES = sorted(
    name for name, cls in METHODS.items() if "sites" in {f.name for f in dataclasses.fields(cls)}
)
PATTERNS = ("*", "attn.*", "ffn.*", "*.0.*")
_ARCHITECTURES = tiny_models.ARCHITECTURES if tiny_models.FULL_MATRIX else ("t5",)


def computes(model, method, sites):
    """Attach, count, compute and detach; whether it was not refused."""
    try:
        adapter = ah.attach(model, {method: {"sites": sites}})
    except AdapterhubError:
        return False
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods)
    inputs = tiny_models.batch()
    with torch.no_grad():
        assert model(**inputs, **tiny_models.decoder_inputs(model, inputs))
    ah.detach(model)
    return True


def _now(cells):
    """Return the cells that run: a sixteenth, or a third with ADAPTERHUB_TESTS=all."""
    return cells if tiny_models.FULL_MATRIX else part_of(cells, 3 if ALL else 16)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_every_role_and_pattern_computes_or_is_refused(architecture, subtests):
    roles = sorted(
        {site.role for site in ah.anatomy_of(tiny_models.usual_model(architecture)).sites.values()}
    )
    cells = list(itertools.product(WITH_SITES, (*roles, *PATTERNS)))
    assert len(cells) >= 100  # none is lost
    projections = {"attn.*": "attn.o", "ffn.*": "ffn.down"}  # XLNet and Mixtral lack some
    missing = {pattern for pattern, role in projections.items() if role not in roles}
    computed = [("lora", pattern) for pattern in PATTERNS if pattern not in missing]
    refused = [("lora", "attn.kv")]
    model = tiny_models.usual_model(architecture)
    for cell in dict.fromkeys([*computed, *refused, *_now(cells)]):
        method, sites = cell
        with subtests.test(method=method, sites=sites):
            if find_state(model):  # of a cell that failed
                ah.detach(model)
            done = computes(model, method, [sites])
            assert done or cell not in computed
            assert not done or cell not in refused


def test_wildcards_select_sites_of_the_usual_kind_only():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(sites=['attn.*', 'ffn.*'])")
    assert {p.site.role for p in adapter.placed} == {
        "attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down",
    }  # fmt: skip
    ah.detach(model)
    adapter = ah.attach(model, "pfeiffer(sites=['*'])")
    assert {p.site.role for p in adapter.placed} == {"attn", "ffn"}
