"""Read the tensors of a checkpoint without loading a model; compute their digests and names.

Files are read in parts. safetensors checkpoints may be one file or shards. The header of each file
has the offsets of each tensor's bytes.

Older torch files are pickles. They are mapped into memory and read with `weights_only`, which
restricts the functions that a pickle can call. Their tensors are views of storages, so a few bytes
can describe 10^12 values. Records of a zip file may be compressed, although torch never compresses
them. Both are refused.

The digest of a tensor does not depend on its dtype, in the file or in memory.

    values = sha256(bf16(W))          of the values rounded to bfloat16
    half   = sha256(bf16(fp16(W)))    of the values rounded to float16 first

bfloat16 keeps 8 significant bits, fewer than fp32 and fp16, so loading a checkpoint in fp32 or bf16
gives the same `values`. Rounding to fp16 first changes a value that ends up halfway between two
bfloat16 values, or below 2**-14. But the `values` of an fp16 copy equal the `half` of the original:
two tensors are the same if they share a digest.

Reading all values of a model takes a thousand times longer than the rest of `load`.
`remembered_table` recomputes digests unless every tensor is the same object at the same address,
with the same version, and its bytes have the same sums. The version reveals changes by torch. The
sums reveal changes through `.data` or numpy, which do not update the version.

Digests of files are cached in the user's cache until the files change. A file is unchanged if its
path, inode, size, modification time and change time are the same. Two changes within one tick of
the file system's clock may have the same time, so recently changed files are not cached.

Tensors of a base model have the names used in its checkpoint. transformers renames, fuses and
splits tensors on loading, and undoes this on saving. Checkpoints of one backbone differ in their
heads, and all names may have a prefix: `encoder.layer.0...` is `bert.encoder.layer.0...` in the
checkpoint of a classifier. This module uses the names that `AutoModel.save_pretrained` writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from adapterhub.anatomy.backbone import join, new_base_model, own_modules, own_parameters, whole
from adapterhub.config.user_folders import KeyedFiles, user_folder
from adapterhub.errors import BackboneError

BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError,
          RuntimeError, ImportError, pickle.UnpicklingError, SafetensorError)  # fmt: skip
"""Errors that libraries raise for a broken checkpoint; they share no base class."""

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in the order that transformers tries
_MAX_HEADER_BYTES = 100 << 20

Runs = Sequence[tuple[int, int]]  # (first value, number of values) in the flattened tensor


class StoredTensor(NamedTuple):
    """A tensor in a file; `read` returns the concatenated values of runs."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Runs], Tensor]

    def holds_codes(self) -> bool:
        """Return whether the values are 8-bit codes, which need a scale."""
        return 0 not in self.shape and self.read([(0, 1)]).dtype in _CODES


@contextmanager
def opened_tensors(file: Path) -> Iterator[list[StoredTensor]]:
    """Open a weight file; several threads can read its tensors inside the context.

    Raises:
        BackboneError: the file is broken.
    """
    try:
        if file.suffix == ".safetensors":
            with open(file, "rb") as handle:
                yield _in_safetensors(handle)
        else:
            yield _in_torch_file(file)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise _broken(file, error) from error


def _broken(file: object, reason: object) -> BackboneError:
    return BackboneError(
        f"{file} cannot be read: {reason}",
        expected="a complete transformers checkpoint",
        hint="download it again",
    )


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint, in transformers' order of preference.

    Raises:
        BackboneError: no weight file exists, or the index of the shards is broken.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / Path(shard).name for shard in _shards(index)]
    raise BackboneError(
        f"{folder} contains no weights", expected=f"{' or '.join(_NAMES)}, or their shards"
    )


