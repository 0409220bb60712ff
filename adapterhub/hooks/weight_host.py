"""The slot of a module that computes with a matrix itself: a convolution, attention, a table.

Hooks do not see the products of such a host, but they are linear in the matrix. Modules whose
output is affine in x and y = W x + b change W and b to

    W' = f(I, W)    b' = f(0, b)

and the host's own forward runs with them, on a shallow copy of the host. So every method that can
be merged works at a convolution with any padding, stride, dilation and groups. Where the update is
a product or a computed matrix, W' = W + D, unit vectors are not needed.

The table of an embedding may be large, so updates are looked up by token id and never added to it:

    y_i = s (E[i] + D[:, i])    i is a number of the backbone
    y_i = s row[i]              i is a new token of an active adapter

    E: (numbers, d), the table    D: (d, numbers), the update    s: the factor of a scaled embedding
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD, copy_with, parameter_at
from adapterhub.anatomy.projections import CONVOLUTIONS
from adapterhub.anatomy.sites import Site
from adapterhub.errors import AttachError, SiteError
from adapterhub.hooks.composition import TokenPlan
from adapterhub.hooks.own_weight import HeldWeightSlot, override_forward
from adapterhub.hooks.slot import Slot, put_slot, through
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.site_module import InputModule, OutputModule, SiteModule

_IDS = "ids"


class TokenRows(nn.Module):
    """The rows of new tokens: `ids` (n,), rising, and `rows` (n, d)."""

    ids: Tensor

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.rows = nn.Parameter(rows)

    def look_up(self, ids: Tensor, y: Tensor, scale: Any) -> Tensor:
        """Replace the embeddings of new tokens.

        `ids`: (batch, tokens); `y`: the backbone's embeddings, (batch, tokens, d); `scale`: the
        model's factor on embeddings.

        Returns:
            y', like y.
        """
        place = torch.searchsorted(self.ids, ids.contiguous()).clamp(max=len(self.ids) - 1)
        new = self.ids[place] == ids
        rows = F.embedding(place, self.rows).to(y.dtype) * scale
        return torch.where(new.unsqueeze(-1), rows, y)

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        """Add logits of new tokens. x: (batch, tokens, d), y: (batch, tokens, old tokens)."""
        missing = int(self.ids[-1]) + 1 - y.shape[-1]
        if missing > 0:
            y = F.pad(y, (0, missing), value=torch.finfo(y.dtype).min)
        return y.index_copy(-1, self.ids, (x @ self.rows.to(x.dtype).T).to(y.dtype))


def active_rows(slot: Slot) -> Iterator[TokenRows]:
    """Yield the rows of new tokens of the active adapters."""
    for key in slot.keys:
        module = slot.placed(key)
        if isinstance(module, TokenRows):
            yield module


class EmbeddingSlot(Slot):
    """Add the updates of the active modules for each looked-up number."""

    def forward(self, ids: Tensor, y: Tensor, factor: Any) -> Tensor:
        """Apply the modules. ids: (...), y: (..., d) -> y' like y."""

        def add(key: str, y: Tensor, ids: Tensor) -> Tensor:
            update = self._update(key, ids)
            return y if update is None else y + (update * factor).to(y.dtype)

        return self.run(add, y, ids, dim=1 if isinstance(self.plan, TokenPlan) else 0)

    def changed(self, table: Tensor) -> Tensor:
        """Return the table with the updates of the active modules, (numbers, d)."""
        return self(torch.arange(len(table), device=table.device), table, 1.0)  # type: ignore[no-any-return]

    def _update(self, key: str, ids: Tensor) -> Tensor | None:
        """Return the update of a module for each number; None if it has rows of new tokens."""
        module = self.placed(key)
        if isinstance(module, TokenRows):
            return None
        if isinstance(module, DeltaModule):
            return F.embedding(ids, module.delta().T)
        assert isinstance(module, OutputModule)
        factors = module.factors()
        assert factors is not None
        left, right = factors
        return F.embedding(ids, right.T) @ left.T


