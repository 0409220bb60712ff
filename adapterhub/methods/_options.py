"""Checks of a method's options."""

from __future__ import annotations

from torch import nn
from transformers.activations import ACT2FN

from adapterhub.errors import ConfigError, unknown
from adapterhub.methods._base import Method


def require_positive(method: Method, *names: str) -> None:
    """Refuse options that must be more than 0.

    Raises:
        ConfigError: which are not.
    """
    values = {name: getattr(method, name) for name in names}
    if wrong := [f"{name}: {value}" for name, value in values.items() if not value > 0]:
        raise ConfigError(
            f"options of {method.name} are out of range", offenders=wrong, expected="more than 0"
        )


def require_between(method: Method, low: float, high: float, *names: str) -> None:
    """Refuse options outside of `low` to `high`.

    Raises:
        ConfigError: which are.
    """
    values = {name: getattr(method, name) for name in names}
    if wrong := [f"{name}: {value}" for name, value in values.items() if not low <= value <= high]:
        raise ConfigError(
            f"options of {method.name} are out of range",
            offenders=wrong,
            expected=f"{low:g} to {high:g}",
        )


def require_decay(method: Method) -> None:
    """Refuse a `decay` whose powers, one a layer, leave the range of numbers.

    Raises:
        ConfigError: it does.
    """
    require_between(method, 0.01, 100, "decay")


def activation(name: str) -> nn.Module:
    """The activation of a transformers name.

    Raises:
        ConfigError: there is none.
    """
    if name not in ACT2FN:
        expected = "a transformers name: relu, gelu, silu, tanh, ..."
        raise unknown("activation", name, ACT2FN, expected=expected)
    module: nn.Module = ACT2FN[name]
    return module