def _shards(index: Path) -> list[str]:
    """Return the sorted names of the shards in an index."""
    try:
        with open(index, "rb") as handle:
            data = handle.read(_MAX_HEADER_BYTES + 1)
        if len(data) > _MAX_HEADER_BYTES:
            raise ValueError(f"it has more than {_MAX_HEADER_BYTES} bytes")
        return sorted({str(shard) for shard in json.loads(data)["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(index, error) from error


def _in_safetensors(handle: BinaryIO) -> list[StoredTensor]:
    length = int.from_bytes(handle.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    end = max((info["data_offsets"][1] for info in header.values()), default=0)
    if os.fstat(handle.fileno()).st_size < 8 + length + end:
        raise ValueError("it is truncated")
    tensors, read_at = [], _reader(handle)
    for name, info in header.items():
        first = 8 + length + info["data_offsets"][0]
        read = partial(_values, read_at, name, first, _DTYPES[info["dtype"]])
        tensors.append(StoredTensor(name, tuple(info["shape"]), read))
    return tensors


def _reader(handle: BinaryIO) -> Callable[[int, int], bytes]:
    """Return a function (offset, size) -> bytes that several threads may call."""
    if hasattr(os, "pread"):
        return lambda offset, size: os.pread(handle.fileno(), size, offset)
    lock = threading.Lock()

    def read_at(offset: int, size: int) -> bytes:
        with lock:
            handle.seek(offset)
            return handle.read(size)

    return read_at


def _values(
    read_at: Callable[[int, int], bytes], name: str, first: int, dtype: torch.dtype, runs: Runs
) -> Tensor:
    """Read runs of a tensor whose first value is at the offset `first`."""
    data = bytearray()
    for start, count in runs:
        data += read_at(first + start * dtype.itemsize, count * dtype.itemsize)
    if len(data) != sum(count for _, count in runs) * dtype.itemsize:
        raise _broken(name, "it is shorter than its shape")
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _in_torch_file(file: Path) -> list[StoredTensor]:
    return [
        StoredTensor(name, tuple(tensor.shape), partial(take_runs, tensor))
        for name, tensor in load_torch_file(file).items()
    ]


def take_runs(tensor: Tensor, runs: Runs) -> Tensor:
    """Return the concatenated values of runs of a tensor."""
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[start : start + count] for start, count in runs])


_MOST_SHARING = 4  # tensors of one storage: a tied weight under each of its names


def load_torch_file(source: Path | BinaryIO) -> dict[str, Tensor]:
    """Load the tensors of a file by name; map a file on disk into memory if possible.

    Raises:
        ValueError: the file is damaged, contains objects other than named tensors, or would expand.
        OSError: the file cannot be read.
    """
    size = _size(source)
    _check_records(source, size)
    try:
        loaded = _load(source)
    except OSError:
        raise
    except Exception as error:  # any type; its message would advise loading with code execution
        raise ValueError(f"{type(error).__name__}: damaged, or not only tensors") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ValueError("not a mapping of names to tensors")
    _check_storages(loaded, size)
    return dict(loaded)


def _load(source: Path | BinaryIO) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if not isinstance(source, Path):
        source.seek(0)
        return torch.load(source, **options)
    try:
        return torch.load(source, mmap=True, **options)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(source, **options)


def _size(source: Path | BinaryIO) -> int:
    return source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)


def _check_records(source: Path | BinaryIO, size: int) -> None:
    """Refuse records of torch's zip format that are compressed or overlap; torch writes neither."""
    if not zipfile.is_zipfile(source):
        return  # the format before torch 1.6 has no compression
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"a damaged zip file: {error}") from None
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    expanded = sum(record.file_size for record in records)
    if not stored or expanded > size:
        raise ValueError(f"its records expand to {expanded} bytes, from {size}")


def _check_storages(tensors: Mapping[str, Tensor], size: int) -> None:
    """Refuse tensors with more values than are stored: repeating views, sparse or meta tensors."""
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized:
            raise ValueError(f"{name!a} is not a plain tensor")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name!a} has more values than are stored: {tensor.numel()}")
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total > _MOST_SHARING * size:
        raise ValueError(f"its tensors have {total} bytes, from a file of {size}")


_SUMS = 509  # 8-byte words per stride: a prime, so that moving a row of a matrix changes the sums
_REMEMBERED: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Any, Table]]] = WeakKeyDictionary()
RUNS, RUN = 16, 256  # number and length of the runs of a sampled tensor
_CHUNK = 1 << 20  # values of a tensor in memory at a time
_THREADS = 8


