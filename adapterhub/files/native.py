"""The native adapter format, version 1: a folder with three files (the same page: docs/format.md).

    polite/
      adapter.safetensors   the numbers
      adapter.json          the manifest (see `adapterhub.files.manifest`)
      README.md             the model card, for people; no reader opens it

A writer MUST
 - write all three; `adapter.json` holds sha256 of the numbers' file, and each tensor's dtype and
   shape. The card has no sha256: people edit it on the Hub, and that breaks no adapter;
 - name tensors by site id, method and parameter (`encoder.0.attn.q.lora.A`), by head
   (`head.classifier.weight`) or `tokens.*` (rows of new tokens): 1 to 256 of `A-Z a-z 0-9 _ . -`,
   no `..`. No adapter name is in them, so a renamed adapter has the same numbers;
 - write canonical bytes: the same adapter gives the same sha256 on every machine, with every hash
   seed, and no absolute path is in them;
 - write every option of every method, and every field of the manifest;
 - refuse an empty adapter, an empty tensor and a number that is not finite: each is a lost run;
 - re-open what it wrote and compare it with the live tensors before anybody can see the folder;
 - put the folder in place by one rename, so that a crash leaves the old adapter or the new one.
A writer MAY put PEFT's `adapter_config.json` and `adapter_model.safetensors` beside the three.
These five are the closed list `FILES`: no other file is ever written, replaced or published.
A reader MUST
 - open only the first two, and only regular ones. A symbolic link directly in the folder is
   refused: it can lead outside. Other files and folders MAY lie there; they are ignored;
 - compare sha256 before it parses anything but the manifest;
 - refuse a header with a name or field given twice, or a field beside dtype, shape and offsets;
 - raise one error that lists every missing, unexpected or wrong tensor, and repair nothing;
 - ignore an unknown field or method option that is null, false, "", [] or {}, and refuse any other
   with "needs a newer adapterhub". So a later version gives each new field and option such a value
   where it changes nothing, and names itself in `requires` where it does;
 - take a method option that is missing for that neutral value.
A reader MAY read `adapter.json` alone (`read_manifest`), to list adapters fast.

Limits, and why
 - 1 MiB for the manifest, 32 levels deep: room for some 8000 tensors, and no parser to exhaust.
 - 64 KiB for the methods with their options: patterns are matched with every site.
 - 1 MiB for the card. 8 MiB for the safetensors header: it repeats what the manifest lists.
 - 64 GiB of tensors: a full fine-tune of 16 billion fp32 parameters; more is not an adapter.
   The size of the file is compared with the declared shapes before memory is taken for it.
 - 10,000 new tokens: more is a new tokenizer. Their ids are less than 10,000 above the rows of the
   backbone, for logits are as wide as the last id. 128 Ki characters for the chat template.
 - dtypes F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL: what torch computes with on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from adapterhub.errors import FileError, OutputError, printable
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    explained,
    put_in_place,
    read_file,
    restore_old,
    staging,
    write_files,
)
from adapterhub.files.card import card as card_of
from adapterhub.files.manifest import (
    DTYPE_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    TensorInfo,
    from_json,
    tensor_name_problems,
    to_json,
)
from adapterhub.files.schema import parse_object, shorten, show

TENSORS_FILE = "adapter.safetensors"
MANIFEST_FILE = "adapter.json"
CARD_FILE = "README.md"
MAX_CARD_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_TENSOR_BYTES = 64 << 30

_DTYPES: Mapping[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_ENTRY = {"dtype", "shape", "data_offsets"}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_AGAIN = "copy or pull the adapter again; a damaged file is never repaired"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
# PEFT's two would be stale after an overwrite, so they are replaced too.
FILES = frozenset({TENSORS_FILE, MANIFEST_FILE, CARD_FILE, *PEFT_FILES})


def write_adapter(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    card: str = "",
    overwrite: bool = False,
) -> Manifest:
    """Write an adapter to `folder`, and return its manifest with `tensors` and `files` filled in.

    Missing parents are made. An existing folder is replaced only with `overwrite`, in one step, and
    only if it holds nothing but an adapter. Raises OutputError, and leaves `folder` alone, if the
    adapter is empty or cannot be represented, or if the place cannot be written.
    """
    folder = Path(folder)
    numbers = _checked(manifest, tensors)
    payload = {TENSORS_FILE: safetensors.torch.save(numbers)}
    filled = replace(
        manifest,
        tensors={name: _info(tensor) for name, tensor in sorted(numbers.items())},
        files={TENSORS_FILE: hashlib.sha256(payload[TENSORS_FILE]).hexdigest()},
    )
    payload[MANIFEST_FILE] = to_json(filled)
    payload[CARD_FILE] = card_bytes(card or card_of(filled))
    with explained(folder):
        check_place(folder, overwrite, FILES)
        with staging(folder) as staged:
            write_files(staged, payload)
            written = _verify(staged, payload[MANIFEST_FILE], tensors)
            put_in_place(staged, folder, overwrite)
    return written


def find_adapter(folder: Path) -> Path | None:
    """The folder with the adapter's files: the one given, or `adapter` in a run's folder."""
    inner = folder / "adapter"
    try:
        candidates = (folder,) if inner.is_symlink() else (folder, inner)
        return next((c for c in candidates if (c / MANIFEST_FILE).is_file()), None)
    except OSError:  # no name that a file could have
        return None


def adapter_folder(folder: Path) -> Path:
    """As `find_adapter`, where there must be one.

    Raises:
        FileError: there is none.
    """
    if found := find_adapter(folder):
        return found
    raise FileError(
        f"there is no adapter in {folder}",
        expected=f"a folder with {MANIFEST_FILE}, or the output folder of a run",
    )


def read_adapter(folder: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The manifest and the tensors (on the CPU, sorted by name) of the adapter in `folder`.

    Raises FileError, with every offender, unless the folder holds exactly what was written.
    """
    manifest = read_manifest(folder)
    return manifest, read_tensors(folder, manifest)


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors (on the CPU, sorted by name) of the adapter in `folder` that has this manifest.

    Raises FileError, with every offender, unless they are exactly what was written.
    """
    folder = Path(folder)
    declared = sum(info.nbytes for info in manifest.tensors.values())
    problems = _size_problems(declared)
    data = b""
    try:
        if not problems:
            most = 8 + MAX_HEADER_BYTES + declared
            sha256 = manifest.files[TENSORS_FILE]
            data = read_file(folder / TENSORS_FILE, declared, most, sha256)
    except UnreadableError as error:
        problems = [f"{TENSORS_FILE}: {error}"]
    if problems:
        raise FileError(
            f"the adapter in {folder} is damaged",
            expected="the files exactly as they were written",
            hint=_AGAIN,
            offenders=problems,
        )
    return _tensors(folder, manifest, data)


def read_manifest(folder: Path) -> Manifest:
    """The verified manifest of the adapter in `folder`; the other files are not opened.

    Raises FileError if it is missing or not sound, or if the folder holds symbolic links.
    """
    folder = Path(folder)
    _check_folder(folder)
    try:
        data = read_file(folder / MANIFEST_FILE, 0, MAX_MANIFEST_BYTES, None)
    except UnreadableError as error:
        peft = (folder / "adapter_config.json").is_file()
        raise FileError(
            f"{folder / MANIFEST_FILE}: {error}",
            expected="an adapter folder with its manifest",
            hint=f"these are files of peft: adapterhub import {folder} --output OUT"
            if peft
            else _AGAIN,
        ) from None
    manifest = from_json(data, str(folder / MANIFEST_FILE))
    listed = TENSORS_FILE in manifest.files
    absent = [] if listed else [f"files: {TENSORS_FILE} is not listed"]
    if not manifest.tensors:
        absent.append("tensors: none, so the adapter is empty")
    if absent:
        raise FileError(
            f"{folder / MANIFEST_FILE} is not complete",
            expected="the manifest of a saved adapter",
            hint=_AGAIN,
            offenders=absent,
        )
    return manifest


def _checked(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies on the CPU, or one OutputError for all that cannot be saved."""
    problems = tensor_name_problems(tensors)
    problems += [line for name, t in tensors.items() for line in _tensor_problems(name, t)]
    if not tensors:
        problems.append("no tensors: the adapter is empty")
    if manifest.head and not any(str(name).startswith("head.") for name in tensors):
        problems.append("the manifest promises a task head, but no tensor is named head.*")
    if not problems:
        problems = _size_problems(sum(_info(t).nbytes for t in tensors.values()))
    if problems:
        raise OutputError(
            f"adapter {manifest.name!r} cannot be saved",
            expected="named tensors that are not empty, finite, dense, and of a known dtype",
            hint="save before the run diverged, and gather sharded parameters before saving",
            offenders=shorten(problems),
        )
    return {name: _on_cpu(tensors[name]).clone() for name in sorted(tensors)}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _tensor_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if tensor.dtype not in _DTYPE_NAMES:
        return [f"{name}: {tensor.dtype} is not one of {' '.join(DTYPE_BYTES)}"]
    if hasattr(tensor, "full_tensor"):
        return [f"{name}: a shard of {tuple(tensor.shape)}; gather it on all processes"]
    if tensor.layout != torch.strided or tensor.is_meta:
        return [f"{name}: a tensor without dense storage ({tensor.layout}, {tensor.device})"]
    if tensor.numel() == 0:
        return [f"{name}: empty, shape {tuple(tensor.shape)}"]
    return _finite_problems(name, tensor)


