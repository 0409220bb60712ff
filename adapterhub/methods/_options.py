"""Checks of option values, for the `__post_init__` of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterhub.errors import ConfigError, unknown
from adapterhub.methods._base import Method

if TYPE_CHECKING:
    from torch import nn


def require_positive(method: Method, *names: str) -> None:
    """Refuse options that are not greater than 0.

    Raises:
        ConfigError: lists the invalid options.
    """
    values = {name: getattr(method, name) for name in names}
    if invalid := [f"{name}: {value}" for name, value in values.items() if not value > 0]:
        raise ConfigError(
            f"options of {method.name} are out of range",
            offenders=invalid,
            expected="more than 0",
        )


def require_between(method: Method, low: float, high: float, *names: str) -> None:
    """Refuse options outside of a range.

    Raises:
        ConfigError: lists the invalid options.
    """
    values = {name: getattr(method, name) for name in names}
    invalid = [f"{name}: {value}" for name, value in values.items() if not low <= value <= high]
    if invalid:
        raise ConfigError(
            f"options of {method.name} are out of range",
            offenders=invalid,
            expected=f"{low:g} to {high:g}",
        )


def require_decay(method: Method) -> None:
    """Refuse a `decay` whose power over many layers overflows or underflows.

    Raises:
        ConfigError: it is not between 0.01 and 100.
    """
    require_between(method, 0.01, 100, "decay")


def activation_module(name: str) -> nn.Module:
    """Return an activation function by its transformers name.

    Raises:
        ConfigError: an unknown name.
    """
    from transformers.activations import ACT2FN  # slow to import

    if name not in ACT2FN:
        expected = "a transformers name: relu, gelu, silu, tanh, ..."
        raise unknown("activation", name, ACT2FN, expected=expected)
    module: nn.Module = ACT2FN[name]
    return module
