"""The matrix method x architecture: the supported cells, and those refused by design."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models

import adapterhub as ah
from adapterhub.errors import AttachError, ConfigError, SiteError
from adapterhub.methods import METHODS, Method
from adapterhub.methods._spec import parse_methods

# Its attention is built of `einsum`, which no prefix follows.
WITHOUT_KEYS_AND_VALUES = ("xlnet",)
# bitfit trains bias terms.
WITHOUT_BIAS = (
    "modernbert", "llama", "mistral", "qwen3", "olmo", "olmo2", "gemma3_text", "phi3", "mixtral",
    "t5", "mt5", "umt5", "mpt",
)  # fmt: skip
PREFIX_METHODS = ("prefix", "mam", "unipelt")
LOW_RANK_METHODS = ("lora", "rslora", "lora-plus", "dora", "pissa")
REFUSED: dict[tuple[str, str], type[Exception]] = {
    **{(method, a): SiteError for method in PREFIX_METHODS for a in WITHOUT_KEYS_AND_VALUES},
    **{("bitfit", a): SiteError for a in WITHOUT_BIAS},
    # XLNet's projections are plain tensors, not modules.
    **{(method, "xlnet"): SiteError for method in LOW_RANK_METHODS},
    # OLMo's norms have no parameters.
    ("norms", "olmo"): SiteError,
    ("staged", "olmo"): ConfigError,
    # ALBERT's layers share modules.
    ("scalar-mix", "albert"): SiteError,
    # Without a task head, nothing would train.
    **{("head", a): AttachError for a in tiny_models.WITHOUT_CLASSIFIER},
}
ALL_CELLS = [(m, a) for m in sorted(METHODS) for a in tiny_models.ARCHITECTURES]
CELLS = [cell for cell in ALL_CELLS if cell[1] in tiny_models.MATRIX and cell not in REFUSED]
every_cell = pytest.mark.parametrize(("method", "architecture"), CELLS)


# DeBERTa-v2 applies these projections to its relative positions too, which belong to no row.
SHARED = {"deberta-v2": ("attn.q", "attn.k")}
# A second adapter of the same method with other shapes or sites.
SMALLER = {
    "prefix": "prefix(length=4)",
    "mam": "mam(length=3, size=8)",
    "prompt": "prompt(length=5)",
    "p-tuning": "p-tuning(length=3)",
    "lora": "lora(rank=3, sites=['attn.v', 'attn.o', 'attn'])",
    "pfeiffer": "pfeiffer(size=8, layers='top 1')",
    "ia3": "ia3(sites=['attn.v', 'attn'])",
}


def example(method: str) -> Method:
    """Return a method by its name, with options that fit any backbone, or from a spec."""
    if method in METHODS:
        return METHODS[method].example()
    (parsed,) = parse_methods(method)
    return parsed


def attach_smaller(model: Any, method: str, name: str) -> Any:
    """Attach an adapter with other shapes or sites than `example`, where it can be."""
    try:
        return ah.attach(model, SMALLER.get(method) or example(method), name=name)
    except ah.AdapterhubError:
        return ah.attach(model, example(method), name=name)
