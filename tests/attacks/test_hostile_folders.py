"""Hostile adapter folders and safetensors files: only the three known files are ever opened."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forge import (
    CARD,
    MANIFEST,
    SECONDS,
    TENSORS,
    Tree,
    bomb,
    forge_file,
    join_header,
    refused,
    split_header,
)

import adapterhub as ah
from adapterhub.errors import AdapterhubError, OutputError
from adapterhub.files.native import Saved
from tests.kit.selection import long_table

Header = Callable[[Tree], "Tree | None"]


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(link: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("../escape")
        entry.type, entry.linkname = tarfile.SYMTYPE, link
        archive.addfile(entry)
    return buffer.getvalue()


def torch_file(canary: Path, new: bool) -> bytes:
    from forge import Bomb

    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2), "y": Bomb(canary)}, buffer, _use_new_zipfile_serialization=new)
    return buffer.getvalue()


DISGUISED: dict[str, Callable[[Path], bytes]] = {
    "pickle": bomb,
    "torch file": lambda canary: torch_file(canary, True),
    "old torch file": lambda canary: torch_file(canary, False),
    "zip": lambda canary: zipped({"../../escape": b"x", "/etc/x": b"x", "data.pkl": bomb(canary)}),
    "tar": lambda canary: tarred("/etc/passwd"),
    "pickle behind a header": lambda canary: join_header(b"{}", bomb(canary)),
    "python": lambda canary: f"open({str(canary)!r}, 'w')".encode(),
    "npz": lambda canary: zipped({"x.npy": b"\x93NUMPY\x01\x00"}),
}


@long_table(("name", "kind"), itertools.product([TENSORS, MANIFEST], DISGUISED), parts=3)
def test_another_kind_of_file_under_our_name(saved, model, canary, kind, name) -> None:
    data = DISGUISED[kind](canary)
    forge_file(saved, name, data) if name == TENSORS else (saved / name).write_bytes(data)
    with refused(model, name):
        ah.load(model, saved)


@pytest.mark.parametrize("kind", DISGUISED)
def test_the_card_is_never_parsed(saved, model, canary, kind) -> None:
    forge_file(saved, CARD, DISGUISED[kind](canary))
    assert ah.load(model, saved).active


OTHERS = ("adapter.bin", "adapter.pt", "pytorch_model.bin", "adapter_model.bin", "model.pkl",
          "training.pt", "__init__.py", "adapter.py", "conftest.py", "sitecustomize.py", "x.pth",
          "adapter.safetensors.index.json", "config.json", "adapter_config.json", "tokenizer.json",
          "torch.py", "safetensors.py", "recipe.yaml", ".adapterhub")  # fmt: skip


def test_other_files_are_never_opened(saved, model, canary, monkeypatch) -> None:
    for name in OTHERS:
        (saved / name).write_bytes(bomb(canary))
    opened: list[str] = []
    real = os.open

    def watched(path, *arguments, **options):
        opened.append(Path(os.fsdecode(path)).name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.chdir(saved)  # a module there must not shadow a real one
    assert ah.load(model, saved).active
    assert {TENSORS, MANIFEST} <= set(opened) <= {TENSORS, MANIFEST, CARD}
    assert len(OTHERS) >= 19


LINKED = {
    "symbolic link": lambda path, real: path.symlink_to(real),
    "dangling link": lambda path, real: path.symlink_to(real.with_name("nothing")),
    "link to itself": lambda path, real: path.symlink_to(path),
    "link to a device": lambda path, real: path.symlink_to("/dev/zero"),
    "pipe": lambda path, real: os.mkfifo(path),
    "folder": lambda path, real: path.mkdir(),
    "socket": lambda path, real: _socket(path),
}
if hasattr(os, "geteuid") and os.geteuid() == 0:
    LINKED["device"] = lambda path, real: os.mknod(path, 0o020666, os.makedev(1, 5))


def _socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        working_directory = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(working_directory)


@pytest.mark.skipif(os.name == "nt", reason="Windows has none of these")
@long_table(("kind", "name"), itertools.product(LINKED, [TENSORS, MANIFEST, CARD]), parts=4)
def test_links_pipes_and_devices_are_refused_without_waiting(saved, tmp_path, model, kind, name):
    real = tmp_path / "real"
    (saved / name).rename(real)
    try:
        LINKED[kind](saved / name, real)
    except PermissionError:
        pytest.skip("creating one needs more permissions")
    if name in (TENSORS, MANIFEST):
        nothing = kind == "link to itself" and name == MANIFEST
        with refused(model, "has no adapter" if nothing else name):
            ah.load(model, saved)
        return
    start = time.process_time()
    with contextlib.suppress(AdapterhubError):  # loading may ignore the card
        ah.load(model, saved)
    assert time.process_time() - start < SECONDS


def test_a_hard_link_is_accepted(saved, tmp_path, model) -> None:
    """Caches share files by hard links, which give no access beyond that of a copy."""
    (saved / TENSORS).rename(tmp_path / "real")
    os.link(tmp_path / "real", saved / TENSORS)
    assert ah.load(model, saved).active


def test_the_folder_may_be_a_symbolic_link(saved, tmp_path, model) -> None:
    (tmp_path / "latest").symlink_to(saved)
    assert ah.load(model, tmp_path / "latest").active


def first_entry(header: Tree) -> Tree:
    entry: Tree = header[sorted(header)[0]]
    return entry


def with_fields(**fields: object) -> Header:
    """Change fields of the first tensor's entry."""
    return lambda header: first_entry(header).update(fields)


