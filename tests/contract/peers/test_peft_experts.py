"""Routed experts against peft's `target_parameters`: read, computed, merged, written and read back.

One process runs both libraries on the same tiny model of each type with stacked weights of experts.
"""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.interchange.peft.experts import unpacked
from adapterhub.interchange.peft.files import TENSORS_FILE
from tests.kit.own_models import TYPES, expert_logits, expert_model, redraw
from tests.kit.selection import long_table

pytestmark = [
    # peft asks transformers for an attribute that it renames.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*do not name their backbone:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not read a made batch:UserWarning"),
    # peft applies patterns to parameters, and says that it does not.
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),
]
VARIANTS = {
    "plain": {},
    "ranks": {"rank_pattern": {"down_proj": 2}, "use_rslora": True},
    "alphas": {"alpha_pattern": {r"experts\..*": 7}, "bias": "all"},
}


def peft_model(model, name="default", wrapped=None, **options):
    """Adapt all weights of experts and routers, and some projections, with other values."""
    sites = ah.anatomy_of(model).sites.values()
    held = {f"{s.host.rpartition('.')[2]}.{s.held.parameter}" for s in sites if s.held}
    queries = {s.host.rpartition(".")[2] for s in sites if s.role == "attn.q" and not s.part}
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 5, "target_modules": sorted(queries)}, **options,
        target_parameters=sorted(held),
    )  # fmt: skip
    if wrapped is None:
        wrapped = peft.get_peft_model(copy.deepcopy(model), config, name)
    else:
        wrapped.add_adapter(name, config)
    torch.manual_seed(len(name))
    with torch.no_grad():
        for path, parameter in wrapped.named_parameters():
            if f".{name}." in f"{path}." or (parameter.requires_grad and "bias" in path):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return wrapped.eval()


