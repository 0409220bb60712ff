"""A Llama with random weights on its device: quantized to nf4, or in bf16."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

EIGHT_B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


def build(shape: dict[str, Any], device: str, quantized: bool = True) -> LlamaForCausalLM:
    """Build a random model, quantized layer by layer: it is never in bf16 as a whole."""
    config = LlamaConfig(**shape, use_cache=False, pad_token_id=0)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for path, module in list(model.named_modules()):
        if quantized and isinstance(module, nn.Linear) and path != "lm_head":
            four = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, quant_type="nf4",
                compute_dtype=torch.bfloat16, compress_statistics=True, device="meta",
            )  # fmt: skip
            weight = torch.empty(module.weight.shape, dtype=torch.bfloat16).to(device)
            weight.normal_(0, 0.02)
            four.weight = bnb.nn.Params4bit(
                weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=four
            ).to(device)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, four)
    _fill(model, device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.is_loaded_in_4bit = quantized  # otherwise peft treats the layers as unquantized
    return model


def _fill(model: nn.Module, device: str) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
                value = value.fill_(1) if value.ndim == 1 else value.normal_(0, 0.02)
                module._parameters[name] = nn.Parameter(value)
