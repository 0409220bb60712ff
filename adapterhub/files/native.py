"""The native adapter format, version 1: a folder of three files (docs/reference/format.md).

    polite/
      adapter.safetensors   the tensors
      adapter.json          the manifest (see `adapterhub.files.manifest`)
      README.md             the model card, for people; readers do not open it
      adapter.sig           optional: signatures (see `adapterhub.files.signature`)
      on/                   optional: adapters below this one (see `adapterhub.files.native`)

A writer MUST
 - write all three files; `adapter.json` contains the sha256 of the tensor file and the dtype and
   shape of each tensor. The card has no sha256, so editing it does not break the adapter;
 - name tensors by site id, method and parameter (`encoder.0.attn.q.lora.A`), by head
   (`head.classifier.weight`; with several `heads.rte.classifier.weight`) or `tokens.*` (rows of
   new tokens): 1 to 256 of `A-Z a-z 0-9 _ . -`, no `..`. Names do not contain the adapter name, so
   renaming an adapter does not change its tensors;
 - write canonical bytes: the same adapter has the same sha256 on every machine and with every hash
   seed, and contains no absolute path;
 - write every option of every method and every field of the manifest;
 - refuse an empty adapter, an empty tensor and non-finite values: they come from failed runs;
 - read back the written files and compare them with the live tensors before the folder is visible;
 - move the folder into place with one rename: a crash leaves the old adapter or the new one.
A writer MAY add `adapter.sig`, and PEFT's `adapter_config.json` and `adapter_model.safetensors`.
These six are the closed list `FILES`: no other file is ever written, replaced or published.
A reader MUST
 - open only the first two files, and `adapter.sig` to check who signed; only regular ones. Symbolic
   links in the folder are refused, because they can point outside it. Other files and folders MAY
   exist; they are ignored;
 - compare the sizes that the header, the manifest and the file have before anything is read, and
   sha256, in pieces, before a value is used: no file is in memory as a whole to be checked;
 - refuse a header with duplicate names or fields, or with fields other than dtype, shape and
   offsets;
 - raise one error that lists every missing, unexpected or wrong tensor, and repair nothing;
 - ignore an unknown field or method option that is null, false, "", [] or {}, and refuse any other
   with "needs a newer adapterhub". A later version therefore gives a new field or option such a
   value where it has no effect, and sets `requires` to itself where it has one;
 - use that neutral value for a missing method option.
A reader MAY read `adapter.json` alone (`Saved.at`), to list adapters fast.

Limits and their reasons
 - 1 MiB for the manifest, 32 levels deep: room for about 8000 tensors, and bounded parsing.
 - 64 KiB for the methods with their options: patterns are matched against every site.
 - 1 MiB for the card. 8 MiB for the safetensors header: it repeats the manifest's tensor list.
 - 64 GiB of tensors: a full fine-tune of 16 billion fp32 parameters.
   The file size is compared with the declared shapes before memory is allocated.
 - 10,000 new tokens; more would be a new tokenizer. Their ids are less than 10,000 above the rows
   of the backbone, because logits are as wide as the last id. 128 Ki characters for the chat
   template.
 - dtypes F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL: those that torch supports on every device.

Files are read in pieces: an untrusted file may be as large as its manifest states, so it is never
in memory as a whole. All checks run without torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from adapterhub.config.user_folders import expanded, is_file, is_folder, is_there
from adapterhub.errors import FileError, OutputError, one_line
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    check_sha256,
    explained,
    is_plain_folder,
    open_regular,
    pieces_of,
    put_in_place,
    read_file,
    restore_old,
    staging,
    write_files,
)
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES, card_bytes
from adapterhub.files.card import card as card_of
from adapterhub.files.manifest import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TENSOR_BYTES,
    MAX_TENSOR_FILE_BYTES,
    FoundationRef,
    Manifest,
    TensorInfo,
    from_json,
    size_problems,
    tensor_name_problems,
    to_json,
)
from adapterhub.files.run_folder import no_adapter
from adapterhub.files.schema import parse_object, shorten, show
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, Signature, parse_signatures
from adapterhub.files.signature import SIGNATURE_FILE as SIGNATURE_FILE

if TYPE_CHECKING:
    import torch


TENSORS_FILE = "adapter.safetensors"
COPY_AGAIN = "copy or pull the adapter again; damaged files are not repaired"
_ENTRY = {"dtype", "shape", "data_offsets"}
# For each dtype that may be infinite: the integer dtype of its bits, and the exponent mask.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


class TensorFile:
    """The open tensor file of an adapter, with the sizes in its manifest and header.

    Attributes:
        infos: the tensors by name.
    """

    def __init__(self, folder: Path, manifest: Manifest, file: BinaryIO) -> None:
        self.infos = manifest.tensors
        self._folder, self._file = folder, file
        self._sha256 = manifest.files[TENSORS_FILE]
        self._size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(self._size - 8, MAX_HEADER_BYTES):
            claimed = f"the header claims {length} bytes, the file has {max(self._size - 8, 0)}"
            raise self.broken([claimed])
        self._first = 8 + length  # of the bytes of tensors
        self._offsets = self._read_header(file.read(length))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file in pieces; they are verified once the iteration ends.

        Raises:
            FileError: the digest differs from the manifest.
        """
        for _, piece in self._verified():
            yield piece

    def tensor_pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name with pieces of its bytes, as `pieces`."""
        return ((name, piece) for name, piece in self._verified() if name)

    def values(self, name: str, most: int) -> Iterator[bytes]:
        """Yield the bytes of a tensor, which are not compared with a digest."""
        self._file.seek(self._first + self._offsets[name])
        with self._readable():
            yield from pieces_of(self._file, self.infos[name].nbytes, most)

    def check(self) -> None:
        """Check the digest of the file, and that all values are finite.

        Raises:
            FileError: a check fails; the error lists every such tensor.
        """
        bad: Counter[str] = Counter()
        for name, piece in self.tensor_pieces():
            bad[name] += count_not_finite(self.infos[name].dtype, piece)
        self.refuse(bad)

    def refuse(self, bad: Mapping[str, int]) -> None:
        """Refuse tensors with non-finite values, given their counts by name.

        Raises:
            FileError: a count is positive.
        """
        lines = [
            not_finite(name, count, math.prod(self.infos[name].shape))
            for name, count in sorted(bad.items())
            if count
        ]
        if lines:
            raise self.broken(lines)

    def _verified(self) -> Iterator[tuple[str, bytes]]:
        """Yield the header, under the name "", and the tensors in their order; then check."""
        digest = hashlib.sha256()
        self._file.seek(0)
        order = sorted(self._offsets, key=self._offsets.__getitem__)
        parts = [("", self._first), *((name, self.infos[name].nbytes) for name in order)]
        with self._readable():
            for name, size in parts:
                for piece in pieces_of(self._file, size):
                    digest.update(piece)
                    yield name, piece
            check_sha256(digest.hexdigest(), self._sha256, self._size)

    def _read_header(self, data: bytes) -> dict[str, int]:
        """Return the start of each tensor, from a header that agrees with the manifest.

        Raises:
            FileError: the header differs; the error lists every difference.
        """
        header, problems = parse_object(data, len(data))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
            problems.append("__metadata__ is not an object of texts")
        for name, entry in header.items():
            if not (isinstance(entry, dict) and entry.keys() == _ENTRY):
                problems.append(
                    f"{show(name)}: its fields must be exactly {', '.join(sorted(_ENTRY))}"
                )
        if problems := [f"header: {line}" for line in problems] or self._differences(header):
            raise self.broken(problems)
        offsets, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
            offsets[name], begin = end, end
            end += self.infos[name].nbytes
            place = entry["data_offsets"]
            if place != [begin, end] or any(type(offset) is not int for offset in place):
                raise self.broken([f"{name}: its bytes are not those from {begin} to {end}"])
        if self._size != self._first + end:
            problem = f"{self._size} bytes, its header and manifest declare {self._first + end}"
            raise _damaged(self._folder, [f"{TENSORS_FILE}: {problem}: altered or truncated"])
        return offsets

    def _differences(self, header: Mapping[str, Mapping[str, Any]]) -> list[str]:
        declared = self.infos
        problems = [f"{name}: missing" for name in sorted(declared.keys() - header.keys())]
        problems += [f"{name!a}: unexpected" for name in sorted(header.keys() - declared.keys())]
        for name in sorted(declared.keys() & header.keys()):
            expected = (declared[name].dtype, list(declared[name].shape))
            dtype, shape = header[name]["dtype"], header[name]["shape"]
            if (dtype, shape) != expected or any(type(size) is not int for size in shape):
                is_said = one_line(f"{dtype} {shape}", 200)
                has = f"the manifest has {expected[0]} {expected[1]}"
                problems.append(f"{name}: {is_said}, {has}")
        return problems

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UnreadableError as error:
            raise _damaged(self._folder, [f"{TENSORS_FILE}: {error}"]) from None

    def broken(self, problems: list[str]) -> FileError:
        """Build the error for a file with these problems."""
        return FileError(
            f"{self._folder / TENSORS_FILE} does not match its manifest",
            expected="exactly the tensors of the manifest, with finite values",
            hint=COPY_AGAIN,
            offenders=shorten(problems),
        )


@contextmanager
def open_tensors(folder: Path, manifest: Manifest) -> Iterator[TensorFile]:
    """Open the tensor file of the adapter with this manifest; no value is read yet.

    Raises:
        FileError: it is missing, or its sizes or tensors differ from the manifest.
    """
    declared = manifest.nbytes
    if problems := size_problems(declared):
        raise _damaged(folder, problems)
    with ExitStack() as stack:
        try:
            path, most = folder / TENSORS_FILE, 8 + MAX_HEADER_BYTES + declared
            file = stack.enter_context(open_regular(path, declared, most))
        except UnreadableError as error:
            raise _damaged(folder, [f"{TENSORS_FILE}: {error}"]) from None
        yield TensorFile(folder, manifest, file)


def _damaged(folder: Path, problems: list[str]) -> FileError:
    return FileError(
        f"the adapter in {folder} is damaged",
        expected="the files exactly as they were written",
        hint=COPY_AGAIN,
        offenders=problems,
    )


def _begin(entry: Mapping[str, Any]) -> int:
    """Return the start of a tensor's bytes, by its entry in a header; -1 if the entry is broken."""
    offsets = entry["data_offsets"]
    return offsets[0] if isinstance(offsets, list) and offsets and type(offsets[0]) is int else -1


