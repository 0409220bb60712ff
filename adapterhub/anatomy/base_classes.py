"""The classes of transformers for the base model of a configuration."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel


def base_classes(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes that AutoModel has for a configuration; empty if it has none."""
    return _classes(transformers.AutoModel, config)


def new_base_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the base model of a configuration, or that of a task for a type with no other.

    Raises:
        ValueError: no auto class of transformers has the configuration.
    """
    if classes := base_classes(config):
        return classes[0](config)
    for name in dir(transformers):
        if name.startswith("AutoModelFor"):
            for each in _classes(getattr(transformers, name), config):
                return each(config).base_model  # type: ignore[return-value]
    raise ValueError(f"no auto class of transformers has a {type(config).__name__}")


def _classes(auto: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    found = auto._model_mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)
