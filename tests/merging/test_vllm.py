"""Adapters as LoRAs for vLLM: equal in peft where copied, near and told where converted."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.interchange.peft.files import CONFIG_FILE, TENSORS_FILE, write_peft
from adapterhub.interchange.peft.vllm import RANKS, try_vllm
from adapterhub.merging.vllm import blocking_vllm, in_vllm
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.own_models import expert_logits, expert_model, redraw
from tests.kit.selection import long_table
from tests.kit.server import standing_in
from tests.kit.tiny_adapters import text_logits, write_language_model, write_noisy

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


# By case: the architecture, the method, what is refused, and whether it is converted.
CHECKED = {
    "rank": ("llama", "lora(rank=24)", ["--max-lora-rank 32"], False),
    "too high": ("llama", "rslora(rank=1024)", ["at most 512"], False),
    "ranks": ("llama", {"lora": {"ranks": {"attn.q": 4}}}, [], False),
    "dora": ("llama", "dora", [], True),
    "ia3": ("llama", "ia3", [], True),
    "both": ("llama", ["lora", "ia3"], [], True),
    "whole": ("llama", ["lora", "chosen"], ["chosen: trains parameters"], False),
    "bias": ("qwen2", ["lora", "bitfit"], ["bitfit: trains parameters"], False),
    "prefix": ("llama", "prefix", ["prefix at decoder.attn.kv: it adds keys"], True),
    "bottleneck": ("llama", ["lora", "pfeiffer"], ["pfeiffer at decoder"], True),
    "two stacks": ("t5", "lora", ["T5ForConditionalGeneration: vLLM"], False),
    "not on a list": ("gpt_bigcode", "lora", [], False),
    "none": ("llama", "lora(rank=16)", [], False),
}


def test_what_vllm_does_not_serve_is_listed_before_training(subtests):
    for case, (architecture, spec, reasons, is_converted) in CHECKED.items():
        with subtests.test(case=case):
            with torch.device("meta"):
                task = "seq2seq" if architecture == "t5" else "causal-lm"
                model = tiny_models.model(architecture, task)
            found, converted = blocking_vllm(model, spec)
            assert converted == is_converted
            for reason in reasons:
                assert any(reason in line for line in found), (reason, found)
            assert bool(found) == bool(reasons), found
            assert not hasattr(model, "_adapterhub")
    assert max(RANKS) == 512


def saved(folder: Path, architecture: str, spec: object) -> tuple[Path, Path]:
    """Save a backbone and an adapter; return their folders."""
    write_language_model(folder / architecture, architecture)
    adapter = write_noisy(folder / "adapter", folder / architecture, spec)
    return folder / architecture, adapter


def compare(backbone: Path, adapter: Path, exported: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the backbone, with our adapter, and with its export in peft."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    bare = text_logits(model)
    loaded = ah.load(model, adapter)
    ours = text_logits(model)
    loaded.detach()
    return bare, ours, text_logits(peft.PeftModel.from_pretrained(model, exported).eval())


COPIED = {
    "lora": "lora(rank=4)",
    "ranks": {"lora": {"rank": 6, "ranks": {"attn.q": 2}, "sites": ["attn.q", "attn.v", "ffn.up"]}},
    "rslora": "rslora(rank=4)",
    "pissa": "pissa(rank=4)",
    "two": ["lora(rank=4)", "rslora(rank=3, sites=['attn.q'])"],
}
CELLS = [(name, "llama") for name in COPIED] + [("ranks", "phi3"), ("ranks", "opt")]


@long_table(("method", "architecture"), CELLS, 3)
def test_a_copy_computes_the_same_in_peft(tmp_path, method, architecture):
    backbone, adapter = saved(tmp_path, architecture, COPIED[method])
    export = in_vllm(adapter, backbone=str(backbone))
    assert (export.lost, export.missed, export.notes, export.template) == (0, 0, [], None)
    export.write(tmp_path / "out")
    bare, ours, theirs = compare(backbone, adapter, tmp_path / "out")
    assert not torch.allclose(bare, ours, atol=1e-3)
    assert torch.allclose(ours, theirs, atol=2e-5)
    check_form(tmp_path / "out", export.rank)
    (backbone / "model.safetensors").unlink()  # copies need no weights
    assert in_vllm(adapter).rank == export.rank


def check_form(folder: Path, rank: int, by_module: bool = True) -> None:
    """Check what every release of vLLM requires of the files."""
    config = json.loads((folder / CONFIG_FILE).read_bytes())
    assert config["peft_type"] == "LORA"
    assert config["r"] == rank
    assert {"r", "lora_alpha", "target_modules"} <= config.keys()
    refused = {"rank_pattern", "alpha_pattern", "modules_to_save", "use_dora", "use_rslora", "bias"}
    assert not refused & config.keys()
    for name, tensor in load_file(folder / TENSORS_FILE).items():
        assert name.startswith("base_model.model.")
        factor = name.split(".")[-2]
        assert name.endswith(".weight")
        assert factor in ("lora_A", "lora_B")
        count = tensor.shape[0 if factor == "lora_A" else 1] // rank
        assert (count == 1) == (by_module or not name.split(".lora_")[0].endswith(STACKED)), name


STACKED = (".experts", ".experts.base_layer")


# All updates have full rank; 32 is the size of the model.
CONVERTED = {"dora": "dora(rank=2)", "both": ["lora(rank=2)", "ia3"]}


@pytest.mark.parametrize("method", CONVERTED)
def test_a_conversion_of_full_rank_is_equal_and_a_smaller_one_tells_its_error(tmp_path, method):
    backbone, adapter = saved(tmp_path, "llama", CONVERTED[method])
    whole = in_vllm(adapter, backbone=str(backbone), max_rank=64)
    whole.write(tmp_path / "whole")
    _, ours, theirs = compare(backbone, adapter, tmp_path / "whole")
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert whole.lost < 1e-5
    with pytest.raises(MismatchError, match="as a LoRA of rank 4, noisy loses") as refused:
        in_vllm(adapter, backbone=str(backbone), max_rank=4)
    assert "--max-lost" in str(refused.value)
    part = in_vllm(adapter, backbone=str(backbone), max_rank=4, max_lost=1.0)
    part.write(tmp_path / "part")
    bare, ours, theirs = compare(backbone, adapter, tmp_path / "part")
    missed = float((theirs - ours).norm() / (ours - bare).norm())
    assert 0.01 < part.missed < 1
    assert 0.2 * part.missed < missed < 5 * part.missed, "of other tokens"
    assert f"loses up to {part.lost:.2%}" in part.notes[0]
    assert part.notes[0] in (tmp_path / "part" / "README.md").read_text()
    check_form(tmp_path / "part", 4)


@pytest.mark.parametrize(
    ("architecture", "spec", "reason"),
    [("qwen2", "ia3", "ia3: changes .*bias and 3 more; vLLM has no biases"),
     ("llama", ["lora", "norms"], "norms: trains parameters")],
)  # fmt: skip
def test_what_is_no_lora_is_refused_by_name(tmp_path, architecture, spec, reason):
    backbone, adapter = saved(tmp_path, architecture, spec)
    with pytest.raises(MismatchError, match=reason):
        in_vllm(adapter, backbone=str(backbone), max_lost=1.0)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_an_installed_vllm_tells_which_models_take_lora(architecture):
    """One with LoRA, one without, and one that vLLM runs by the code of transformers."""
    with torch.device("meta"):
        model = tiny_models.model(architecture, "causal-lm")
    with standing_in():
        found, _ = blocking_vllm(model, "lora")
    refused = ["GPT2LMHeadModel: the installed vLLM has no LoRA on it"]
    assert found == (refused if architecture == "gpt2" else [])
    assert blocking_vllm(model, "lora") == ([], False), "without vLLM"


# By type: whether each expert has modules of its own, and whether peft reads them.
EXPERTS = {
    "mixtral": (True, True),
    "qwen3_moe": (True, True),
    "nemotron_h": (True, False),  # without a gate
    "gpt_oss": (False, True),
    "granitemoe": (False, True),
    "qwen3_5_moe_text": (False, True),  # by vLLM's class, in place of its checkpoint
}


def add_by_module(model, tensors, scale, folder):
    """Add updates to the modules of a checkpoint, and load it, as vLLM does."""
    weights = revert_weight_conversion(model, model.state_dict())
    for name in [name for name in tensors if ".lora_A." in name]:
        high = tensors[name.replace("lora_A", "lora_B")]
        path = name.replace(".lora_A", "")
        if path not in weights:  # Nemotron H: vLLM maps both prefixes
            path = path.replace("model.", "backbone.", 1)
        weights[path] = weights[path] + scale * high @ tensors[name]
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def add_stacked(model, tensors, scale, folder):
    """Add updates to stacked weights by the reshapes of vLLM's `_stack_moe_lora_weights`."""
    model = copy.deepcopy(model)
    for name in [name for name in tensors if ".lora_A." in name]:
        low, high = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        path = name.removesuffix(".lora_A.weight")
        module = model.get_submodule(path.removesuffix(".base_layer"))
        if path.endswith((".experts", ".base_layer")):
            own = "gate_up_proj" if path.endswith(".base_layer") else "down_proj"
            weight = module.get_parameter(own)
            count = len(weight)
            low = low.reshape(count, -1, low.shape[-1])
            high = high.reshape(len(high), -1, count).permute(2, 0, 1)
        else:
            weight = module.weight
        delta = scale * high @ low
        with torch.no_grad():
            weight += delta.mT if getattr(module, "is_transposed", False) else delta
    return model