def not_finite(name: str, bad: int, values: int) -> str:
    """Describe the number of non-finite values of a tensor."""
    return f"{name}: {bad} of {values} values are NaN or infinite"


def count_not_finite(dtype: str, data: bytes) -> int:
    """Count the infinite values and NaNs in the bytes of a safetensors dtype."""
    if dtype not in _EXPONENTS:
        return 0
    import numpy as np

    integers, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=integers)
    return int(np.count_nonzero((bits & exponent) == exponent))


_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {f"torch.{name}": dtype for dtype, name in _TORCH_NAMES.items()}


def checked_copies(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return contiguous copies on the CPU.

    Raises:
        OutputError: the tensors cannot be saved; lists every problem.
    """
    problems = [line for name, t in tensors.items() for line in _tensor_problems(name, t)]
    _refuse(manifest, problems + _whole_problems(manifest, tensors))
    return {name: _on_cpu(tensors[name]).clone() for name in sorted(tensors)}


def checked_infos(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Return a manifest's entries for tensors, which may be sharded over processes.

    Raises:
        OutputError: they cannot be saved, whatever their values; lists every problem.
    """
    problems = [line for name, t in tensors.items() for line in _kind_problems(name, t)]
    _refuse(manifest, problems + _whole_problems(manifest, tensors))
    return {name: tensor_info(tensor) for name, tensor in sorted(tensors.items())}


def _whole_problems(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return one line for each problem of the names, the heads and the size of all tensors."""
    problems = tensor_name_problems(tensors)
    if not tensors:
        problems.append("no tensors: the adapter is empty")
    if manifest.head and not any(str(name).startswith("head.") for name in tensors):
        problems.append("the manifest has a task head, but no tensor is named head.*")
    problems += [
        f"the manifest has the head {name!r}, but no tensor is named heads.{name}.*"
        for name, record in manifest.heads.items()
        if record.head and not any(str(each).startswith(f"heads.{name}.") for each in tensors)
    ]
    return problems or size_problems(
        sum(tensor_info(t).nbytes for t in tensors.values() if str(t.dtype) in _NAMES)
    )


def _refuse(manifest: Manifest, problems: list[str]) -> None:
    if problems:
        raise OutputError(
            f"adapter {manifest.name!r} cannot be saved",
            expected="named, non-empty, finite, dense tensors of a supported dtype",
            hint="use a checkpoint from before the run diverged; gather sharded parameters first",
            offenders=shorten(problems),
        )


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _kind_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if str(tensor.dtype) not in _NAMES:
        return [f"{name}: {tensor.dtype} is not one of {' '.join(DTYPE_BYTES)}"]
    return [f"{name}: empty, shape {tuple(tensor.shape)}"] if tensor.numel() == 0 else []


def _tensor_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if problems := _kind_problems(name, tensor):
        return problems
    if hasattr(tensor, "full_tensor"):
        return [f"{name}: a shard of {tuple(tensor.shape)}; gather it on all processes"]
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        return [f"{name}: a tensor without dense storage ({tensor.layout}, {tensor.device})"]
    return _finite_problems(name, tensor)


def _finite_problems(name: str, tensor: torch.Tensor) -> list[str]:
    import torch

    bad = int(tensor.numel() - torch.isfinite(tensor.detach()).sum())
    return [not_finite(name, bad, tensor.numel())] if bad else []


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Return the dtype and shape of a tensor, for the manifest."""
    return TensorInfo(_NAMES[str(tensor.dtype)], tuple(tensor.shape))


def is_same_tensor(read: torch.Tensor, live: torch.Tensor) -> bool:
    """Compare dtype, shape and bytes."""
    import torch

    live = _on_cpu(live)
    if read.dtype != live.dtype or read.shape != live.shape:
        return False
    return torch.equal(read.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8))


def tensor_bytes(copies: dict[str, torch.Tensor]) -> bytes:
    """Serialize tensors that `checked_copies` returned."""
    import safetensors.torch

    return safetensors.torch.save(copies)


def verified_tensors(file: TensorFile) -> dict[str, torch.Tensor]:
    """Read the tensors of an open file, sorted by name.

    Raises:
        FileError: the file does not match the digest of its manifest, or has non-finite values.
    """
    import torch

    data = {name: bytearray(info.nbytes) for name, info in sorted(file.infos.items())}
    bad: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for name, piece in file.tensor_pieces():
        data[name][read[name] : read[name] + len(piece)] = piece
        read[name] += len(piece)
        bad[name] += count_not_finite(file.infos[name].dtype, piece)
    file.refuse(bad)
    return {
        name: torch.frombuffer(data[name], dtype=getattr(torch, _TORCH_NAMES[info.dtype])).reshape(
            info.shape
        )
        for name, info in sorted(file.infos.items())
    }


MANIFEST_FILE = "adapter.json"

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
# PEFT's two files and signatures would be stale after an overwrite, so they are replaced too.
FILES = frozenset({TENSORS_FILE, MANIFEST_FILE, CARD_FILE, SIGNATURE_FILE, *PEFT_FILES})
# The digests of peft's files, and the signatures of that list by the signers of the manifest.
BESIDE_FILE, BESIDE_SIGNATURE = "beside.json", "beside.sig"
BESIDE = (*PEFT_FILES, BESIDE_FILE, BESIDE_SIGNATURE)  # published with an adapter, never pulled
ON_FOLDER = "on"  # copies of the adapters that this one was trained on
_COPY_DIGITS = 16  # characters of a digest in the name of its folder


def write_adapter(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    card: str = "",
    overwrite: bool = False,
    beside: Callable[[Path], None] | None = None,
) -> Manifest:
    """Write an adapter to `folder`; return its manifest with `tensors` and `files` filled in.

    Creates missing parent folders. An existing folder is replaced atomically, and only if it
    contains nothing but an adapter.

    The card is generated from the manifest by default. `beside` writes folders next to the files,
    before they are moved into place.

    Raises:
        OutputError: the adapter is empty or not representable, or `folder` cannot be written; the
            old folder is unchanged.
    """
    folder = Path(folder)
    payload = adapter_files(manifest, tensors, card)
    with explained(folder):
        check_place(folder, overwrite, replaceable(folder))
        with staging(folder) as staged:
            write_files(staged, payload)
            if beside is not None:
                beside(staged)
            written = _verify(staged, payload[MANIFEST_FILE], tensors)
            put_in_place(staged, folder, overwrite)
    return written


def adapter_files(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], card: str = ""
) -> dict[str, bytes]:
    """Return the files of an adapter: tensors, manifest and card.

    Raises:
        OutputError: the adapter is empty or not representable.
    """
    copies = checked_copies(manifest, tensors)
    data = tensor_bytes(copies)
    infos = {name: tensor_info(tensor) for name, tensor in sorted(copies.items())}
    sha256 = hashlib.sha256(data).hexdigest()
    return {TENSORS_FILE: data} | _described(manifest, infos, sha256, card)


