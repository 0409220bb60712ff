"""The tokens at which the generation of a model stops: `eos_token_id` of its generation config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EndTokens = int | list[int] | None
"""As a generation config has them."""


def end_tokens(model: PreTrainedModel) -> EndTokens:
    """Return the tokens at which the generation of a model stops."""
    ends: EndTokens = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ends


def set_end_tokens(model: PreTrainedModel, ends: EndTokens) -> None:
    """Let the generation of a model stop at these tokens."""
    config: Any = getattr(model, "generation_config", None)
    if config is not None:
        config.eos_token_id = ends


def with_stops(ends: EndTokens, stops: Iterable[int]) -> list[int]:
    """Return the tokens at which generation stops, and others, each once.

    Args:
        ends: those of a model.
        stops: those of adapters.
    """
    own = [ends] if isinstance(ends, int) else ends or ()
    return [*dict.fromkeys([*own, *stops])]