@pytest.mark.filterwarnings("ignore:the files or the model do not name their backbone")
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_have_the_form_that_vllm_takes(tmp_path, model_type):
    by_module, in_peft = EXPERTS[model_type]
    model = expert_model(model_type)
    options = {"rank": 3, "ranks": {"ffn.experts.down": 2}}
    adapter = ah.attach(model, {"lora": {"sites": ["ffn.experts.*", "attn.q"], **options}})
    redraw(adapter)
    with torch.no_grad():
        expected = expert_logits(model)
    with standing_in():
        files, problems = try_vllm(adapter.export_source())
    assert problems == []
    trained = adapter.count()
    adapter.detach()
    write_peft(tmp_path / "lora", files)
    check_form(tmp_path / "lora", 3, by_module)
    add = add_by_module if by_module else add_stacked
    scale = files.config["lora_alpha"] / files.config["r"]
    with torch.no_grad():
        served = add(model, files.tensors, scale, tmp_path / "backbone")
        torch.testing.assert_close(expert_logits(served), expected, atol=2e-5, rtol=1e-4)
        ours = ah.load(model, tmp_path / "lora")
        torch.testing.assert_close(expert_logits(model), expected, atol=2e-5, rtol=1e-4)
        assert ours.count() < 1.3 * trained  # of one rank now
        ours.detach()
        if in_peft:
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "lora").eval()
            torch.testing.assert_close(expert_logits(theirs), expected, atol=2e-5, rtol=1e-4)