def check_writable(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], card: str = ""
) -> Manifest:
    """Check that an adapter can be saved with tensors of these sizes, whatever their values.

    Returns:
        The manifest, as read from the bytes that would be written.

    Raises:
        OutputError: it cannot be saved; lists every problem.
    """
    infos = checked_infos(manifest, tensors)
    files = _described(manifest, infos, hashlib.sha256().hexdigest(), card)
    try:
        return from_json(files[MANIFEST_FILE])
    except FileError as error:
        raise OutputError(
            f"adapter {manifest.name!r} could not be read again",
            offenders=[error.problem, *error.offenders],
        ) from error


def _described(
    manifest: Manifest, infos: dict[str, TensorInfo], sha256: str, card: str
) -> dict[str, bytes]:
    """Return the manifest of tensors with this digest, and the given or generated card."""
    filled = replace(manifest, tensors=infos, files={TENSORS_FILE: sha256})
    return {MANIFEST_FILE: to_json(filled), CARD_FILE: card_bytes(card or card_of(filled))}


def replaceable(folder: Path) -> frozenset[str]:
    """Return the names of the entries that a new adapter may replace in a folder.

    They include the folder of adapters below unless it has other contents.
    """
    on = folder / ON_FOLDER
    if not is_plain_folder(on):
        return FILES
    only_copies = all(
        re.fullmatch(r"[0-9a-f]{16}", copy.name) and (copy / MANIFEST_FILE).is_file()
        for copy in on.iterdir()
    )
    return FILES | {ON_FOLDER} if only_copies else FILES


