"""Which sites the options `sites`, `ranks`, `sizes` and `partial` select."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import AdapterhubError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.common.projections import PartialSitesError
from tests.kit import tiny_models
from tests.kit.selection import cases_of

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
    for cell in dict.fromkeys([*computed, *refused, *cases_of(cells, 24, nightly=4)]):
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


SIZES = {"*": 7, "attn.q": 4, "encoder.attn.q": 3, "encoder.1.attn.q": 2}
OF_BART = {"encoder.0.attn.q": 3, "encoder.1.attn.q": 2, "decoder.0.attn.q": 4, "cross.v": 7}
BY_SITE = [
    ("bart", {"lora": {"ranks": SIZES}}, OF_BART),
    ("bart", {"lora-plus": {"ranks": dict(reversed(SIZES.items()))}}, OF_BART),
    ("gpt2", "lora(rank=5, ranks={attn.q: 1})", {"attn.q": 1, "attn.v": 5}),  # of one module
    ("bert", "houlsby(size=8, sizes={attn: 3})", {"attn": 3, "ffn": 8}),
]


@pytest.mark.parametrize(("architecture", "spec", "expected"), BY_SITE)
def test_the_most_specific_pattern_gives_the_size_of_a_site(architecture, spec, expected, tmp_path):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, spec)
    adapter.save(tmp_path / "a")
    adapter.detach()
    for each in (adapter, ah.load(model, tmp_path / "a")):
        sizes = {
            p.site.id: p.module.A.shape[0] if hasattr(p.module, "A") else p.module.down.out_features
            for p in each.placed
        }
        for name, size in expected.items():
            assert {n for site, n in sizes.items() if site.endswith(name)} == {size}
        assert {*sizes.values()} == {*expected.values()}
        assert each.count() == sum(m.count(each.anatomy) for m in each.methods)


@pytest.fixture
def half():
    """Return a BERT in whose second layer no site is found."""
    model = tiny_models.model("bert")

    class Layer(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, *args, **kwargs):
            return self.inside(*args, **kwargs)

    model.bert.encoder.layer[1] = Layer(model.bert.encoder.layer[1])
    return model


PARTIAL = ("lora", "ia3", "pfeiffer", "houlsby", "mam", "unipelt")


@pytest.mark.parametrize("method", PARTIAL)
def test_half_a_model_is_refused(half, method):
    with pytest.raises(SiteError, match="not all layers have the sites of") as error:
        ah.attach(half, method)
    assert error.value.offenders == ("encoder: 1 of 2 layers have some (0)",)
    assert "partial=True" in error.value.hint
    assert isinstance(error.value.__cause__ or error.value, PartialSitesError)
    assert not ah.adapters(half)


@pytest.mark.parametrize("method", PARTIAL[:-1])
def test_partial_adapts_what_is_there(half, method, tmp_path):
    """And the files name it, so that loading needs no such argument."""
    adapter = ah.attach(half, method, partial=True)
    assert {placed.site.layer for placed in adapter.placed} == {0}
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods) > 0
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = half.eval()(**tiny_models.batch()).logits
        adapter.save(tmp_path / "a")
        ah.detach(half)
        ah.load(half, tmp_path / "a")
        assert torch.equal(half(**tiny_models.batch()).logits, expected)


def test_what_partial_does_not_change(half):
    whole = ah.attach(tiny_models.model("bert"), "lora(rank=4)", partial=True)
    assert whole.methods == (ah.LoRA(rank=4),), "all layers have the sites"
    with pytest.raises(SiteError, match="no such site"):
        ah.attach(half, "lora(sites=[cross.q])", partial=True)
    with pytest.raises(SiteError, match="not all layers have the sites of"):
        ah.attach(half, "unipelt", partial=True)  # its gated parts are no methods for a file
    ah.attach(half, "unipelt(layers=0)")
