"""The cells of the matrix method x architecture: those that work, and those refused on purpose."""

from __future__ import annotations

import pytest
import tiny_models

from adapterhub.errors import AttachError, ConfigError, SiteError
from adapterhub.methods import METHODS, Method
from adapterhub.methods._spec import parse_methods

# Their attention is not on transformers' attention interface, so prefixes cannot enter it.
OFF_INTERFACE = (
    "deberta", "deberta-v2", "mpnet", "xlnet", "openai-gpt", "gpt_neo", "gptj", "bloom", "xglm",
)  # fmt: skip
# Bias terms are what bitfit trains.
WITHOUT_BIAS = (
    "modernbert", "llama", "mistral", "qwen3", "olmo", "olmo2", "gemma3_text", "phi3", "mixtral",
    "t5", "mt5", "umt5",
)  # fmt: skip
PREFIXED = ("prefix", "mam", "unipelt")
UPDATES = ("lora", "rslora", "lora-plus", "dora", "pissa")
REFUSED: dict[tuple[str, str], type[Exception]] = {
    **{(method, a): SiteError for method in PREFIXED for a in OFF_INTERFACE},
    **{("bitfit", a): SiteError for a in WITHOUT_BIAS},
    # XLNet's projections are tensors, not modules.
    **{(method, "xlnet"): SiteError for method in UPDATES},
    # The norms of OLMo have no parameters.
    ("norms", "olmo"): SiteError,
    ("staged", "olmo"): ConfigError,
    # Its layers share modules.
    ("scalar-mix", "albert"): SiteError,
    # Without a task head nothing would train.
    **{("head", a): AttachError for a in tiny_models.WITHOUT_CLASSIFIER},
}
ALL = [(m, a) for m in sorted(METHODS) for a in tiny_models.ARCHITECTURES]
CELLS = [cell for cell in ALL if cell[1] in tiny_models.MATRIX and cell not in REFUSED]
matrix = pytest.mark.parametrize(("method", "architecture"), CELLS)


def example(method: str) -> Method:
    """A method with options that fit any backbone (its defaults, but for what needs more), or that
    of a spec."""
    if method in METHODS:
        return METHODS[method].example()
    (chosen,) = parse_methods(method)
    return chosen