def find_adapter(folder: Path) -> Path | None:
    """Return the folder with the adapter's files: `folder` or its subfolder `adapter`, or None."""
    inner = folder / "adapter"
    candidates = (folder,) if os.path.islink(inner) else (folder, inner)
    return next((c for c in candidates if is_file(c / MANIFEST_FILE)), None)


def adapter_folder(folder: Path) -> Path:
    """Return the folder with the adapter's files, as `find_adapter`.

    Raises:
        FileError: the folder does not contain an adapter.
    """
    if inner := find_adapter(folder):
        return inner
    raise no_adapter(folder)


@dataclass(frozen=True)
class Saved:
    """The adapter in a folder: its manifest, read once, and its other files, read when used.

    Loading, copying and signing use the verified bytes: files that change afterwards are refused,
    since they do not match the digests of this manifest.

    Attributes:
        folder: its files.
        manifest: the manifest.
        digest: the sha256 of the manifest, which contains the sha256 of the tensors.
        data: the bytes of the manifest.
        on: the adapters that it was trained on, once found.
    """

    folder: Path
    manifest: Manifest
    digest: str
    data: bytes = field(repr=False)
    on: tuple[Foundation, ...] = ()

    @classmethod
    def at(cls, folder: str | Path | Saved, sha256: str | None = None) -> Saved:
        """Read and verify the manifest of the adapter in `folder`; open no other file.

        Its bytes must have the digest `sha256`, if given. A manifest that was already read is
        reused.

        Raises:
            FileError: the manifest is missing or invalid, or the folder contains symbolic links.
        """
        if isinstance(folder, Saved):
            return folder
        folder = Path(folder)
        _check_folder(folder)
        try:
            data = read_file(folder / MANIFEST_FILE, 0, MAX_MANIFEST_BYTES, sha256)
        except UnreadableError as error:
            peft = (folder / PEFT_FILES[0]).is_file()
            raise FileError(
                f"{folder / MANIFEST_FILE}: {error}",
                expected="an adapter folder with its manifest",
                hint=f"this is a peft checkpoint: adapterhub import {folder} --output OUT"
                if peft
                else COPY_AGAIN,
            ) from None
        manifest = _complete(from_json(data, str(folder / MANIFEST_FILE)), folder)
        return cls(folder, manifest, hashlib.sha256(data).hexdigest(), data)

    @classmethod
    def of(cls, folder: str | Path) -> Saved:
        """Read the adapter of a folder, or of a training run's folder, as `at`.

        Raises:
            FileError: the adapter is missing, or its manifest is invalid.
        """
        return cls.at(adapter_folder(expanded(folder)))

    def open_tensors(self) -> AbstractContextManager[TensorFile]:
        """Open the tensor file; no value is read yet.

        Raises:
            FileError: it is missing, or its sizes or tensors differ from the manifest.
        """
        return open_tensors(self.folder, self.manifest)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the tensors (on the CPU, sorted by name).

        Raises:
            FileError: the tensors do not match the manifest; lists every problem.
        """
        with self.open_tensors() as file:
            return verified_tensors(file)

    def read(self) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """Return the manifest and the tensors, as `tensors`."""
        return self.manifest, self.tensors()

    def check(self) -> Saved:
        """Check the tensors, without torch and in little memory; return the adapter itself.

        Raises:
            FileError: the tensors do not match the manifest; lists every problem.
        """
        with self.open_tensors() as file:
            file.check()
        return self

    def signatures(self) -> tuple[Signature, ...]:
        """Read the signatures next to the manifest; empty if the file does not exist.

        Raises:
            FileError: the file is a link, too large, or not valid.
        """
        return read_signatures(self.folder)

    def beside(self) -> dict[str, bytes]:
        """Read the files of another library in the folder, by name.

        Raises:
            FileError: one is a link, not a regular file, or too large.
        """
        files = {}
        for path in (self.folder / name for name in BESIDE):
            if os.path.lexists(path):
                try:
                    files[path.name] = read_file(path, 0, MAX_TENSOR_BYTES, None)
                except UnreadableError as error:
                    expected = "a regular file as published"
                    raise FileError(f"{path}: {error}", expected=expected) from None
        return files

    def copy_to(self, target: Path, files: Mapping[str, bytes]) -> None:
        """Write a copy of the tensors into `target`, with the other files, given by name.

        The verified bytes are written, so the source may change at any time.

        Raises:
            FileError: the tensors do not match the manifest; `target` is then incomplete.
        """
        with self.open_tensors() as file:
            file.check()  # before a sparse file takes space on the disk
            write_files(target, {**files, TENSORS_FILE: file.pieces()})


def read_signatures(folder: Path) -> tuple[Signature, ...]:
    """Read the signatures next to an adapter's manifest; empty if the file does not exist.

    Raises:
        FileError: the file is a link, too large, or not valid.
    """
    path = folder / SIGNATURE_FILE
    try:
        data = read_file(path, 1, MAX_SIGNATURE_BYTES, None)
    except UnreadableError as error:
        if str(error) == "missing":
            return ()
        raise FileError(f"{path}: {error}", expected="a small regular file") from None
    return parse_signatures(data, str(path))


def published_texts(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read the existing files of these names; of tensor files, only the text.

    Raises:
        FileError: one is a link, not a regular file, or larger than any published file.
    """
    texts = {}
    for name in (name for name in names if os.path.lexists(folder / name)):
        is_binary = name.endswith(".safetensors")
        most = MAX_TENSOR_FILE_BYTES if is_binary else MAX_CARD_BYTES
        try:
            with open_regular(folder / name, 0, most) as file:
                start = file.read(8)
                size = int.from_bytes(start, "little") if is_binary else most
                texts[name] = start + file.read(min(size, MAX_HEADER_BYTES))
        except UnreadableError as error:
            raise FileError(f"{folder / name}: {error}", expected="a regular file") from None
    return texts


