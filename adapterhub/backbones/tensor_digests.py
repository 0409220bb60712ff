"""Digests of tensors that do not depend on the dtype in which they are stored or loaded.

    values = sha256(bf16(W))          of the values rounded to bfloat16
    half   = sha256(bf16(fp16(W)))    of the values rounded to float16 first

bfloat16 keeps 8 bits of a value, less than fp32 and fp16, so the fp32 and bf16 loads of a
checkpoint have the same `values`. Rounding to fp16 first gives other values where it ends halfway
between two of bfloat16, or below 2**-14. But the `values` of an fp16 copy are the `half` of the
original: two tensors are the same if they share a digest.

Reading all values of a model takes a thousand times longer than anything else that `load` does.
`remembered_table` computes digests again unless every tensor is the same object at the same place,
with the same version, and its bytes have the same sums: the version shows changes by torch, the
sums those through `.data` or numpy, which have no version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from adapterhub.backbones.checkpoint import Runs, StoredTensor, take_runs
from adapterhub.backbones.weights import whole

_SUMS = 509  # of words of 8 bytes: a prime, so that a moved row of a matrix changes the sums
_REMEMBERED: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Any, Table]]] = WeakKeyDictionary()
RUNS, RUN = 16, 256  # of a sampled tensor
_CHUNK = 1 << 20  # values of a tensor that are held at a time
_THREADS = 8


class Digests(NamedTuple):
    """The two digests of a tensor, or of a set of tensors."""

    values: str
    half: str

    def same(self, other: Digests) -> bool:
        """Return whether both may be of the same numbers, of which one side may be rounded."""
        return self.values in other or self.half == other.values


Table = Mapping[str, Digests]  # by name


class TensorReader(NamedTuple):
    """A tensor to digest: `read` returns the values of runs."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Runs], Tensor]
    is_table: bool = False  # a row for each token

    def limited(self, rows: int | None) -> TensorReader:
        """Return the tensor without rows that were added to pad the vocabulary."""
        if rows is None or not self.shape or self.shape[0] <= rows:
            return self
        return self._replace(shape=(rows, *self.shape[1:]))


def reader_of(name: str, tensor: Tensor) -> TensorReader:
    """Return a reader of a tensor in memory."""
    return TensorReader(name, tuple(tensor.shape), partial(take_runs, whole(tensor)))


def stored_reader(name: str, stored: StoredTensor) -> TensorReader:
    """Return a reader of a tensor in a file, under another name."""
    return TensorReader(name, stored.shape, stored.read)


def digest_table(readers: Iterable[TensorReader], *, sampled: bool) -> dict[str, Digests]:
    """Compute the digests of tensors by name and shape, `"name (2, 3)"`.

    The sample of a table with a row for each token does not depend on their number.

    Raises:
        RuntimeError: a tensor has other values than its shape says.
    """
    runs_of = sample_of if sampled else chunks
    readers = list(readers)
    if sampled:
        digests = [_digests([reader.read(list(runs_of(reader)))]) for reader in readers]
    elif sum(math.prod(reader.shape) for reader in readers) < _CHUNK:  # faster than threads start
        digests = [_digests(reader.read([run]) for run in runs_of(reader)) for reader in readers]
    else:
        digests = _digests_together(readers)
    return {_key(r, sampled): d for r, d in zip(readers, digests, strict=True)}


def _digests_together(readers: Iterable[TensorReader]) -> list[Digests]:
    """Digest several tensors at a time, in threads that only hash.

    They run none of torch's functions: each new thread that enters its parallel code sets up
    torch's pool of threads, and with several at the same time that may fail.
    """
    strands = [_Strands(reader) for reader in readers]
    waiting = iter(strands)
    with ThreadPoolExecutor(_THREADS) as pool:
        now = list(islice(waiting, _THREADS))
        while now:
            now = [each for each in now if each.hash_next(pool)]
            now += islice(waiting, _THREADS - len(now))
    return [each.digests() for each in strands]


