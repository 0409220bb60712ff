"""Golden vectors of UniPELT, computed by the `adapters` library.

    pip install adapters==1.3.0 transformers==4.57.6 torch==2.13.0
    python tests/golden/adapters/make_unipelt.py

Each file holds a tiny random backbone (`backbone.`), the adapter's tensors by the names of our
adapter files (`adapter.`), the inputs (`input.`) and the logits. `adapters` takes the mean of a
gate over the sequence. The file of BERT holds that. In those of T5 and Llama the gates do not
depend on the tokens (w is zero, b is not), so that the mean is the gate of each token. The
bottleneck is configured to read the sublayer's output before the residual connection, as ours does.
Attention is eager, because with `sdpa` and no mask `adapters` lets torch align the causal triangle
with the prefix, and T5's relative position biases are zero, because there it counts the prefix as
positions.
"""

from __future__ import annotations

import re
from pathlib import Path

import adapters
import torch
from adapters import ConfigUnion, LoRAConfig, PrefixTuningConfig, SeqBnConfig
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

RANK, LENGTH, SIZE, WIDTH = 4, 5, 8, 16
BERT = {
    "vocab_size": 32, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "initializer_range": 0.15,
    "num_labels": 3,
}  # fmt: skip
T5 = {
    "vocab_size": 32, "d_model": WIDTH, "num_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8,
    "decoder_start_token_id": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": 32, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 16,
    "initializer_range": 0.15, "attn_implementation": "eager",
}  # fmt: skip
# Our role of each of their modules, by its path in a layer.
ROLES = {
    "attention.self.query": "attn.q", "attention.self.value": "attn.v", "output": "ffn",
    "attention.self.prefix_tuning": "attn.kv",
    "self_attn.q_proj": "attn.q", "self_attn.v_proj": "attn.v",
    "self_attn.prefix_tuning": "attn.kv",
    "0.SelfAttention.q": "attn.q", "0.SelfAttention.v": "attn.v",
    "0.SelfAttention.prefix_tuning": "attn.kv", "1.EncDecAttention.q": "cross.q",
    "1.EncDecAttention.v": "cross.v", "1.EncDecAttention.prefix_tuning": "cross.kv",
}  # fmt: skip
PARAMETERS = {
    "loras.u.lora_A": "lora.update.A", "loras.u.lora_B": "lora.update.B",
    "adapters.u.adapter_down.0": "pfeiffer.update.down",
    "adapters.u.adapter_up": "pfeiffer.update.up", "loras.u.gate": "lora.gate",
    "adapters.u.gate": "pfeiffer.gate", "prefix_gates.u": "prefix.gate",
}  # fmt: skip
PLACE = re.compile(
    r"(?:(encoder|decoder)\.|model\.|bert\.encoder\.)+(?:layers?|block)\.(\d+)\.(?:layer\.)?"
    r"(.+?)\.((?:loras|adapters|prefix_gates)\.u.*?)(\.weight|\.bias)?$"
)
# Where the prefixes of all layers of a stack are together.
POOLS = {"encoder_prefix": ("encoder", "attn.kv"), "self_prefix": ("decoder", "attn.kv"),
         "cross_prefix": ("decoder", "cross.kv")}  # fmt: skip


def our_name(name: str, stack: str) -> str:
    """Our name of one of their parameters."""
    named, layer, path, parameter, end = PLACE.fullmatch(name).groups()
    # In T5 it is the last module of a layer, whose number differs.
    role = ROLES.get(path, "ffn")
    return f"{named or stack}.{layer}.{role}.{PARAMETERS[parameter]}{end or ''}"


def our_tensors(model, stack: str) -> dict[str, torch.Tensor]:
    """The adapter's tensors by our names; `stack` where the model has but one."""
    ours = {}
    for name, tensor in model.named_parameters():
        if pool := re.search(r"prefix_tunings\.u\.(\w+)\.control_trans", name):
            in_stack, role = POOLS[pool[1]]
            prefixes = tensor.view(LENGTH, 2, 2, -1).permute(1, 2, 0, 3)  # two layers
            for layer, prefix in enumerate(prefixes):
                ours[f"{stack or in_stack}.{layer}.{role}.prefix.prefix.prefix"] = prefix
        elif ".u." in name:
            ours[our_name(name, stack)] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in ours.items()}


def make(name: str, model, stack: str, gates_read: bool, **inputs: torch.Tensor) -> None:
    """Write one file."""
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False):
            module.relative_attention_bias.weight.data.zero_()
    backbone = {f"backbone.{k}": tensor.clone() for k, tensor in model.state_dict().items()}
    adapters.init(model)
    bottleneck = SeqBnConfig(
        reduction_factor=WIDTH // SIZE, original_ln_before=False, use_gating=True
    )
    prefix = PrefixTuningConfig(flat=True, prefix_length=LENGTH, use_gating=True)
    lora = LoRAConfig(r=RANK, use_gating=True)
    model.add_adapter("u", config=ConfigUnion(lora, prefix, bottleneck))
    model.set_active_adapters("u")
    model.eval()
    with torch.no_grad():
        for parameter_name, tensor in model.named_parameters():
            if ".u." in parameter_name:
                tensor.normal_(std=0.5)
                if "gate" in parameter_name and "weight" in parameter_name and not gates_read:
                    tensor.zero_()
        logits = model(**inputs).logits
        for parameter_name, tensor in model.named_parameters():
            if ".u." in parameter_name and (gates_read or "gate" not in parameter_name):
                kept = tensor.clone()
                tensor.zero_()
                changed = (model(**inputs).logits - logits).abs().max()
                assert changed > 1e-4, f"{parameter_name} has no effect: {changed}"
                tensor.copy_(kept)
    tensors = backbone | {f"adapter.{k}": t for k, t in our_tensors(model, stack).items()}
    tensors |= {f"input.{k}": t for k, t in inputs.items()} | {"logits": logits}
    path = Path(__file__).with_name(f"unipelt-{name}.safetensors")
    save_file({k: t.contiguous() for k, t in tensors.items()}, path)
    path.with_suffix(".json").write_text(model.config.to_json_string())


def main() -> None:
    """Write all files."""
    torch.manual_seed(0)
    ids = torch.randint(3, 32, (2, 7))
    bert = BertForSequenceClassification(BertConfig(**BERT))
    make("bert", bert, "encoder", True, input_ids=ids)
    t5 = T5ForConditionalGeneration(T5Config(**T5))
    make("t5", t5, "", False, input_ids=ids, decoder_input_ids=ids[:, :4])
    make("llama", LlamaForCausalLM(LlamaConfig(**LLAMA)), "decoder", False, input_ids=ids)


if __name__ == "__main__":
    main()
