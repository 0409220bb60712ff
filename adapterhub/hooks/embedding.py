"""The slot of an embedding: updates of adapters by token id, and their rows of new tokens.

    y_i = s (E[i] + D[:, i])    i is a number of the backbone
    y_i = s row[i]              i is a new token of an active adapter

    E: (numbers, d), the table    D: (d, numbers), the update    s: the factor of a scaled embedding

The table may be large, so updates are looked up and never added to the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD
from adapterhub.hooks.composition import TokenPlan
from adapterhub.hooks.slot import Slot, put_slot
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.site_module import OutputModule

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