def _complete(manifest: Manifest, folder: Path) -> Manifest:
    """Refuse the manifest of an adapter that was not saved."""
    problems = []
    if TENSORS_FILE not in manifest.files:
        problems.append(f"files: {TENSORS_FILE} is not listed")
    if not manifest.tensors:
        problems.append("tensors: none, the adapter is empty")
    if problems:
        raise FileError(
            f"{folder / MANIFEST_FILE} is not complete",
            expected="the manifest of a saved adapter",
            hint=COPY_AGAIN,
            offenders=problems,
        )
    return manifest


@dataclass(frozen=True)
class Foundation:
    """An adapter that others were trained on, with local files.

    Attributes:
        ref: its record in a manifest.
        saved: its files, and the adapters that it was trained on itself.
    """

    ref: FoundationRef
    saved: Saved


def copy_of(folder: Path, ref: FoundationRef) -> Path:
    """Return the path of the copy of an adapter that another one was trained on."""
    return folder / ON_FOLDER / ref.digest[:_COPY_DIGITS]


def write_copies(folder: Path, foundations: Sequence[Foundation]) -> None:
    """Write verified copies of adapters, and of adapters below them, into the folder of another.

    Raises:
        FileError: the files of an adapter changed since they were found.
    """
    for each in foundations:
        target = copy_of(folder, each.ref)
        if target.exists():  # already written
            continue
        target.mkdir(parents=True)
        _write_copy(target, each)
        write_copies(target, each.saved.on)