@torch.no_grad()
def assert_same(model, theirs):
    found, expected = expert_logits(model), expert_logits(theirs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def from_peft(model, folder):
    """Load a checkpoint by peft, on a copy of a model."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def numbers(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())


def check_gradients(adapter, theirs, ours_out, theirs_out):
    """Compare the gradients of experts' factors, which peft packs in two matrices."""
    ours_out.square().sum().backward()
    theirs_out.square().sum().backward()
    for placed in adapter.placed:
        if not (placed.site.held and placed.site.held.experts):
            continue
        wrapper = theirs.get_submodule(f"base_model.model.{placed.site.host}")
        while wrapper.parameter_name != placed.site.held.parameter:
            wrapper = wrapper.base_layer
        packs = [each["default"].weight.grad for each in (wrapper.lora_A, wrapper.lora_B)]
        low, high = unpacked(placed.site, wrapper.get_base_layer(), *packs)
        torch.testing.assert_close(placed.module.A.grad, low, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(placed.module.B.grad, high, atol=1e-3, rtol=1e-3)


CELLS = [(name, [*VARIANTS][i % len(VARIANTS)]) for i, name in enumerate(TYPES)]


@long_table(("model_type", "variant"), CELLS, 4, nightly=2)
def test_a_peft_adapter_of_experts_stays_low_rank(model_type, variant, tmp_path):
    model = expert_model(model_type)
    theirs = peft_model(model, **VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "theirs")
    adapter = ah.load(model, tmp_path / "theirs")
    assert {"lora", "rslora"} & {method.name for method in adapter.methods}
    ours_out, theirs_out = expert_logits(model), expert_logits(theirs)
    torch.testing.assert_close(ours_out, theirs_out, atol=2e-5, rtol=1e-4)
    check_gradients(adapter, theirs, ours_out, theirs_out)
    adapter.save(tmp_path / "ours")
    stored = numbers(tmp_path / "ours" / "adapter.safetensors")
    assert stored == numbers(tmp_path / "theirs" / TENSORS_FILE)
    adapter.export(tmp_path / "back")
    files = [load_file(tmp_path / name / TENSORS_FILE) for name in ("theirs", "back")]
    assert files[0].keys() == files[1].keys()
    if variant != "alphas":  # peft may divide by another alpha, with the same products
        assert all(torch.equal(files[1][name], tensor) for name, tensor in files[0].items())
    ah.detach(model)
    assert_same(from_peft(model, tmp_path / "back"), theirs)
    ah.load(model, tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(expert_logits(model), ours_out)
        ah.merge(model, tolerance=1e-2)
        merged = theirs.merge_and_unload().state_dict()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)
        ah.unmerge(model)
    ah.detach(model)


def test_files_from_before_transformers_stacked_experts(tmp_path):
    """Mixtral as in transformers 4: a LoRA for each projection of each expert, and for routers."""
    model = expert_model("mixtral")
    rank, config = 2, model.config
    sizes = {"w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}
    modules = {"block_sparse_moe.gate": (32, 4), "self_attn.q_proj": (32, 32)}
    for expert in range(config.num_local_experts):
        modules |= {f"block_sparse_moe.experts.{expert}.{n}": size for n, size in sizes.items()}
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (d_in, d_out) in modules.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = 0.2 * torch.randn(rank, d_in)
            tensors[f"{path}.lora_B.weight"] = 0.2 * torch.randn(d_out, rank)
    save_file(tensors, tmp_path / TENSORS_FILE, metadata={"format": "pt"})
    names = [*sizes, "gate", "q_proj"]
    lora = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=names, inference_mode=True)
    lora.save_pretrained(tmp_path)
    theirs = from_peft(model, tmp_path)
    adapter = ah.load(model, tmp_path)
    assert_same(model, theirs)
    adapter.save(tmp_path / "ours")
    stored = numbers(tmp_path / "ours" / "adapter.safetensors")
    # Gate and up become one projection of twice the rank, whose B has zeros.
    zeros = 2 * rank * 48 * config.num_local_experts * config.num_hidden_layers
    assert stored == numbers(tmp_path / TENSORS_FILE) + zeros
    adapter.detach()


def test_a_parameter_that_is_no_site_is_stored_whole(tmp_path):
    model = expert_model("gpt_oss")
    names = ["experts.gate_up_proj_bias", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="bias is not a site: its update is stored as a whole"):
        adapter = ah.load(model, tmp_path)
    assert_same(model, theirs)
    stored = {path: t.numel() for path, t in adapter.tensors().items() if "bias" in path}
    assert sum(stored.values()) == sum(
        p.numel() for n, p in model.named_parameters() if n.endswith("gate_up_proj_bias")
    )
    adapter.detach()


CONFIGURATIONS = {
    "both": {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    "one": {"target_parameters": ["mlp.experts.down_proj", "gate.weight", "k_proj.weight"]},
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_trains_what_it_trains_in_peft(case):
    model = expert_model("qwen2_moe")
    config = peft.LoraConfig(r=2, lora_alpha=6, **CONFIGURATIONS[case])
    adapter = ah.attach(model, config)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    trained = {path for path, p in theirs.named_parameters() if p.requires_grad}
    assert adapter.count() == sum(theirs.get_parameter(path).numel() for path in trained)
    hosts = {path.split(".base_layer")[0].split(".lora_")[0] for path in trained}
    assert {f"base_model.model.{placed.site.host}" for placed in adapter.placed} == hosts
    adapter.detach()


EXPORTED = {
    "shared": "lora(sites=[ffn.experts.*], rank=2, experts=shared, dropout=0.1)",
    "blocks": "bdlora(sites=[ffn.experts.*, attn.q], rank=4, blocks=2)",
    "two": ["lora(sites=[ffn.experts.*], rank=2)", "rslora(sites=[ffn.experts.down, ffn.router])"],
}


@pytest.mark.parametrize("case", EXPORTED)
def test_what_is_trained_here_is_exported(case, tmp_path):
    model = expert_model("gpt_oss")
    adapter = ah.attach(model, EXPORTED[case])
    redraw(adapter)
    adapter.export(tmp_path / "peft")
    ours = copy.deepcopy(model)
    adapter.detach()
    assert_same(from_peft(model, tmp_path / "peft"), ours)


def test_other_updates_of_held_weights_are_not_exported(tmp_path):
    model = expert_model("mixtral")
    adapter = ah.attach(model, "ia3(sites=[ffn.experts.*, ffn.router])")
    with pytest.raises(MismatchError, match="cannot be exported") as error:
        adapter.export(tmp_path / "peft")
    assert error.value.offenders == tuple(
        f"ia3 at decoder.ffn.{role}: peft adapts such weights by LoRA only"
        for role in ("experts.down", "experts.gate_up", "router")
    )
    adapter.detach()


def test_variants_that_peft_has_at_modules_only_are_refused(tmp_path):
    model = expert_model("mixtral")
    peft_model(model, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for option, value in {"alora_invocation_tokens": [7], "init_lora_weights": "pissa"}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {option: value}))
        with pytest.raises(MismatchError, match=option) as error:
            ah.load(model, tmp_path)
        assert any("experts" in line for line in error.value.offenders)