class Digests(NamedTuple):
    """The two digests of a tensor, or of a set of tensors."""

    values: str
    half: str

    def same(self, other: Digests) -> bool:
        """Return whether both may describe the same numbers, one side possibly rounded."""
        return self.values in other or self.half == other.values


Table = Mapping[str, Digests]  # by name


class TensorReader(NamedTuple):
    """A tensor to digest; `read` returns the values of runs."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Runs], Tensor]
    is_table: bool = False  # one row per token

    def limited(self, rows: int | None) -> TensorReader:
        """Return the tensor without the rows that pad the vocabulary."""
        if rows is None or not self.shape or self.shape[0] <= rows:
            return self
        return self._replace(shape=(rows, *self.shape[1:]))


def reader_of(name: str, tensor: Tensor) -> TensorReader:
    """Return a reader for a tensor in memory."""
    return TensorReader(name, tuple(tensor.shape), partial(take_runs, whole(tensor)))


def stored_reader(name: str, stored: StoredTensor) -> TensorReader:
    """Return a reader for a tensor in a file, under another name."""
    return TensorReader(name, stored.shape, stored.read)


def digest_table(readers: Iterable[TensorReader], *, sampled: bool) -> dict[str, Digests]:
    """Compute the digests of tensors by name and shape, `"name (2, 3)"`.

    The sample of a table with one row per token does not depend on the number of tokens.

    Raises:
        RuntimeError: the number of values of a tensor does not match its shape.
    """
    runs_of = sample_of if sampled else chunks
    readers = list(readers)
    if sampled:
        digests = [_digests([reader.read(list(runs_of(reader)))]) for reader in readers]
    elif sum(math.prod(reader.shape) for reader in readers) < _CHUNK:  # faster without threads
        digests = [_digests(reader.read([run]) for run in runs_of(reader)) for reader in readers]
    else:
        digests = _digests_together(readers)
    return {_key(r, sampled): d for r, d in zip(readers, digests, strict=True)}


def _digests_together(readers: Iterable[TensorReader]) -> list[Digests]:
    """Digest several tensors at a time, in threads that only hash.

    The threads call no torch functions. Each new thread that enters torch's parallel code sets up a
    thread pool, which may fail when several do so at once.
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
    """The hashes of one tensor; a chunk is hashed while others are read."""

    def __init__(self, reader: TensorReader) -> None:
        self.parts = (reader.read([run]) for run in chunks(reader))
        self.hashes = hashlib.sha256(), hashlib.sha256()
        self.hashing: Future[None] | None = None

    def hash_next(self, pool: ThreadPoolExecutor) -> bool:
        """Read a chunk and queue its hash after the previous one; return False at the end."""
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

    Tensors of up to 4,096 values are sampled completely, larger ones in 16 evenly spaced runs of
    256. For a table with one row per token, the runs start at the rows 0, 1, 2, 4, 8, ...: padding
    the vocabulary to a multiple of a power of two does not change them.
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
    """Return the bytes of the values in bfloat16, and in float16 and then bfloat16."""
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
    """Return states that reveal changes of the tensors; None if changes cannot be detected."""
    if not all(map(_is_plain, named.values())):
        return None
    return [(name, _place(tensor), _sums(tensor)) for name, tensor in named.items()]


def remembered_table(
    model: nn.Module, key: Hashable, states: list[Any] | None, compute: Callable[[], Table]
) -> Table:
    """Return the cached digests if the tensors still have the same states; else compute them."""
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


TICK = 2_000_000_000  # nanoseconds: the longest clock tick, on FAT
_MOST_BYTES = 256 << 20  # total size of the results in a folder


