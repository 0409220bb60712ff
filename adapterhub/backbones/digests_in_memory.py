"""Digests of a model's tensors, remembered until one of them changes.

Reading all values of a model takes a thousand times longer than anything else that `load` does. The
digests are computed again unless every tensor is the same object at the same place, with the same
version, and its bytes have the same sums: the version shows changes by torch, the sums those
through `.data` or numpy, which have no version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from adapterhub.backbones.tensor_digests import Table

_SUMS = 509  # of words of 8 bytes: a prime, so that a moved row of a matrix changes the sums
_REMEMBERED: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Any, Table]]] = WeakKeyDictionary()


def tensor_states(named: Mapping[str, Tensor]) -> list[Any] | None:
    """Return what tells whether one of the tensors has changed, or None where that is unknown."""
    if not all(map(_is_plain, named.values())):
        return None
    return [(name, _place(tensor), _sums(tensor)) for name, tensor in named.items()]


def remembered_table(
    model: nn.Module, key: Hashable, states: list[Any] | None, compute: Callable[[], Table]
) -> Table:
    """Return digests that were computed before, while the tensors had the same states.

    Args:
        model: whose tensors they are.
        key: what else they depend on.
        states: of the tensors, now.
        compute: computes them.
    """
    if states is None:
        return compute()
    tables = _REMEMBERED.setdefault(model, {})
    before, table = tables.get(key, (None, {}))
    if before != states:
        table = compute()
        tables[key] = states, table
    return table


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type == "cpu" and tensor.is_contiguous()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version, tensor.shape, tensor.dtype


def _sums(tensor: Tensor) -> tuple[bytes, ...]:
    """Return the sums of every 509th word of a tensor, modulo 2**64, and its last bytes."""
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    words = content[: len(content) // 8 * 8].view(np.int64)
    table = words[: len(words) // _SUMS * _SUMS].reshape(-1, _SUMS)
    return np.add.reduce(table, 0).tobytes(), content[table.nbytes :].tobytes()
