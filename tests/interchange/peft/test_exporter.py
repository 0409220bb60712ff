"""What we export, peft loads and computes alike; imported again it has the same bits."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from matrix import REFUSED
from safetensors.torch import load_file

import adapterhub as ah

peft = pytest.importorskip("peft")
from peft_reference import core, outputs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def exported(folder, architecture, spec, task="classification", **options):
    """Attach, scramble, export, and what it computes."""
    model = tiny_models.model(architecture, task, **options)
    adapter = ah.attach(model, spec)
    fixed = {n: t.clone() for n, t in adapter.tensors().items() if not t.requires_grad}
    tiny_models.scramble(adapter)
    for name, tensor in fixed.items():
        adapter.tensors()[name].copy_(tensor)
    adapter.export(folder)
    return adapter, outputs(model, task)


def compare(folder, architecture, spec, task="classification", atol=1e-5, strip=0, **options):
    """peft loads the export with equal logits; imported again it computes the same."""
    adapter, expected = exported(folder, architecture, spec, task, **options)
    assert not torch.allclose(
        expected, outputs(tiny_models.model(architecture, task, **options), task)
    )
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task, **options), folder
    )
    found = outputs(theirs, task)
    found = found[:, strip:] if strip else found
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)
    held = load_file(folder / "adapter_model.safetensors")
    assert sum(t.numel() for t in held.values()) > 0
    again = tiny_models.model(architecture, task, **options)
    imported = ah.load(again, folder)
    torch.testing.assert_close(outputs(again, task), expected, atol=atol, rtol=1e-5)
    return adapter, imported


def same_bits(adapter, imported):
    own, other = adapter.saved_tensors(), imported.saved_tensors()
    assert own.keys() == other.keys() != set()
    assert all(torch.equal(own[name], other[name]) for name in own)


LORA = ["bert", "distilbert", "gpt2", "llama", "qwen3", "t5", "bart", "phi3", "gpt_neox"]


@pytest.mark.parametrize("architecture", core(LORA, "bert", "gpt_neox", "bart"))
def test_lora(tmp_path, architecture):
    adapter, imported = compare(tmp_path / "out", architecture, "lora")
    if architecture not in ("gpt2", "phi3", "gpt_neox"):  # their q and v are parts of one module
        same_bits(adapter, imported)


FUSED = {"gpt2": "attn.qkv", "phi3": "attn.qkv", "gpt_neox": "attn.qkv"}


@pytest.mark.parametrize("architecture", core(FUSED, "gpt2"))
def test_lora_on_a_fused_projection(tmp_path, architecture):
    spec = {"lora": {"sites": [FUSED[architecture], "ffn.down"], "rank": 3}}
    same_bits(*compare(tmp_path / "out", architecture, spec))


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
    adapter, imported = compare(tmp_path / "out", "bert", SPECS[case])
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
    compare(tmp_path / "out", *OTHERS[case])


@pytest.mark.parametrize("architecture", core(["bert", "gpt2"], "gpt2"))
def test_pissa(tmp_path, architecture):
    compare(tmp_path / "out", architecture, "pissa(rank=4)", atol=1e-4)


PROMPTS = {"gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq", "bert": "features"}


@pytest.mark.parametrize("spec", ["prompt(length=5)", "p-tuning(length=5)"])
@pytest.mark.parametrize("architecture", core(PROMPTS, "t5"))
def test_prompts(tmp_path, architecture, spec):
    task = PROMPTS[architecture]
    strip = 0 if task == "seq2seq" else 5
    same_bits(*compare(tmp_path / "out", architecture, spec, task, atol=2e-5, strip=strip))


@pytest.mark.parametrize("network", core(["false", "true"], "true"))
@pytest.mark.parametrize("architecture", core(["gpt2", "llama", "qwen3"], "llama"))
def test_prefix(tmp_path, architecture, network):
    spec = f"prefix(length=5, positions=true, reparametrize={network}, sites=['attn.kv'])"
    same_bits(*compare(tmp_path / "out", architecture, spec, "causal-lm", atol=2e-5))


METHODS = ("lora", "dora", "ia3", "norms")
CELLS = [
    (method, architecture)
    for method in METHODS
    for architecture in tiny_models.ARCHITECTURES
    if (method, architecture) not in REFUSED and architecture not in tiny_models.WITHOUT_CLASSIFIER
]
SOME = (("lora", "albert"), ("lora", "deberta-v2"), ("dora", "gpt_neox"), ("ia3", "phi3"))


@pytest.mark.parametrize(("method", "architecture"), core(CELLS, *SOME))
def test_every_architecture(tmp_path, method, architecture):
    compare(tmp_path / "out", architecture, method)


def test_an_export_is_the_same_bytes_each_time(tmp_path):
    adapter, _ = exported(tmp_path / "one", "bert", SPECS["ranks"])
    adapter.export(tmp_path / "two")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