def _finite_problems(name: str, tensor: torch.Tensor) -> list[str]:
    bad = int(tensor.numel() - torch.isfinite(tensor.detach()).sum())
    return [f"{name}: {bad} of {tensor.numel()} numbers are NaN or infinite"] if bad else []


def _size_problems(nbytes: int) -> list[str]:
    if nbytes <= MAX_TENSOR_BYTES:
        return []
    return [f"{nbytes} bytes of tensors, more than {MAX_TENSOR_BYTES}"]


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def card_bytes(card: str) -> bytes:
    """A card as it is written.

    Raises:
        OutputError: it is too large.
    """
    text = card.replace("\r\n", "\n").rstrip("\n") + "\n"
    data = text.encode("utf-8", errors="replace")
    if len(data) <= MAX_CARD_BYTES:
        return data
    raise OutputError(
        f"the card has {len(data)} bytes",
        expected=f"at most {MAX_CARD_BYTES} bytes",
        hint="link to long tables instead of pasting them",
    )


def _verify(staged: Path, manifest: bytes, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Read back what was written and compare it with the live tensors, bit by bit."""
    problems: list[str] = []
    try:
        found, read = read_adapter(staged)
    except FileError as error:
        problems = [error.problem, *error.offenders]
    else:
        if to_json(found) != manifest:
            problems.append("the manifest differs")
        if set(read) != set(tensors):
            problems.append("the names of the tensors differ")
        problems += [n for n in read.keys() & tensors.keys() if not _same(read[n], tensors[n])]
        if not problems:
            return found
    raise OutputError(
        "the adapter that was written is not the one in memory, so it was removed",
        expected="the same names, dtypes, shapes and bytes",
        hint="save again while nothing trains; if it happens again, check the disk",
        offenders=shorten(sorted(problems)),
    )


def _same(read: torch.Tensor, live: torch.Tensor) -> bool:
    live = _on_cpu(live)
    if read.dtype != live.dtype or read.shape != live.shape:
        return False
    return torch.equal(read.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8))


def _check_folder(folder: Path) -> None:
    restore_old(folder)
    if not folder.is_dir():
        raise FileError(
            f"{folder} is {'not a folder' if folder.exists() else 'missing'}",
            expected="an adapter folder",
            hint="check the path, or pull the adapter",
        )
    links = sorted(entry.name for entry in folder.iterdir() if entry.is_symlink())
    if links:
        raise FileError(
            f"{folder} holds symbolic links",
            expected="regular files only",
            hint="copy the adapter with links followed (cp -rL) if you trust where they lead",
            offenders=shorten([ascii(name) for name in links]),
        )


def _tensors(folder: Path, manifest: Manifest, data: bytes) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    views: dict[str, Any] = {}
    problems = _strict_header(data)
    try:
        views = {} if problems else dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        problems = [f"not a sound safetensors file: {printable(str(error))}"]
    problems = problems or _header_problems(manifest, views)
    for name in () if problems else sorted(views):
        flat = torch.frombuffer(views[name]["data"], dtype=_DTYPES[views[name]["dtype"]])
        tensors[name] = flat.reshape(views[name]["shape"])
        problems += _finite_problems(name, tensors[name])
    if problems:
        raise FileError(
            f"{folder / TENSORS_FILE} does not hold what its manifest says",
            expected="every tensor of the manifest, no other one, and finite numbers only",
            hint=_AGAIN,
            offenders=shorten(problems),
        )
    return tensors


def _strict_header(data: bytes) -> list[str]:
    """What of a safetensors header its own parser lets pass, such as a name given twice."""
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        return [f"the header claims {length} bytes, the file has {max(len(data) - 8, 0)}"]
    header, problems = parse_object(data[8 : 8 + length], length)
    for name, entry in header.items():
        if name != "__metadata__" and not (isinstance(entry, dict) and entry.keys() == _ENTRY):
            problems.append(f"{show(name)}: not exactly {', '.join(sorted(_ENTRY))}")
    return [f"header: {line}" for line in problems]


def _header_problems(manifest: Manifest, views: Mapping[str, Mapping[str, object]]) -> list[str]:
    declared = manifest.tensors
    problems = [f"{name}: missing" for name in sorted(declared.keys() - views.keys())]
    problems += [f"{name!a}: unexpected" for name in sorted(views.keys() - declared.keys())]
    for name in sorted(declared.keys() & views.keys()):
        want = (declared[name].dtype, list(declared[name].shape))
        found = (views[name]["dtype"], views[name]["shape"])
        if found != want:
            problems.append(f"{name}: {found[0]} {found[1]}, the manifest says {want[0]} {want[1]}")
    return problems
