"""Every method goes to peft with equal logits, or is refused by name; and the same is known before
training."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import example

import adapterhub as ah
from adapterhub.adapters.export import blocking
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.interchange.peft.exporter import to_peft
from adapterhub.interchange.peft.importer import from_peft
from adapterhub.interchange.peft.vllm import RANKS
from adapterhub.methods import METHODS

peft = pytest.importorskip("peft")
from peft_reference import core, outputs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BACKBONES = {"bert": "classification", "llama": "causal-lm"}
GO = {
    "bert": {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms"},
    "llama": {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms", "prompt", "p-tuning"},
}


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("architecture", core(BACKBONES, "bert"))
def test_every_method(tmp_path, architecture, method):
    task = BACKBONES[architecture]
    with torch.device("meta"):
        bare = tiny_models.model(architecture, task)
    known = blocking(bare, example(method), "peft")
    model = tiny_models.model(architecture, task)
    try:
        adapter = ah.attach(model, example(method))
    except AdapterhubError:
        assert known
        return
    fixed = {n: t.clone() for n, t in adapter.tensors().items() if not t.requires_grad}
    tiny_models.scramble(adapter)
    for name, tensor in fixed.items():
        adapter.tensors()[name].copy_(tensor)
    if known:
        with pytest.raises(MismatchError) as caught:
            adapter.export(tmp_path / "out")
        assert list(caught.value.offenders) == known
        assert not (tmp_path / "out").exists()
        assert method not in GO[architecture]
        return
    assert method in GO[architecture]
    adapter.export(tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), tmp_path / "out")
    found, expected = outputs(theirs, task), outputs(model, task)
    found = found[:, -expected.shape[1] :] if task == "causal-lm" else found
    atol = 1e-4 if any(not t.requires_grad for t in adapter.tensors().values()) else 2e-5
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


REFUSED = {
    "two kinds": (["lora", "prompt"], "a peft checkpoint contains only one of"),
    "no positions": ("prefix", r"prefix\(positions=true\)"),
    "some layers": ("prefix(positions=true, layers='top 1')", "every self-attention"),
    "another method": (["lora", "houlsby"], "houlsby: peft has no such method"),
    "dora and lora": (
        [{"dora": {"sites": ["attn.q"]}}, {"lora": {"sites": ["attn.v"]}}],
        "DoRA for all updates",
    ),
    "updated and trained": (
        [{"lora": {"sites": ["attn.q"]}}, {"chosen": {"names": ["*.attn.q.weight"]}}],
        "both updated and trained whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_cannot_express_says_why(tmp_path, case):
    spec, reason = REFUSED[case]
    adapter = ah.attach(tiny_models.model("llama", "causal-lm"), spec)
    with pytest.raises(MismatchError, match=reason):
        adapter.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_prefix_behind_an_encoder_stays_here(tmp_path, architecture):
    """peft lays it out for two caches: no table there gives each layer its own."""
    spec = "prefix(length=3, positions=true, sites=['decoder.attn.kv'])"
    adapter = ah.attach(tiny_models.model(architecture, "seq2seq"), spec)
    with pytest.raises(MismatchError, match="that of layer 2 i"):
        adapter.export(tmp_path / "out")


VLLM = {
    "rank": ("llama", "lora(rank=24)", ["--max-lora-rank 32"]),
    "too high": ("llama", "rslora(rank=1024)", ["at most 512"]),
    "ranks": ("llama", {"lora": {"ranks": {"attn.q": 4}}}, ["one alpha / rank"]),
    "dora": ("llama", "dora", ["DoRA"]),
    "kind": ("llama", "ia3", ["only LORA"]),
    "whole": ("llama", ["lora", "chosen"], ["modules_to_save"]),
    "bias": ("qwen2", ["lora", "bitfit"], ["bias"]),
    "all": ("gpt2", ["dora(rank=24)", "bitfit"], ["GPT2LMHeadModel", "rank", "DoRA", "bias"]),
    "none": ("llama", "lora(rank=16)", []),
}


@pytest.mark.parametrize("case", VLLM)
def test_what_vllm_does_not_serve_is_known_before_training(case):
    architecture, spec, reasons = VLLM[case]
    with torch.device("meta"):
        model = tiny_models.model(architecture, "causal-lm")
    found = blocking(model, spec, "vllm")
    for reason in reasons:
        assert any(reason in line for line in found), (reason, found)
    assert bool(found) == bool(reasons)
    assert not hasattr(model, "_adapterhub")
    assert max(RANKS) == 512


ranks = st.dictionaries(
    st.sampled_from(["attn.q", "attn.v", "encoder.0.attn.q", "encoder.*.ffn.up", "encoder.1.*"]),
    st.integers(1, 6),
    max_size=4,
)
BERT = tiny_models.model("bert")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rank=st.integers(1, 6), alpha=st.integers(1, 32), ranks=ranks, rooted=st.booleans())
def test_any_ranks_survive_the_way_to_peft_and_back(rank, alpha, ranks, rooted):
    options = {
        "rank": rank,
        "alpha": alpha,
        "ranks": ranks,
        "sites": ["attn.q", "attn.v", "ffn.up"],
    }
    adapter = ah.attach(BERT, {"rslora" if rooted else "lora": options})
    try:
        tiny_models.scramble(adapter)
        files = to_peft(adapter.source())
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
