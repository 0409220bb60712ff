"""The modules that a method places at sites: one base class for each way to enter the forward pass.

    kind of site        base class        maps
    linear, sublayer    OutputModule      (x, y) -> y', the host's input and output to a new output
                        InputModule       x -> x', the host's input to a new input
    keyvalue            KeyValueModule    () -> prefix keys and values; gated: x -> these and gates
    embed               EmbeddingModule   () -> virtual tokens
    mix                 LayerMixModule    (outputs of the layers below, y) -> y'

The classes declare what the hooks need beyond `forward`. A module keeps its parameters in fp32 and
casts them to the dtype of what it computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn

OutputSource: TypeAlias = Literal["output", "block", "input", "residual"]
Positions: TypeAlias = bool | Literal["keys"]


class SiteModule(nn.Module):
    """A module of an adapter at one site.

    `affine` declares that the output is affine in all inputs, so that the module can be merged into
    the weight of its host.
    """

    affine: ClassVar[bool] = False

    def inference_form(self) -> SiteModule:
        """Return the module to save: without parameters that only training needs."""
        return self


class OutputModule(SiteModule):
    """Maps the input x and output y of a projection or sublayer to a new output y'.

    `source` selects what is passed as x:

        input      x, the host's input
        output     x too: the module reads y
        residual   r, the residual stream that y is added to
        block      norm(r + y), the input of the next sublayer on post-norm backbones

    With `reads_weight` the module is called with (x, y, W, b): the host's weight and bias.
    """

    source: OutputSource = "input"
    reads_weight: ClassVar[bool] = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        raise NotImplementedError

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the change of the host's weight as a product of rank r, if it is one.

        Returns:
            (d_out, r) and (r, d_in), or None.
        """
        return None


class InputModule(SiteModule):
    """Maps the input x of a projection to a new input x'. If `affine`, x' is linear in x."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the new input. x: (..., d_in) -> x' like x."""
        raise NotImplementedError


class PrefixModule(SiteModule):
    """A prefix of an attention.

    `positions` selects which relative positions count from behind the prefix: none (False), those
    of tokens (True), or those of keys only ("keys").
    """

    positions: Positions = False


class KeyValueModule(PrefixModule):
    """Returns prefix keys and values."""

    def forward(self) -> Tensor:
        """Return keys and values: (2, length, d_kv)."""
        raise NotImplementedError


class GatedKeyValueModule(PrefixModule):
    """Returns prefix keys and values and a gate for each query, computed from the attention's x."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (2, length, d_kv) and the gates. x: (batch, tokens, d) -> (batch, tokens, 1)."""
        raise NotImplementedError


class EmbeddingModule(SiteModule):
    """Returns virtual tokens in front of the input.

    `skipped_positions` is the number of positions left free in front of the caller's tokens.
    """

    skipped_positions: int = 0

    def forward(self) -> Tensor:
        """Return the virtual tokens: (length, d)."""
        raise NotImplementedError


class LayerMixModule(SiteModule):
    """Maps the outputs of all layers of a stack to a new output of the last layer."""

    def forward(self, states: Sequence[Tensor], y: Tensor) -> Tensor:
        """Mix the layers.

        Args:
            states: the stack's input and the outputs of the layers below the last, like y.
            y: the output of the last layer, (batch, tokens, d).

        Returns:
            The new output, like y.
        """
        raise NotImplementedError
