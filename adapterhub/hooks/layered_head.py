"""Task heads of one or two linear layers in place of that of a transformers class.

`adapters` puts its own heads on the token states of every model: dropout, linear, activation,
dropout, linear, or the last two alone. The classes of transformers have other layers, or another
activation, and call their head with what they select themselves:

    GPT-2, Llama           score(states)          (batch, tokens, d); one position is selected later
    BART, T5               head(state)            (batch, d)
    ELECTRA, RoBERTa       head(states)           (batch, tokens, d); the first one is read
    DistilBERT             classifier(relu(pre_classifier(state)))
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

NO_ACTIVATION = "linear"  # of a head with one layer
FIRST, LAST = "dense", "out"  # the names of the layers


class BothSigns(nn.Module):
    """Makes x of relu(x) and relu(-x), of which a class that applies ReLU leaves x."""

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., 2 d) for states (..., d)."""
        return torch.cat([states, -states], dim=-1)


class LayeredHead(nn.Module):
    """One or two linear layers.

    Args:
        shapes: the shape of each of their parameters.
        activation: between the two, a name of transformers; "linear" for a head of one layer.
        dropout: the rate in front of each layer.
        first: whether it reads the first token of (batch, tokens, d).
        signs: whether it reads the output of `BothSigns`, behind a ReLU.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        activation: str,
        *,
        dropout: float = 0.0,
        first: bool = False,
        signs: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.first, self.signs = activation, first, signs
        self.dropout = nn.Dropout(dropout)
        for name in (LAST,) if activation == NO_ACTIVATION else (FIRST, LAST):
            outputs, inputs = shapes[f"{name}.weight"]
            layer = nn.Linear(inputs, outputs, bias=f"{name}.bias" in shapes)
            self.add_module(name, layer)

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., classes) for what the model's class gives its head."""
        if self.signs:
            plus, minus = states.chunk(2, dim=-1)
            states = plus - minus
        if self.first and states.dim() == 3:
            states = states[:, 0]
        if self.activation != NO_ACTIVATION:
            states = ACT2FN[self.activation](self.get_submodule(FIRST)(self.dropout(states)))
        logits: Tensor = self.get_submodule(LAST)(self.dropout(states))
        return logits


def layered_head(
    original: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]], activation: str
) -> dict[str, nn.Module]:
    """Return the modules that take the places of those of a model's head, on the CPU and in fp32.

    The last module of `original` gives the logits. `shapes` are those of the new parameters, by
    module and name, as `classifier.out.weight`. `activation` is between two layers; "linear" for a
    head of one.

    Raises:
        KeyError: a shape is missing, or no activation has this name.
        ValueError: a weight is no matrix.
    """
    *before, last = original
    if activation not in (NO_ACTIVATION, *ACT2FN):
        raise KeyError(activation)
    own = {n.removeprefix(f"{last}."): s for n, s in shapes.items() if n.startswith(f"{last}.")}
    module = original[last]
    dropout = next((m.p for m in module.modules() if isinstance(m, nn.Dropout)), 0.0)
    first = not isinstance(module, nn.Linear)
    head = LayeredHead(own, activation, dropout=dropout, first=first, signs=bool(before))
    return {**{name: BothSigns() for name in before}, last: head}


def activation_between(head: Mapping[str, nn.Module]) -> str | None:
    """Return the activation of a head of own layers; None for the head of the model's class."""
    layered = (module for module in head.values() if isinstance(module, LayeredHead))
    return next((module.activation for module in layered), None)
