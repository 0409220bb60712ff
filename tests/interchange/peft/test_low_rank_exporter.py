"""Low-rank updates are exported with equal outputs, and imported again with the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.errors import MismatchError, SiteError
from adapterhub.interchange.peft.exporter import to_peft
from adapterhub.interchange.peft.importer import from_peft
from tests.kit import tiny_models
from tests.kit.selection import ALL, long_table

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_export, core, same_bits  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


FUSED = {"gpt2": "attn.qkv", "phi3": "attn.qkv", "gpt_neox": "attn.qkv"}


@pytest.mark.parametrize("architecture", core(FUSED, "gpt2"))
def test_lora_on_a_fused_projection(tmp_path, architecture):
    spec = {"lora": {"sites": [FUSED[architecture], "ffn.down"], "rank": 3}}
    same_bits(*compare_export(tmp_path / "out", architecture, spec))


@pytest.mark.parametrize("architecture", core(["bert", "gpt2"], "gpt2"))
def test_pissa(tmp_path, architecture):
    compare_export(tmp_path / "out", architecture, "pissa(rank=4)", atol=1e-4)


ranks = st.dictionaries(
    st.sampled_from(["attn.q", "attn.v", "encoder.0.attn.q", "encoder.*.ffn.up", "encoder.1.*"]),
    st.integers(1, 6),
    max_size=4,
)


BERT = tiny_models.model("bert")


@settings(max_examples=25 if ALL else 10)
@given(rank=st.integers(1, 6), alpha=st.integers(1, 32), ranks=ranks, rooted=st.booleans())
def test_any_ranks_round_trip_through_peft(rank, alpha, ranks, rooted):
    options = {
        "rank": rank,
        "alpha": alpha,
        "ranks": ranks,
        "sites": ["attn.q", "attn.v", "ffn.up"],
    }
    adapter = ah.attach(BERT, {"rslora" if rooted else "lora": options})
    try:
        tiny_models.scramble(adapter)
        files = to_peft(adapter.export_source())
        back = from_peft(files, adapter.anatomy)
        own = adapter.saved_tensors()
    finally:
        adapter.detach()
    assert own.keys() == back.tensors.keys()
    assert all(torch.equal(own[name], back.tensors[name]) for name in own)
    again = ah.attach(BERT, [dict(spec) for spec in back.methods])
    scales = {placed.site.id: placed.module.scale for placed in again.placed}
    again.detach()
    assert scales == pytest.approx({p.site.id: p.module.scale for p in adapter.placed}, rel=1e-12)


PLACES = ("attn", "ffn", "attn.norm", "ffn.norm")


@long_table(("architecture", "sites"), list(itertools.product(tiny_models.MATRIX, PLACES)), 5)
def test_lora_outside_of_projections_is_refused(tmp_path, architecture, sites):
    """A LoRA at a sublayer reads the sublayer's input, which no module of peft does."""
    model = tiny_models.usual_model(architecture)
    try:
        adapter = ah.attach(model, f"lora(rank=2, sites=['{sites}'])")
    except SiteError:
        return  # this backbone has no such site
    with pytest.raises(MismatchError, match="cannot be exported") as error:
        adapter.export(tmp_path / "out")
    assert any("peft adapts projections only" in line for line in error.value.offenders)
    assert not (tmp_path / "out").exists()