def test_a_layer_has_updates_of_all_projections_of_its_experts(tmp_path):
    spec = "lora(rank=2, sites=['ffn.experts.down'])"
    backbone, adapter = saved(tmp_path, "mixtral", spec)
    export = in_vllm(adapter, backbone=str(backbone))
    assert export.notes == []
    names = {name.split(".experts.")[1] for name in export.files.tensors if ".layers.0." in name}
    assert len(names) == 2 * 3 * 4  # factors, projections and experts
    with standing_in():
        assert blocking_vllm(expert_model("gpt_oss"), spec) == ([], False)
        found, _ = blocking_vllm(expert_model("mixtral"), "lora(sites=['ffn.router'])")
    assert found == ["decoder.ffn.router: vLLM has no LoRA there"]
    found, _ = blocking_vllm(expert_model("mixtral"), [spec, "dora"])
    assert found == ["lora at decoder.ffn.experts.down: only updates of projections are exported"]


@pytest.mark.parametrize("method", ["lora(rank=2)", "dora(rank=2)"])
def test_the_backbone_is_that_of_the_adapter(tmp_path, method):
    _, adapter = saved(tmp_path, "llama", method)
    write_language_model(tmp_path / "other", "llama", seed=5)
    with pytest.raises(MismatchError, match="trained on a different backbone"):
        in_vllm(adapter, backbone=str(tmp_path / "other"))


def test_a_template_of_its_own_is_told_and_written(tmp_path):
    backbone, adapter = saved(tmp_path, "llama", "lora(rank=2)")
    tokenizer = word_tokenizer("<s>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(backbone)
    export = in_vllm(adapter, backbone=str(backbone))
    export.write(tmp_path / "out")
    export.write(tmp_path / "out", overwrite=True)
    assert "--chat-template" in export.notes[0]
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == export.template