def remembered(
    files: Sequence[Path], key: str, compute: Callable[[], Any], folder: str = "weights"
) -> Any:
    """Return the cached result of a computation over files, or compute it now.

    The result is plain JSON. It depends on the files and on `key`; `folder` is its cache folder.
    """
    facts = [key, *(_identity(file) for file in files)]
    results = KeyedFiles(user_folder("cache") / folder, "json", _MOST_BYTES)
    with contextlib.suppress(OSError, ValueError):
        if (path := results.find(facts)) is not None:
            return json.loads(path.read_bytes())
    result = compute()
    unchanged = facts == [key, *(_identity(file) for file in files)]
    if unchanged and all(map(_is_settled, files)):
        with contextlib.suppress(OSError):
            results.make(facts, lambda file: file.write(json.dumps(result).encode()))
    return result


def _identity(file: Path) -> list[Any]:
    path = file.resolve()
    stat = path.stat()
    return [
        os.fspath(path),
        stat.st_dev,
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
    ]


def _is_settled(file: Path) -> bool:
    stat = file.stat()
    return time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > TICK


HEAD_PART = "head"  # starts the names of tensors outside the base model
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # layer norms in checkpoints from 2019
# Fields of a configuration that the base model does not depend on.
_UNUSED = ("quantization_config", "id2label", "label2id", "_name_or_path", "problem_type")
_LAYER = re.compile(r"^.*?\.\d+\.")


class CheckpointForm:
    """The names of the tensors of a base model.

    Attributes:
        embedding: the name of the token embedding; None if the model lacks one.
        rows: the number of rows of the token embedding.
        key: a text that identifies the names and sizes.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        stored = self.as_stored(named_tensors(base))
        first: dict[int, str] = {}
        # Tied tensors share the name of the first; a checkpoint may contain any of them.
        self._names = {name: first.setdefault(id(t), name) for name, t in stored.items()}
        self._hosts = {name.rpartition(".")[0] for name in stored} - {""}
        self._tops = {name.partition(".")[0] for name in stored}
        table = _embedding(base)
        self.embedding = first.get(id(table))
        self.rows = None if table is None else table.shape[0]
        shapes = sorted((name, tuple(tensor.shape)) for name, tensor in stored.items())
        self.key = hashlib.sha256(repr(shapes).encode()).hexdigest()

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename and split the tensors of a model, or of some of its layers, as on saving.

        Only conversions of the base model apply. A loaded model also has conversions for its
        quantization, which cannot be undone.
        """
        stored: dict[str, Tensor] = revert_weight_conversion(self._base, dict(tensors))
        return stored

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Map names in a checkpoint to names in this form; keep head names, drop constants.

        Heads are outside the base model. Constants, such as masks, are inside it.
        """
        stored = list(stored)
        prefixes = Counter(p for name in stored for p in self._prefixes(name))
        (prefix, _), *_ = prefixes.most_common(1) or [("", 0)]
        names = {
            old: self._name(old.removeprefix(prefix)) or self._head(old, prefix) for old in stored
        }
        return {old: new for old, new in names.items() if new}

    def limited(
        self, readers: Sequence[TensorReader], rows: int | None, sizes: Iterable[int] = ()
    ) -> list[TensorReader]:
        """Mark the tensors that have one row per token, and leave out their later rows.

        These are the embedding, and head tensors with the same number of rows or one in `sizes`. If
        `rows` is None, all rows count.
        """
        here = (r.shape[0] for r in readers if r.name == self.embedding)
        tables = {*sizes, *here, self.rows}
        flat = [_without_batch(r) if r.name.startswith(HEAD_PART) else r for r in readers]
        return [
            reader._replace(is_table=True).limited(rows)
            if reader.name == self.embedding
            or (reader.name.startswith(HEAD_PART) and {*reader.shape[:1]} & tables)
            else reader
            for reader in flat
        ]

    def prefix_in_memory(self, paths: Iterable[str]) -> str:
        """Return the path of the base model inside a model with these tensors, with a dot.

        Conversions on saving may begin with a name of the base model, and do not match a longer
        path.
        """
        ends = {f".{path}": path for path in named_tensors(self._base)}
        prefixes = Counter(
            path[: start + 1]
            for path in paths
            for start in (match.start() for match in re.finditer(r"\.", path))
            if path[start:] in ends
        )
        known = sum(path in ends.values() for path in paths)
        (prefix, number), *_ = prefixes.most_common(1) or [("", 0)]
        return prefix if number > known else ""

    def _head(self, stored: str, prefix: str) -> str:
        top = stored.partition(".")[0]
        inside = top == prefix[:-1] if prefix else top in self._tops
        return "" if inside else f"{HEAD_PART}.{stored}"

    def _prefixes(self, stored: str) -> Iterator[str]:
        starts = (0, *(match.end() for match in re.finditer(r"\.", stored)))
        return (stored[:i] for i in starts if self._name(stored[i:]) is not None)

    def _name(self, stored: str) -> str | None:
        host, _, leaf = stored.rpartition(".")
        name = f"{host}.{_OLD_NAMES[leaf]}" if leaf in _OLD_NAMES else stored
        if name in self._names:
            return self._names[name]
        # The codes and scales of a quantized checkpoint: q_proj.qweight, q_proj.weight.absmax.
        return name if host in self._hosts or host in self._names else None


class ModuleForm(CheckpointForm):
    """The tensor names of a module that does not come from transformers, unchanged."""

    def __init__(self) -> None:
        self.embedding = self.rows = None
        self.key = "module"

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors unchanged."""
        return dict(tensors)

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Map each name to itself."""
        return {name: name for name in stored}

    def prefix_in_memory(self, paths: Iterable[str]) -> str:
        """Return "", since paths are names."""
        return ""


def form_of(config: PreTrainedConfig) -> CheckpointForm:
    """Return the tensor names of the base model that a configuration describes.

    Raises:
        BackboneError: transformers lacks a model for the configuration.
    """
    facts = {key: value for key, value in config.to_dict().items() if key not in _UNUSED}
    text = json.dumps(facts, sort_keys=True, default=str)
    return _cached_form(type(config), text)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _cached_form(kind: type[PreTrainedConfig], facts: str) -> CheckpointForm:
    config = kind.from_dict(json.loads(facts))
    try:
        with torch.device("meta"):
            return CheckpointForm(new_base_model(config))
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise BackboneError(
            f"transformers cannot build a model of type {config.model_type!r}: {error}",
            expected="a configuration with a class of an auto class",
        ) from error


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Map names to a model's parameters and saved buffers; tied ones have several names.

    Tensors of adapters in slots are left out.
    """
    named: dict[str, Tensor] = {
        join(path, name): parameter
        for path, module in own_modules(model, every_use=True)
        for name, parameter in own_parameters(module)
    }
    for path, module in own_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                named[f"{path}.{name}" if path else name] = buffer
    return named


