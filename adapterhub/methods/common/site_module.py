"""Base classes of the modules that methods add at sites, one for each kind of hook.

    kind of site        base class           maps
    linear, sublayer,   OutputModule         (x, y) -> y': the host's input and output
    layer
                        InputModule          x -> x': the host's input
    weight              as linear, or where the host holds the weights of experts:
                        ExpertsModule        (x, y, rows) -> y': of the experts' products
                        ExpertsInputModule   (x, rows) -> x'
    keyvalue            KeyValueModule       () -> prefix keys and values
                        GatedKeyValueModule  x -> prefix keys and values, and gates
                        ApartKeyValueModule  W_k, b_k, W_v, b_v -> keys and values
    embed               EmbeddingModule      () -> virtual tokens
    mix                 LayerMixModule       (outputs of the layers below, y) -> y'

In addition to `forward`, the classes declare the requirements of the hooks. Parameters are in fp32;
a module casts them to the dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from adapterhub.anatomy.sites import Site
    from adapterhub.methods.common.expert_rows import ExpertRows


_SKIP_INIT: ContextVar[bool] = ContextVar("skip_init", default=False)


@contextmanager
def skip_init() -> Iterator[None]:
    """Skip expensive initializations inside, and leave torch's random state unchanged."""
    skipped, random = _SKIP_INIT.get(), torch.random.get_rng_state()
    try:
        _SKIP_INIT.set(True)
        yield
    finally:
        _SKIP_INIT.set(skipped)
        torch.random.set_rng_state(random)


def init_is_skipped() -> bool:
    """Return whether modules are built inside `skip_init`."""
    return _SKIP_INIT.get()


# Not the methods of tensors that these call: a loop may draw until a value is accepted.
_FILLS = frozenset(getattr(nn.init, f"{d}_") for d in ("uniform", "normal", "kaiming_uniform"))


class _Undrawn(TorchFunctionMode):
    """Leave tensors uninitialized where `nn.init` would draw values, in this thread."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, unless it draws values for a tensor."""
        options = kwargs or {}
        if function in _FILLS:
            return args[0] if args else options["tensor"]
        return function(*args, **options)


def undrawn() -> AbstractContextManager[Any]:
    """Return a context where `nn.init` does not draw values, inside `skip_init`."""
    return _Undrawn() if init_is_skipped() else nullcontext()


OutputSource: TypeAlias = Literal["output", "block", "input", "residual"]
Positions: TypeAlias = bool | Literal["keys"]


class TokenSet(NamedTuple):
    """Some tokens of each text, by their places in it.

    `first` and `last` are the first and the last `size` tokens of the prompt: in training, the text
    before the first learned token, and in `generate`, its input; otherwise the whole text. `from`
    are all tokens from the last occurrence of `ids` on; without ids, from the last token of the
    prompt on.
    """

    kind: Literal["first", "last", "from"]
    size: int = 0
    ids: tuple[int, ...] = ()


class SiteModule(nn.Module):
    """A module of an adapter at one site.

    Attributes:
        affine: the output is affine in all inputs, so the module can be merged into the weight of
            its host.
        stack: the function that computes several modules of this class at once for the rows of a
            batch. It is not inherited; a class without one computes group by group (ops.py).
        token_sets: the tokens that the module changes, if not all: an output module is called with
            (x, y, *chosen), a mask of the tokens in each set, (batch, tokens, 1), or None if the
            set is empty in this call.
        constant: returns the module to stack instead of this one while it is constant, with the
            values computed in each call as its tensors; by default the module itself. Not inherited
            either.
    """

    affine: ClassVar[bool] = False
    token_sets: tuple[TokenSet, ...] = ()
    stack: ClassVar[Any] = None  # a staticmethod of the type StackModules
    constant: ClassVar[Any] = None  # a method (site, weight and bias if it reads them) -> module

    def inference_form(self) -> SiteModule:
        """Return the module to save: without parameters that only training needs."""
        return self