def check_foundations(saved: Saved) -> None:
    """Check that all adapters which an adapter was trained on were found, in order.

    Raises:
        FileError: they differ or are missing.
    """
    manifest = saved.manifest
    if tuple(each.ref.digest for each in saved.on) == tuple(ref.digest for ref in manifest.on):
        return
    raise FileError(
        f"the adapter {manifest.name!r} was trained on other adapters, which are not here",
        offenders=[f"{ref}, sha256 {ref.digest[:12]}" for ref in manifest.on],
        expected="the adapter with those below it",
        hint="ah.load(model, REFERENCE), which brings them along",
    )


def all_below(foundations: Sequence[Foundation]) -> Iterator[Foundation]:
    """Yield adapters and the adapters below them, the lowest of each first."""
    for each in foundations:
        yield from all_below(each.saved.on)
        yield each


def chain_text(foundations: Sequence[Foundation]) -> str:
    """Describe adapters and their chains: `domain@v1 (sha256 ...), which is on lang@v1 (...)`."""
    texts = []
    for each in foundations:
        on = each.saved.on
        below = f", which is on {chain_text(on)}" if on else ""
        texts.append(f"{each.ref} (sha256 {each.ref.digest[:12]}){below}")
    return "; ".join(texts)


def copy_problems(saved: Saved) -> list[str]:
    """List the copies that are missing in the folder of an adapter, or altered."""
    problems = []
    for ref in saved.manifest.on:
        copy = copy_of(saved.folder, ref)
        try:
            below = Saved.at(copy, ref.digest).check()
        except FileError as error:
            problems.append(f"{ref}: {error.problem}")
        else:
            problems += copy_problems(below)
    return problems