def gap(header: Tree) -> None:
    for name in sorted(header)[1:]:
        header[name]["data_offsets"] = [at + 4 for at in header[name]["data_offsets"]]


def overlap(header: Tree) -> None:
    one, two = sorted(header)[:2]
    header[two]["data_offsets"] = header[one]["data_offsets"]


HEADERS: dict[str, Header] = {
    "overlapping": overlap,
    "a gap": gap,
    "out of range": with_fields(data_offsets=[0, 10**9]),
    "backwards": with_fields(data_offsets=[256, 0]),
    "negative": with_fields(data_offsets=[-256, 0]),
    "beyond 64 bits": with_fields(data_offsets=[0, 2**64]),
    "near 64 bits": with_fields(data_offsets=[2**64 - 256, 2**64 - 1]),
    "fractions": with_fields(data_offsets=[0.0, 256.0]),
    "three offsets": with_fields(data_offsets=[0, 1, 2]),
    "no offsets": lambda header: first_entry(header).pop("data_offsets") and None,
    "shape of true": with_fields(shape=[True, 64]),
    "negative shape": with_fields(shape=[-2, -32]),
    "float shape": with_fields(shape=[2.0, 32.0]),
    "another shape": with_fields(shape=[64]),
    "overflow to the right size": with_fields(shape=[2**63 + 32, 2]),
    "a product beyond 64 bits": with_fields(shape=[2**40, 2**40]),
    "an unknown dtype": with_fields(dtype="PICKLE"),
    "a packed dtype": with_fields(dtype="F4"),
    "an 8-bit float": with_fields(dtype="F8_E4M3", shape=[256]),
    "another dtype": with_fields(dtype="I32"),
    "complex": with_fields(dtype="C64", shape=[32]),
    "an unknown field": with_fields(auto_map="evil.Evil"),
    "a renamed tensor": lambda header: header.update({"../x": header.pop(sorted(header)[0])}),
    "a tensor more": lambda h: h.update(z={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "no tensors": lambda header: header.clear(),
    "metadata that is not text": lambda header: header.update(__metadata__={"a": [1]}),
    "20,000 deep": lambda header: header.update(__metadata__={"a": deep(20)}),
    "many tensors": lambda header: header.update(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    ),
}


def deep(levels: int) -> list:
    return [deep(levels - 1)] if levels else []


@long_table("attack", HEADERS)
def test_a_forged_header_is_refused(saved, model, attack) -> None:
    header, data = split_header((saved / TENSORS).read_bytes())
    HEADERS[attack](header)
    forge_file(saved, TENSORS, join_header(header, data))
    with refused(model, TENSORS):
        ah.load(model, saved)


RAW: dict[str, Callable[[bytes, bytes], bytes]] = {
    "100 MB claimed": lambda head, rest: join_header(head, rest, 100 << 20),
    "2^63 claimed": lambda head, rest: join_header(head, rest, 2**63),
    "2^64 - 1 claimed": lambda head, rest: join_header(head, rest, 2**64 - 1),
    "nothing claimed": lambda head, rest: join_header(head, rest, 0),
    "one byte more claimed": lambda head, rest: join_header(head, rest, len(head) + 1),
    "one byte less claimed": lambda head, rest: join_header(head, rest, len(head) - 1),
    "only a length": lambda head, rest: b"\0" * 8,
    "shorter than a length": lambda head, rest: b"\0" * 7,
    "9 MB of header": lambda head, rest: join_header(head + b" " * (9 << 20), rest),
    "a name given twice": lambda head, rest: join_header(
        head.replace(b"{", b"{" + head[1 : head.index(b"}") + 1] + b",", 1), rest
    ),
    "a field given twice": lambda head, rest: join_header(
        head.replace(b'"dtype":', b'"dtype":"F32","dtype":', 1), rest
    ),
    "20,000 lists deep": lambda head, rest: join_header(b"[" * 20_000 + b"]" * 20_000, rest),
    "20,000 objects deep": lambda head, rest: join_header(b'{"a":' * 20_000, rest),
    "invalid UTF-8": lambda head, rest: join_header(head.replace(b"encoder", b"en\xffoder"), rest),
    "UTF-16": lambda head, rest: join_header(head.decode().encode("utf-16"), rest),
    "byte-order mark": lambda head, rest: join_header(b"\xef\xbb\xbf" + head, rest),
    "NUL": lambda head, rest: join_header(head.replace(b"encoder", b"en\0oder"), rest),
    "an escape": lambda head, rest: join_header(head.replace(b"encoder", b"\\u001b[2J"), rest),
    "a lone surrogate": lambda head, rest: join_header(head.replace(b"encoder", b"\\ud800"), rest),
    "a number of many digits": lambda head, rest: join_header(
        head.replace(b"[0,", b"[" + b"0" * 5000 + b",", 1), rest
    ),
    "one byte more": lambda head, rest: join_header(head, rest + b"\0"),
    "one byte less": lambda head, rest: join_header(head, rest[:-1]),
    "an archive behind": lambda head, rest: join_header(head, rest + zipped({"../x": b""})),
}


@long_table("attack", RAW)
def test_a_forged_file_is_refused(saved, model, attack) -> None:
    data = (saved / TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    forged = RAW[attack](data[8 : 8 + length], data[8 + length :])
    assert forged != data
    forge_file(saved, TENSORS, forged)
    with refused(model, TENSORS):
        ah.load(model, saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused_on_load_and_save(saved, model, tmp_path, value) -> None:
    tensors = Saved.at(saved).read()[1]
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = value
    header, _ = split_header((saved / TENSORS).read_bytes())
    order = sorted(header, key=lambda n: header[n]["data_offsets"][0])
    data = b"".join(tensors[n].numpy().tobytes() for n in order if n in tensors)
    forge_file(saved, TENSORS, join_header(header, data))
    with refused(model, f"{name}: 1 of"):
        ah.load(model, saved)
    adapter = ah.attach(model, "lora(rank=2)")
    with torch.no_grad():
        adapter.tensors()[name].view(-1)[0] = value
    with pytest.raises(OutputError, match="1 of"):
        adapter.save(tmp_path / "b")
    adapter.detach()
    assert not (tmp_path / "b").exists()


def test_the_tables_are_not_empty() -> None:
    assert len(DISGUISED) >= 8
    assert len(LINKED) >= 7
    assert len(HEADERS) >= 28
    assert len(RAW) >= 23