def mask_new_ids(host: nn.Module, args: tuple[Any, ...]) -> Any:
    """Replace ids beyond the backbone's embedding by 0: the pre-hook of an embedding."""
    slot = host._modules[CHILD]
    if not isinstance(slot, EmbeddingSlot) or next(active_rows(slot), None) is None:
        return args
    slot.keep(_IDS, args[0])
    size = host.get_parameter("weight").shape[0]
    return (args[0].where(args[0] < size, torch.zeros_like(args[0])), *args[1:])


def change_embeddings(host: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
    """Add the updates of the numbers, and insert the rows of new tokens: the forward hook."""
    slot = host._modules[CHILD]
    if not isinstance(slot, EmbeddingSlot) or not slot.keys:
        return y
    factor = getattr(host, "embed_scale", 1.0)
    if not all(isinstance(slot.placed(key), TokenRows) for key in slot.keys):
        y = slot(args[0], y, factor)
    if (ids := slot.take(_IDS)) is not None:
        for module in active_rows(slot):
            y = module.look_up(ids, y, factor)
    return y


def embedding_slot(host: nn.Module) -> EmbeddingSlot:
    """Return the slot at an embedding; create it if missing."""
    slot = host._modules.get(CHILD)
    if not isinstance(slot, EmbeddingSlot):
        slot = EmbeddingSlot()
        put_slot(host, slot)
        slot.hook(host.register_forward_pre_hook, mask_new_ids)
        slot.hook(host.register_forward_hook, change_embeddings)
    return slot


UNITS = 2048  # unit vectors per call of a module


class MatrixSlot(HeldWeightSlot):
    """Run the host with its matrices changed by the active modules."""

    def compute(
        self,
        host: nn.Module,
        function: Callable[..., Any],
        composition: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        by_row: bool = False,
    ) -> Any:
        """Run the forward on a copy of the host with changed parameters.

        A convolution in less than fp32 computes the change separately, since W + D would round D
        away.

        Raises:
            AttachError: the rows of a batch have different adapters, and are not the first
                dimension.
        """
        if by_row and getattr(host, "batch_first", True) is False:
            raise AttachError(
                f"the rows of a batch cannot have different adapters at {self.where()}: its "
                "batch is not the first dimension",
                hint="MultiheadAttention(batch_first=True), or route each batch as a whole",
            )
        changed = self.changed(host, composition)
        low = isinstance(host, CONVOLUTIONS) and host.weight.element_size() < 4
        dtype = next(host.parameters()).dtype
        if not low:
            new = {name: each.to(dtype) for name, each in changed.items()}
            return function(copy_with(host, new), *args, **named)
        added: dict[str, Tensor | None] = {"bias": None}
        for name, each in changed.items():
            own = _own(host, name)
            added[name] = (each if own is None else each - own).to(dtype)
        y = function(host, *args, **named)
        return y + function(copy_with(host, added), *args, **named)

    def constant(self, host: nn.Module, key: str) -> SiteModule:
        """Return the module unchanged: rows of a batch are not stacked here."""
        module = self.placed(key)
        assert isinstance(module, SiteModule)
        return module

    def changed(self, host: nn.Module, composition: Any) -> dict[str, Tensor]:
        """Return the changed weights and biases by their names in the host, in fp32.

        A bias that the host lacks is included only if a module may have one.
        """
        changed: dict[str, Tensor] = {}
        for site in {site.id: site for site in self.sites.values()}.values():
            matrix = site.matrix
            assert matrix is not None
            whole = changed.get(matrix.weight, host.get_parameter(matrix.weight).float())
            biases = changed.get(matrix.bias, _own(host, matrix.bias))
            own = None if biases is None else matrix.bias_of(biases)
            weight, bias = self._through(composition, site, matrix.of(whole), own)
            changed[matrix.weight] = matrix.within(whole, weight)
            if bias is not None:
                biases = whole.new_zeros(len(whole)) if biases is None else biases
                changed[matrix.bias] = matrix.within(biases, bias)
        return changed

    def _through(
        self, composition: Any, site: Site, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Pass a weight and its bias, as one more column, through the modules of a site."""
        column = weight.new_zeros(len(weight)) if bias is None else bias
        some = bias is not None

        def apply(key: str, both: Tensor) -> Tensor:
            nonlocal some
            module = self.placed(key)
            if self.sites[key].id != site.id:
                return both
            assert isinstance(module, SiteModule)
            update = added_by(module)
            if update is not None:
                return torch.cat([both[:, :-1] + update.float(), both[:, -1:]], dim=1)
            host = (weight, bias)
            own, shift = replaced_by(module, both[:, :-1], both[:, -1] if some else None, host)
            some = some or shift is not None
            shift = both[:, -1] if shift is None else shift
            return torch.cat([own, shift[:, None]], dim=1)

        both = through(composition, torch.cat([weight, column[:, None]], dim=1), apply)
        return both[:, :-1], both[:, -1] if some else None


def replaced_by(
    module: SiteModule,
    weight: Tensor,
    bias: Tensor | None,
    host: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a projection combined with an affine module.

    weight: (d_out, d_in), bias: (d_out,) or None; `host` are the original ones, which modules may
    read.
    """
    units = torch.split(torch.eye(weight.shape[1]).to(weight), UNITS)
    if isinstance(module, InputModule):
        turned = torch.cat([module(some) for some in units])  # Gᵀ, of x' = G x
        return weight @ turned.T, bias
    assert isinstance(module, OutputModule)
    own = None if host[1] is None else torch.zeros_like(host[1])
    without = (host[0], own) if module.reads_weight else ()
    zero, nothing = weight.new_zeros(1, weight.shape[1]), weight.new_zeros(1, len(weight))
    constant = module(zero, nothing, *without)
    pairs = zip(units, torch.split(weight.T, UNITS), strict=True)
    columns = torch.cat([module(x, y, *without) - constant for x, y in pairs])
    read = host if module.reads_weight else ()
    shift = constant if bias is None else module(zero, bias[None], *read)
    return columns.T, shift[0]


def _own(host: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a host, in fp32; None if missing."""
    parameter = parameter_at(host, name)
    return None if parameter is None else parameter.float()


def added_by(module: SiteModule) -> Tensor | None:
    """Return the matrix D that a module adds to a weight, (d_out, d_in); None if it does more.

    In training, dropout drops some inputs of the matrix, the same for all positions.
    """
    factors = module.factors() if isinstance(module, OutputModule) else None
    if factors is not None:
        left, right = factors
        rate = getattr(module, "dropout", 0.0) if module.training else 0.0
        if rate:
            right = right * F.dropout(right.new_ones(right.shape[1]), rate)
        return left @ right
    return module.delta() if isinstance(module, DeltaModule) else None


def keep_hooked(host: nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing: torch's layers do not skip the forward of modules with hooks."""


def check_matrix(host: nn.Module, site: Site, module: SiteModule) -> None:
    """Refuse a module that cannot be at a host with a matrix.

    Raises:
        SiteError: the module is not affine in the input and output, or at an embedding, does more
            than add to the table.
    """
    table = isinstance(host, nn.Embedding)
    if not module.affine or module.token_sets or (table and added_by(module) is None):
        raise SiteError(
            f"a {type(module).__name__} cannot be at {site.id}, {type(host).__name__}: "
            + ("only what adds to the table can" if table else "it is not a change of its weight"),
            expected="methods that add to a weight, such as lora or loha"
            if table
            else "methods that can be merged, such as lora, dora, loha or oft",
        )


def matrix_slot(model: nn.Module, site: Site, module: SiteModule) -> Slot:
    """Return the slot at a host with a matrix; create it if missing.

    Raises:
        SiteError: the module cannot be there (`check_matrix`).
    """
    host = model.get_submodule(site.host)
    check_matrix(host, site, module)
    if isinstance(host, nn.Embedding):
        return embedding_slot(host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, MatrixSlot):
        slot = MatrixSlot()
        override_forward(host, slot.patch)
        slot.hook(host.register_forward_pre_hook, keep_hooked)
        put_slot(host, slot)
    return slot


def merged_matrices(host: nn.Module, slot: MatrixSlot | EmbeddingSlot) -> dict[str, Tensor]:
    """Compute the parameters of a host merged with its slot, in fp32, by name."""
    with torch.no_grad(), torch.autocast(next(host.parameters()).device.type, enabled=False):
        if isinstance(slot, MatrixSlot):
            return slot.changed(host, slot.keys)
        return {"weight": slot.changed(host.get_parameter("weight").float())}