def _write_copy(target: Path, foundation: Foundation) -> None:
    """Copy the files of an adapter, if they have the expected digests."""
    saved = foundation.saved
    try:
        files = {MANIFEST_FILE: saved.data}
        for name in (CARD_FILE, SIGNATURE_FILE):
            if (saved.folder / name).is_file():
                files[name] = read_file(saved.folder / name, 0, MAX_CARD_BYTES, None)
        saved.copy_to(target, files)
    except (UnreadableError, FileError) as error:
        raise FileError(
            f"{saved.folder} is not what {foundation.ref.name!r} was when it was found: {error}",
            expected=f"a manifest with sha256 {saved.digest}, and its tensors",
            hint="load the adapter again",
        ) from None


def _verify(staged: Path, manifest: bytes, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Read back the written files and compare them with the live tensors, bit by bit."""
    problems: list[str] = []
    try:
        written, read = Saved.at(staged).read()
    except FileError as error:
        problems = [error.problem, *error.offenders]
    else:
        if to_json(written) != manifest:
            problems.append("the manifest differs")
        if set(read) != set(tensors):
            problems.append("the tensor names differ")
        problems += [
            n for n in read.keys() & tensors.keys() if not is_same_tensor(read[n], tensors[n])
        ]
        if not problems:
            return written
    raise OutputError(
        "the written files differ from the adapter in memory and were removed",
        expected="the same names, dtypes, shapes and bytes",
        hint="save again while no training is running; if it happens again, check the disk",
        offenders=shorten(sorted(problems)),
    )


def _check_folder(folder: Path) -> None:
    restore_old(folder)
    if not is_folder(folder):
        raise FileError(
            f"{folder} is not a folder" if is_there(folder) else f"no such folder: {str(folder)!r}",
            expected="an adapter folder",
            hint="check the path, or pull the adapter",
        )
    try:
        links = sorted(entry.name for entry in folder.iterdir() if entry.is_symlink())
    except OSError as error:  # also if it was removed meanwhile
        raise FileError(f"{folder} cannot be listed: {error.strerror or error}") from None
    if links:
        raise FileError(
            f"{folder} contains symbolic links",
            expected="regular files only",
            hint="if you trust the link targets, copy the adapter with links followed (cp -rL)",
            offenders=shorten([ascii(name) for name in links]),
        )
