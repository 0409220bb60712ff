"""A LoRA in a GGUF file: its updates, with rows in llama.cpp's order, and what is refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

import adapterhub as ah
from adapterhub.errors import ConfigError, MismatchError, OutputError
from adapterhub.interchange.gguf_lora import _IN_PAIRS, ARCHITECTURES
from tests.kit import tiny_models
from tests.kit.selection import long_table

gguf = pytest.importorskip("gguf")
EVERYWHERE = "sites=['attn.*', 'ffn.*']"


# Sizes by the names that the configurations of tiny_models do not have.
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": 64,
    "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
EXPERTS = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")


def language_model(kind, **options):
    if kind in tiny_models.ARCHITECTURES:
        return tiny_models.model(kind, "causal-lm", **options)
    usual = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **options)).eval()


def factors_in(file):
    """Read A and B of each weight."""
    tensors = {t.name: torch.tensor(t.data.copy()) for t in gguf.GGUFReader(file).tensors}
    names = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    return {name: (tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]) for name in names}


def updates_in(file, model):
    """Read the update of each weight, with its rows in the order of transformers."""
    return {
        # llama.cpp looks rows of A up for tokens, and multiplies them by B.
        name: low @ high.T
        if name == "token_embd.weight"
        else in_transformers_order(high @ low, name, model)
        for name, (low, high) in factors_in(file).items()
    }


def in_transformers_order(rows, name, model):
    """Undo llama.cpp's order as transformers does when it reads a GGUF file, or as its models do.

    A fused projection there has all queries, then keys, then values. Where those of each row stand
    here is found by the code of the model that takes them apart.
    """
    config = model.config
    if config.model_type in _IN_PAIRS and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads, config.num_key_value_heads
        processor = LlamaTensorProcessor(config=config.to_dict())
        chosen = heads[: 1 + (".attn_k." in name)]
        return torch.tensor(processor._reverse_permute_weights(rows.numpy(), *chosen))
    if ".attn_qkv." not in name or config.model_type not in ("falcon", "bloom", "gpt_neox"):
        return rows
    numbered = torch.arange(len(rows), dtype=torch.float32)[None, None]
    (attention, *_) = (m for m in model.modules() if hasattr(m, "query_key_value"))
    if config.model_type == "gpt_neox":
        parts = [p[0] for p in numbered.view(1, 1, -1, 3 * attention.head_size).chunk(3, dim=-1)]
    elif config.model_type == "bloom":
        parts = [part[0].transpose(0, 1) for part in attention._reshape(numbered)]
    else:
        parts = [part[0] for part in attention._split_heads(numbered)]
    order = torch.cat([part.flatten() for part in parts]).long()
    order = torch.tensor(list(dict.fromkeys(order.tolist())))  # Falcon repeats keys and values
    return torch.empty_like(rows).index_copy(0, order, rows)


SPECS = (
    "lora(rank=3, alpha=5)", f"lora(rank=2, {EVERYWHERE})", "rslora(rank=4)", "pissa(rank=2)",
    "lora(ranks={'attn.q': 3, 'attn.v': 1}, sites=[attn.q, attn.v])",
    ["lora(rank=2)", "rslora(rank=1, sites=[attn.k])"],
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_file_has_the_updates_that_merging_adds(spec, tmp_path):
    check_updates(tiny_models.model("llama", "causal-lm"), spec, tmp_path / "a.gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    found = {name: field.contents() for name, field in fields.items() if "." in name}
    expected = {"general.architecture": "llama", "general.type": "adapter", "general.name": "a"}
    expected |= {"adapter.type": "lora", "adapter.lora.alpha": 0.0}
    assert found.items() >= expected.items()


REFUSED = [
    ("llama", "dora", "DoRA"),
    ("llama", "ia3", "IA3"),
    ("llama", "pfeiffer", "pfeiffer"),
    ("llama", ["lora", "norms"], "norm"),
    ("opt", "lora", "opt"),
    ("mixtral", "lora(sites=['ffn.*'])", "experts"),
    ("gpt2", "lora(sites=[lm_head])", "as embeddings"),
]
FALCONS = [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": False}]


@long_table(
    ("kind", "options"),
    [(kind, {}) for kind in sorted(ARCHITECTURES)] + [("falcon", each) for each in FALCONS],
    nightly=2,
    ids=str,
)
def test_each_architecture_has_its_names_and_order_of_rows(kind, options, tmp_path):
    sites = "['attn.*']" if kind in EXPERTS else "['attn.*', 'ffn.*']"
    model = language_model(kind, **options)
    check_updates(model, f"lora(rank=2, sites={sites})", tmp_path / "a.gguf")


EMBEDDINGS = {
    "llama": "embed_tokens, lm_head", "qwen2": "embed_tokens, lm_head", "gpt2": "wte, lm_head",
    "gpt_neox": "embed_in, lm_head",
}  # fmt: skip


@long_table(("kind", "sites"), EMBEDDINGS.items(), 4)
def test_embeddings_are_transposed_and_the_output_is_a_weight_of_its_own(kind, sites, tmp_path):
    model = language_model(kind, tie_word_embeddings=False)
    check_updates(model, f"lora(rank=2, sites=[{sites}])", tmp_path / "a.gguf")


def check_updates(model, spec, file):
    """Compare the updates of a file with what merging adds to each weight."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapter = ah.attach(model, spec, name="a")
    tiny_models.scramble(adapter)
    adapter.export(file, format="gguf")
    found = updates_in(file, model)
    ah.merge(model, tolerance=1e-3)
    arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[model.config.model_type])
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings and model.get_output_embeddings()
    changed = 0
    for path, weight in model.state_dict().items():
        if tied and path.startswith(("lm_head", "embed_out")):
            continue
        delta = weight - before[path]
        name = names.get_name(path, try_suffixes=(".weight",))
        if name in found:
            if type(model.get_submodule(path.rpartition(".")[0])).__name__ == "Conv1D":
                delta = delta.T
            torch.testing.assert_close(found[name], delta, atol=1e-5, rtol=1e-4)
            changed += 1
        else:
            assert not delta.any(), path
    assert changed == len(found) > 0


@pytest.mark.parametrize(("architecture", "spec", "reason"), REFUSED, ids=str)
def test_what_llama_cpp_cannot_compute_is_refused(architecture, spec, reason, tmp_path):
    model = tiny_models.model(architecture, "causal-lm")
    adapter = ah.attach(model, spec, name="a")
    with pytest.raises(MismatchError, match=reason):
        adapter.export(tmp_path / "a.gguf", format="gguf")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_on_request(tmp_path):
    model, file = tiny_models.model("llama", "causal-lm"), tmp_path / "a.gguf"
    adapter = ah.attach(model, "lora", name="a")
    adapter.export(file, format="gguf")
    with pytest.raises(OutputError, match=r"a\.gguf exists"):
        adapter.export(file, format="gguf")
    adapter.export(file, format="gguf", overwrite=True)
    with pytest.raises(OutputError, match="not the name of a GGUF file"):
        adapter.export(tmp_path / "folder", format="gguf")
    with pytest.raises(ConfigError, match="cannot be exported to 'ggml'"):
        adapter.export(file, format="ggml")