class SharedModule(nn.Module):
    """A part of an adapter that several of its sites read: a child module at the first one only.

    It is read outside its layer, so FSDP2 must not shard it with that layer.
    """


class OutputModule(SiteModule):
    """Maps the input x and output y of a projection or sublayer to a new output y'.

    Attributes:
        source: the x that the hook passes:

            input      x, the host's input
            output     x; the module reads y instead
            residual   r, the residual stream that y is added to
            block      norm(r + y), the input of the next sublayer on post-norm backbones
        reads_weight: call the module with (x, y, W, b): also the host's weight and bias.
    """

    source: OutputSource = "input"
    reads_weight: ClassVar[bool] = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        raise NotImplementedError

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the change of the weight as (d_out, r) and (r, d_in), if it is a product."""
        return None


class InputModule(SiteModule):
    """Maps the input x of a projection to a new input x'. If `affine`, x' is linear in x."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the new input. x: (..., d_in) -> x' like x."""
        raise NotImplementedError


class ExpertsModule(SiteModule):
    """Maps the inputs x and outputs y of products with the weights of experts to new outputs."""

    def forward(self, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        """Compute the new outputs y', like y.

        x: (..., d_in), one row for each use of an expert; y: (..., d_out), without the bias that
        the host adds.
        """
        raise NotImplementedError


class ExpertsInputModule(SiteModule):
    """Maps the inputs x of products with the weights of experts to new inputs, linearly."""

    def forward(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Compute the new inputs. x: (..., d_in) -> x' like x; `rows` as in `ExpertsModule`."""
        raise NotImplementedError


class PrefixModule(SiteModule):
    """A prefix of an attention.

    Attributes:
        positions: the relative positions to count from the end of the prefix: none (False), of all
            tokens (True), or of keys only ("keys").
    """

    positions: Positions = False


class KeyValueModule(PrefixModule):
    """Returns prefix keys and values."""

    def forward(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return keys (length, d_k) and values (length, d_v); stacked if both have one size."""
        raise NotImplementedError


class GatedKeyValueModule(PrefixModule):
    """Returns prefix keys and values and a gate for each query, computed from the attention's x."""

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Return keys and values, and gates. x: (batch, tokens, d) -> (batch, tokens, 1)."""
        raise NotImplementedError


class ApartKeyValueModule(PrefixModule):
    """Return keys and values with a softmax separate from the tokens.

    Queries get o + softmax(q P_kᵀ) P_v, where o is the output of their usual attention. Keys and
    values may depend on the weights of the attention's projections.

    Attributes:
        projections: the sites of the projections of keys and of values.
    """

    projections: tuple[Site, Site]

    def forward(
        self, key: Tensor, key_bias: Tensor | None, value: Tensor, value_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys (length, d_k) and values (length, d_v).

        key: (d_k, d_in), key_bias: (d_k,), value: (d_v, d_in), value_bias: (d_v,), of the
        projections.
        """
        raise NotImplementedError


class EmbeddingModule(SiteModule):
    """Returns virtual tokens in front of the input.

    Attributes:
        skipped_positions: the number of positions left free in front of the caller's tokens.
        counts_padding: whether padding counts as text: it follows the virtual tokens, and the
            backbone does not see the ids that it would need to find the padding.
    """

    skipped_positions: int = 0
    counts_padding: bool = False

    def forward(self) -> Tensor:
        """Return the virtual tokens: (length, d)."""
        raise NotImplementedError


class LayerMixModule(SiteModule):
    """Maps the outputs of all layers of a stack to a new output of the last layer."""

    def forward(self, states: Sequence[Tensor], y: Tensor) -> Tensor:
        """Mix the layers: the new output, like y.

        `states` are the stack's input and the outputs of the layers below the last, y the output of
        the last layer, (batch, tokens, d).
        """
        raise NotImplementedError
