"""Backbones in FP8, as checkpoints and as transformers' layers, with a kernel that a CPU has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

import adapterhub as ah
from tests.kit.fixtures import word_tokenizer

BLOCK = (16, 8)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def encode(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Return the codes of a weight, and the scale of each block."""
    rows, columns = (math.ceil(n / size) for n, size in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[at].abs().max().clamp_min(1e-6) / LARGEST
            codes[at] = weight[at] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def float8_layer(linear: nn.Linear, block: tuple[int, int] = BLOCK) -> FP8Linear:
    """Return a layer of transformers with the weight of a plain one in FP8."""
    bias = linear.bias is not None
    layer = FP8Linear(linear.in_features, linear.out_features, block, has_bias=bias)
    codes, scales = encode(linear.weight.detach(), block)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scales)
    layer.bias = linear.bias
    return layer


def save_checkpoint(model: PreTrainedModel, folder: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Save a model with its projections in FP8, as DeepSeek's and Qwen's checkpoints have them."""
    model.save_pretrained(folder)
    word_tokenizer("<s>", "").save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = encode(tensor, block)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def float8_model(folder: Path) -> PreTrainedModel:
    """Return the model of a checkpoint as a GPU has it: with layers that hold codes."""
    loaded: Any = ah.load_backbone(str(folder), task="causal-lm", dtype="fp32")
    model, tensors = loaded[0], load_file(folder / "model.safetensors")
    for path, module in list(model.named_modules()):
        if f"{path}.weight_scale_inv" in tensors:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, float8_layer(module))
    model.load_state_dict(tensors, strict=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model.config.quantization_config = config["quantization_config"]
    return model.requires_grad_(False)


def float8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers compute on a CPU: with decoded weights, and activations as they are.

    transformers passes bias and blocks by position or by name, in its releases.
    """

    def linear(
        x: Tensor, weight: Tensor, scales: Tensor, block_size: Any = None, bias: Any = None,
        *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        for axis, size in enumerate(block_size):
            scales = scales.repeat_interleave(size, axis)
        decoded = weight.float() * scales[: weight.shape[0], : weight.shape[1]]
        return nn.functional.linear(x, decoded.to(x.dtype), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
