"""peft loads our exports with equal outputs; what it cannot express is refused."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.export import blocking
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import REFUSED as REFUSED_CELLS
from tests.kit.matrix import example
from tests.kit.selection import cases_of

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_export, core, outputs, same_bits  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


LORA = ["bert", "distilbert", "gpt2", "llama", "qwen3", "t5", "bart", "phi3", "gpt_neox"]


@pytest.mark.parametrize("architecture", core(LORA, "bert", "gpt_neox", "bart"))
def test_lora(tmp_path, architecture):
    adapter, imported = compare_export(tmp_path / "out", architecture, "lora")
    if architecture not in ("gpt2", "phi3", "gpt_neox"):  # their q and v are parts of one module
        same_bits(adapter, imported)


SPECS = {
    "ranks": {"lora": {"rank": 4, "ranks": {"attn.q": 2, "encoder.1.attn.v": 3}}},
    "layers": {"lora": {"rank": 4, "layers": "top 1", "sites": ["attn.o", "ffn.up"]}},
    "rslora": {"rslora": {"rank": 5, "ranks": {"attn.q": 2}}},
    "lora-plus": "lora-plus",
    "dora": {"dora": {"rank": 4, "ranks": {"attn.q": 2}}},
    "bias": ["lora", {"bitfit": {}}],
    "bias-some": ["lora", {"bitfit": {"sites": ["attn.q", "ffn.up"]}}],
    "norms-beside": ["lora", "norms"],
    "embeddings": ["lora", "chosen"],
    "two": [{"lora": {"sites": ["attn.q"]}}, {"lora-plus": {"sites": ["attn.v"], "alpha": 3}}],
    "ia3": "ia3",
    "ia3-inputs": {"ia3": {"sites": ["attn.o", "ffn.down", "attn.k"], "inputs": ["attn.o"]}},
    "norms": "norms",
    "norms-top": "norms(layers='top 1')",
}


CORE = ("ranks", "bias-some", "norms-beside", "embeddings", "two", "ia3-inputs", "norms-top")


@pytest.mark.parametrize("case", core(SPECS, *CORE))
def test_bert(tmp_path, case):
    adapter, imported = compare_export(tmp_path / "out", "bert", SPECS[case])
    if "beside" not in case and case not in (
        "two",
        "lora-plus",
        "norms-top",
        "bias-some",
        "embeddings",
    ):
        same_bits(adapter, imported)


OTHERS = {
    "dora-parts": ("gpt2", {"dora": {"ranks": {"attn.q": 2}}}),
    "dora-heads": ("gpt_neox", "dora"),
    "dora-fused": ("gpt2", {"dora": {"sites": ["attn.q", "ffn.up"]}}),
    "dora-whole": ("gpt2", {"dora": {"sites": ["attn.qkv"]}}),
    "ia3-fused": ("gpt2", "ia3"),
    "ia3-heads": ("gpt_neox", "ia3"),
    "ia3-llama": ("llama", "ia3"),
    "ia3-t5": ("t5", "ia3"),
    "norms": ("llama", "norms"),
    "several-on-one": ("gpt2", {"lora": {"ranks": {"attn.q": 2}}}),
}


@pytest.mark.parametrize("case", core(OTHERS, "dora-parts", "ia3-fused", "several-on-one"))
def test_other_backbones(tmp_path, case):
    compare_export(tmp_path / "out", *OTHERS[case])


EXPORTABLE = ("lora", "dora", "ia3", "norms")


CELLS = [
    (method, architecture)
    for method in EXPORTABLE
    for architecture in tiny_models.ARCHITECTURES
    if (method, architecture) not in REFUSED_CELLS
    and architecture not in tiny_models.WITHOUT_CLASSIFIER
]


SOME = (("lora", "albert"), ("lora", "deberta-v2"), ("dora", "gpt_neox"), ("ia3", "phi3"))


@pytest.mark.parametrize(("method", "architecture"), core(CELLS, *SOME))
def test_every_architecture(tmp_path, method, architecture):
    compare_export(tmp_path / "out", architecture, method)


BACKBONES = {"bert": "classification", "llama": "causal-lm"}


# More may be exported: what `blocking` does not block has to be, with equal logits.
GO = {
    "bert": {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms"},
    "llama": {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms", "prompt", "p-tuning"},
}


@pytest.mark.parametrize("architecture", core(BACKBONES, "bert"))
def test_every_method(tmp_path, architecture, subtests):
    for method in cases_of(METHODS, 4):
        with subtests.test(method):
            check_method(tmp_path / method, architecture, method)


def check_method(folder, architecture, method):
    task = BACKBONES[architecture]
    with torch.device("meta"):
        bare = tiny_models.model(architecture, task)
    known = blocking(bare, example(method))
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
            adapter.export(folder)
        assert list(caught.value.offenders) == known
        assert not folder.exists()
        assert method not in GO[architecture]
        return
    adapter.export(folder)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
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
def test_one_error_lists_what_peft_cannot_express(tmp_path, case):
    spec, reason = REFUSED[case]
    adapter = ah.attach(tiny_models.model("llama", "causal-lm"), spec)
    with pytest.raises(MismatchError, match=reason):
        adapter.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


MIXED = {
    # A bias of a module that is otherwise frozen, and a whole norm.
    "biases and norms": ("bert", [{"lora": {"sites": ["attn.q"]}}, "bitfit(sites=['attn.o'])",
                                  {"chosen": {"names": ["encoder.0.attn.norm.*"]}}]),
    # Biases that are no module's: DeBERTa's q_bias and v_bias.
    "other biases": ("deberta", ["lora", "bitfit"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_biases_and_whole_modules(tmp_path, case):
    compare_export(tmp_path / "out", *MIXED[case])


def test_a_whole_module_around_an_updated_one_is_refused(tmp_path):
    model = tiny_models.model("deberta")
    name = next(n for n, _ in model.named_parameters() if n.endswith("q_bias"))
    parameters = {"chosen": {"names": [anatomy_of(model).key(name)]}}
    adapter = ah.attach(model, [{"ia3": {"sites": ["attn.qkv"]}}, parameters])
    with pytest.raises(MismatchError) as caught:
        adapter.export(tmp_path / "out")
    holder = name.rpartition(".")[0]
    assert f"{holder}: both updated and trained whole" in caught.value.offenders