class _Strands:
    """The hashes of one tensor, of which a chunk is hashed while others are read."""

    def __init__(self, reader: TensorReader) -> None:
        self.parts = (reader.read([run]) for run in chunks(reader))
        self.hashes = hashlib.sha256(), hashlib.sha256()
        self.hashing: Future[None] | None = None

    def hash_next(self, pool: ThreadPoolExecutor) -> bool:
        """Read a chunk, and have it hashed behind the one before it; False at the end."""
        part = next(self.parts, None)
        rounded = None if part is None else _rounded(part)
        if self.hashing is not None:
            self.hashing.result()
        if rounded is None:
            return False
        self.hashing = pool.submit(self._update, rounded)
        return True

    def _update(self, rounded: tuple[bytes, bytes]) -> None:
        for strand, part in zip(self.hashes, rounded, strict=True):
            strand.update(part)

    def digests(self) -> Digests:
        """Return the digests of all chunks."""
        return Digests(*(strand.hexdigest() for strand in self.hashes))


def _key(reader: TensorReader, sampled: bool) -> str:
    shape = ("*", *reader.shape[1:]) if sampled and reader.is_table else reader.shape
    return f"{reader.name} ({', '.join(map(str, shape))})"


def sample_of(reader: TensorReader) -> list[tuple[int, int]]:
    """List the sampled runs of a flattened tensor: (first value, number of values) each.

    Up to 4,096 values are sampled completely, larger tensors in 16 runs of 256 that are evenly
    spaced. Of a table with a row for each token, these are starts of the rows 0, 1, 2, 4, 8, ...:
    padding the vocabulary to a multiple of a power of two adds no row to them.
    """
    numel = math.prod(reader.shape)
    if reader.is_table:
        rows, width = reader.shape[0], numel // reader.shape[0]
        indices = [0, *(2**i for i in range(64) if 2**i < rows)]
        return [(row * width, min(width, RUN)) for row in indices]
    if numel <= RUNS * RUN:
        return [(0, numel)]
    return [((i * (numel - RUN)) // (RUNS - 1), RUN) for i in range(RUNS)]


def chunks(reader: TensorReader) -> Iterator[tuple[int, int]]:
    """Yield runs that cover all values of a tensor."""
    numel = math.prod(reader.shape)
    return ((start, min(_CHUNK, numel - start)) for start in range(0, numel, _CHUNK))


def _digests(parts: Iterable[Tensor]) -> Digests:
    values, half = hashlib.sha256(), hashlib.sha256()
    for part in parts:
        rounded, twice = _rounded(part)
        values.update(rounded)
        half.update(twice)
    return Digests(values.hexdigest(), half.hexdigest())


def _rounded(values: Tensor) -> tuple[bytes, bytes]:
    """Return the bytes of values in bfloat16, and of values in float16 and then in bfloat16."""
    values = values.cpu()
    if not values.is_floating_point():
        return _little_endian(values), _little_endian(values)
    half = values.half().float().to(torch.bfloat16)
    return (
        _little_endian(values.float().to(torch.bfloat16).view(torch.int16)),
        _little_endian(half.view(torch.int16)),
    )


def _little_endian(values: Tensor) -> bytes:
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def combined(table: Table) -> Digests:
    """Compute the digests of a set of tensors: sha256 of the sorted lines `name shape digest`."""
    return Digests(*(_digest_of_lines(table, strand) for strand in Digests._fields))


def _digest_of_lines(table: Table, strand: str) -> str:
    lines = sorted(f"{name} {getattr(digests, strand)}" for name, digests in table.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_states(named: Mapping[str, Tensor]) -> list[Any] | None:
    """Return what tells whether one of the tensors has changed, or None where that is unknown."""
    if not all(map(_is_plain, named.values())):
        return None
    return [(name, _place(tensor), _sums(tensor)) for name, tensor in named.items()]


def remembered_table(
    model: nn.Module, key: Hashable, states: list[Any] | None, compute: Callable[[], Table]
) -> Table:
    """Return digests that were computed before, while the tensors had the same states."""
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
