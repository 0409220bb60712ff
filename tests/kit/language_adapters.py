"""Tiny language models on disk, and adapters of them with noise in each tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.fixtures import word_tokenizer


def write_language_model(folder: Path, architecture: str, seed: int = 0) -> None:
    """Save a language model, with biases that are not zero, and its tokenizer."""
    model = tiny_models.model(architecture, "causal-lm", seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    word_tokenizer("<s>").save_pretrained(folder)


def write_noisy(folder: Path, backbone: Path, spec: object, seed: int = 0) -> Path:
    """Save an adapter."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    torch.manual_seed(seed)
    adapter = ah.attach(model, spec, name="noisy")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            if tensor.requires_grad:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    adapter.save(folder)
    return folder


def text_logits(model: torch.nn.Module) -> Tensor:
    """Compute the logits of two texts."""
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).view(2, 10)).logits