def in_checkpoint_form(
    named: Mapping[str, Tensor], form: CheckpointForm
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of a model as they would be saved, layer by layer: name and tensor.

    Splitting fused tensors copies them, so only one layer is converted at a time.
    """
    prefix = form.prefix_in_memory(named)
    named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
    sizes = {name: torch.empty(t.shape, device="meta") for name, t in named.items()}
    names = form.names(form.as_stored(sizes))
    for _, layer in groupby(named.items(), key=lambda pair: _LAYER.findall(pair[0])):
        stored = form.as_stored(dict(layer))
        yield [(names[name], tensor) for name, tensor in stored.items() if name in names]


def _without_batch(reader: TensorReader) -> TensorReader:
    """Return a logits bias of shape (1, n) as (n,)."""
    is_row = len(reader.shape) == 2 and reader.shape[0] == 1
    return reader._replace(shape=reader.shape[1:]) if is_row else reader


def _embedding(model: PreTrainedModel) -> Tensor | None:
    try:
        return getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None


def stored_quantization(folder: Path) -> str | None:
    """Return the library that quantized the checkpoint in a folder; None if not quantized."""
    config = stored_config(folder)
    return str(config.get("quant_method", "unknown")) if config else None


def stored_config(folder: Path) -> dict[str, Any]:
    """Return the quantization configuration of a folder; empty if there is none."""
    if not (folder / "config.json").is_file():
        return {}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:  # transformers reports the problem when it loads the model
        return {}
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    return quantization if isinstance(quantization, dict) else {}
