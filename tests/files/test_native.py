"""Adapters are written canonically and read back exactly, or refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import FileError, OutputError
from adapterhub.files import atomic as folder_module
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES, read_card
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead, TensorInfo, to_json
from adapterhub.files.native import Saved, write_adapter
from tests.kit.registries import IDENTITY

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
MAKE_GOLDEN = GOLDEN.with_name("make_v1.py")
GOLDEN_SHA256 = {
    "README.md": "e55797b3f40309735d9eeb68d0a3361e941ea8d60df245ffcbdeca09a72cad57",
    "adapter.json": "c3ba04ffd15eb36392fd046afc8c61692ccd966cd77948877c57896cb83c921a",
    "adapter.safetensors": "71a0af0d0fff6583b5fad1313bed99bd44036eaed6c1a0387d728bbcf190ce2e",
}
FILES = tuple(GOLDEN_SHA256)
READ = ("adapter.json", "adapter.safetensors")  # the card is for people
MANIFEST = Manifest(
    name="polite",
    methods=({"lora": {"rank": 2}},),
    backbone=BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY),
)
TENSORS = {"encoder.0.attn.q.lora.A": torch.arange(6.0).reshape(2, 3), "scale": torch.tensor(2.0)}
OTHER = {"scale": torch.tensor(3.0)}

Damage = Callable[[Path], None]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "polite", MANIFEST, TENSORS)
    return tmp_path / "polite"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a copy of the golden adapter for tests that damage and repair it repeatedly."""
    folder = tmp_path_factory.mktemp("scratch") / "golden"
    shutil.copytree(GOLDEN, folder)
    yield folder
    Saved.at(folder).read()


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def reading(folder: Path) -> str:
    with pytest.raises(FileError) as caught:
        Saved.at(folder).read()
    assert caught.value.hint
    return str(caught.value)


def writing(folder: Path, tensors: Any = TENSORS, **more: Any) -> str:
    """Return the writer's message; check that it leaves no files behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(OutputError) as caught:
        write_adapter(folder, more.pop("manifest", MANIFEST), tensors, **more)
    assert sorted(folder.parent.iterdir()) == before
    return str(caught.value)


def forge(folder: Path, tensors: dict[str, torch.Tensor], **declared: TensorInfo) -> None:
    """Write these tensors with valid checksums, as an attacker would."""
    data = safetensors.torch.save(tensors)
    files = {"adapter.safetensors": data}
    manifest = replace(
        MANIFEST,
        tensors=declared,
        files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    )
    folder.mkdir(exist_ok=True)
    for name, content in {**files, "adapter.json": to_json(manifest)}.items():
        (folder / name).write_bytes(content)


def test_the_golden_bytes_have_not_changed() -> None:
    assert digests(GOLDEN) == GOLDEN_SHA256


def test_the_golden_adapter_round_trips(tmp_path: Path) -> None:
    manifest, tensors = Saved.at(GOLDEN).read()
    assert manifest.name == "höflich/polite-🙂.v1"
    assert manifest.labels == ("no", "yes", "vielleicht später")
    assert len({tensor.dtype for tensor in tensors.values()}) == 10
    assert torch.equal(tensors["encoder.1.attn.v.lora.A"], torch.arange(8.0).reshape(2, 4) / 7)
    assert torch.signbit(tensors["encoder.scale"])
    card = (GOLDEN / "README.md").read_text("utf-8")
    assert write_adapter(tmp_path / "again", manifest, tensors, card=card) == manifest
    assert digests(tmp_path / "again") == GOLDEN_SHA256


def test_another_process_writes_the_golden_bytes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(MAKE_GOLDEN), str(tmp_path / "made")]
    subprocess.run(command, check=True, env=environment, timeout=120)
    assert digests(tmp_path / "made") == GOLDEN_SHA256


@pytest.mark.parametrize("name", READ)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected(scratch: Path, name: str, place: float, bit: int) -> None:
    data = bytearray((GOLDEN / name).read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    _refuse_bytes(scratch, name, bytes(data))


@pytest.mark.parametrize("name", READ)
@given(kept=st.floats(0, 1, exclude_max=True), junk=st.binary(max_size=3))
def test_a_truncated_file_is_detected(scratch: Path, name: str, kept: float, junk: bytes) -> None:
    whole = (GOLDEN / name).read_bytes()
    changed = whole[: int(kept * len(whole))] + junk
    if changed != whole:
        _refuse_bytes(scratch, name, changed)
    _refuse_bytes(scratch, name, whole + b"\0" + junk)


def _refuse_bytes(folder: Path, name: str, data: bytes) -> None:
    try:
        (folder / name).write_bytes(data)
        assert name in reading(folder)
    finally:
        shutil.copyfile(GOLDEN / name, folder / name)


@pytest.mark.parametrize("name", READ)
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert f"{name}: missing" in reading(saved)


def test_an_edited_or_missing_card_is_accepted(saved: Path) -> None:
    (saved / "README.md").write_text("edited on a page of the Hub")
    assert Saved.at(saved).read()[1].keys() == TENSORS.keys()
    (saved / "README.md").unlink()
    assert Saved.at(saved).read()[1].keys() == TENSORS.keys()


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in reading(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in reading(tmp_path / "file")


def test_a_peft_folder_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "a peft checkpoint" in reading(tmp_path)


def test_other_files_are_ignored(saved: Path) -> None:
    (saved / ".gitattributes").write_text("x")
    (saved / "more").mkdir()
    manifest, tensors = Saved.at(saved).read()
    assert Saved.at(saved).manifest == manifest
    assert tensors.keys() == TENSORS.keys()


def test_the_manifest_alone_is_enough_to_list_an_adapter(saved: Path) -> None:
    (saved / "adapter.safetensors").unlink()
    assert Saved.at(saved).manifest.name == "polite"


@pytest.mark.parametrize("name", [*FILES, "unknown"])
def test_a_symbolic_link_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    (saved / name).rename(secret) if name in FILES else secret.write_text("x")
    (saved / name).symlink_to(secret)
    assert "symbolic links" in reading(saved)
    assert name in reading(saved)


@pytest.mark.parametrize("name", READ)
def test_a_pipe_or_a_folder_is_refused_at_once(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert "not a regular file" in reading(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    assert name in reading(saved)


def test_the_tensors_must_match_the_manifest(tmp_path: Path) -> None:
    held = {"more": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(2)}
    f32 = TensorInfo("F32", (3, 2))
    forge(tmp_path / "a", held, less=f32, shape=f32, dtype=TensorInfo("F16", (2,)))
    message = reading(tmp_path / "a")
    for part in ("less: missing", "'more': unexpected", "shape: F32 [2, 3]", "dtype: F32 [2]"):
        assert part in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(tmp_path: Path, value: float) -> None:
    forge(tmp_path / "a", {"x": torch.tensor([1.0, value])}, x=TensorInfo("F32", (2,)))
    assert "x: 1 of 2 values" in reading(tmp_path / "a")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    forge(tmp_path / "a", {"x": torch.ones(2).to(torch.complex64)}, x=TensorInfo("F32", (4,)))
    assert "C64" in reading(tmp_path / "a")


def test_a_huge_shape_allocates_no_memory(tmp_path: Path) -> None:
    small = {"x": torch.ones(2)}
    forge(tmp_path / "a", small, x=TensorInfo("F32", (2**33,)))
    assert "truncated" in reading(tmp_path / "a")
    forge(tmp_path / "a", small, x=TensorInfo("F32", (2**40,) * 8))
    assert "bytes of tensors, more than" in reading(tmp_path / "a")


def test_a_huge_file_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(saved / "adapter.safetensors", "ab") as handle:
        handle.truncate(1 << 32)
    assert "more than" in reading(saved)


def _raw(header: bytes, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


X = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "data",
    [
        _raw(X + b"}", length=2**63),
        _raw(X + b"}", length=99_999_999),
        _raw(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}'),
        _raw(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}'),
        _raw(X + b',"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        _raw(b'{"x":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}'),
        _raw(b'{"x":{"dtype":"PICKLE","shape":[2],"data_offsets":[0,8]}}'),
        _raw(b"[" * 5000),
        _raw(b"\xff" * 100),
    ],
)
def test_a_forged_header_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "a"
    forge(folder, {"x": torch.ones(2)}, x=TensorInfo("F32", (2,)))
    tree = json.loads((folder / "adapter.json").read_bytes())
    manifest = replace(
        MANIFEST,
        tensors={"x": TensorInfo("F32", (2,))},
        files={**tree["files"], "adapter.safetensors": hashlib.sha256(data).hexdigest()},
    )
    (folder / "adapter.json").write_bytes(to_json(manifest))
    (folder / "adapter.safetensors").write_bytes(data)
    assert "adapter.safetensors" in reading(folder)


@pytest.mark.parametrize("change", [{"tensors": {}}, {"files": {}}])
def test_an_incomplete_manifest_is_refused(saved: Path, change: dict[str, Any]) -> None:
    (saved / "adapter.json").write_bytes(to_json(replace(Saved.at(saved).manifest, **change)))
    assert "not complete" in reading(saved)


def test_written_tensors_are_read_back_equal(tmp_path: Path) -> None:
    live = {
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "tied": (shared := torch.nn.Parameter(torch.arange(4.0))),
        "tied.too": shared,
        "slice": shared[1:3],
    }
    written = write_adapter(tmp_path / "new" / "a", MANIFEST, live)
    manifest, tensors = Saved.at(tmp_path / "new" / "a").read()
    assert manifest == written
    assert list(tensors) == sorted(live)
    assert all(torch.equal(tensors[name], live[name]) for name in live)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert "of acme/bert-tiny" in (tmp_path / "new" / "a" / "README.md").read_text()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a"]


def test_a_card_has_unix_line_ends(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", MANIFEST, TENSORS, card="# höflich\r\nmore")
    assert (tmp_path / "a" / "README.md").read_bytes() == "# höflich\nmore\n".encode()
    assert "card" in writing(tmp_path / "b", card="x" * (MAX_CARD_BYTES + 1))


def test_one_error_lists_everything_that_cannot_be_saved(tmp_path: Path) -> None:
    message = writing(
        tmp_path / "a",
        {
            "a..b": torch.ones(1),
            "../evil": torch.ones(1),
            "spa ce": torch.ones(1),
            "empty": torch.ones(0, 3),
            "nan": torch.tensor([1.0, float("nan")]),
            "half": torch.tensor([float("inf")], dtype=torch.bfloat16),
            "complex": torch.ones(1).to(torch.complex64),
            "sparse": torch.ones(2).to_sparse(),
            "meta": torch.ones(2, device="meta"),
        },
        manifest=replace(MANIFEST, head=TaskHead()),
    )
    for part in ("'a..b'", "'../evil'", "'spa ce'", "empty: ", "nan: 1 of 2", "half: 1 of 1"):
        assert part in message
    for part in ("complex: ", "sparse: ", "meta: ", "head.*"):
        assert part in message


def test_an_empty_adapter_is_refused(tmp_path: Path) -> None:
    assert "the adapter is empty" in writing(tmp_path / "a", {})


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapterhub.files.manifest.MAX_TENSOR_BYTES", 27)
    assert "28 bytes of tensors, more than 27" in writing(tmp_path / "a")


def test_an_existing_folder_is_not_replaced(saved: Path) -> None:
    before = digests(saved)
    assert "already exists" in writing(saved, OTHER)
    assert digests(saved) == before


def test_overwrite_replaces_the_whole_adapter(saved: Path) -> None:
    (saved / "adapter_config.json").write_text("{}")
    write_adapter(saved, MANIFEST, OTHER, overwrite=True)
    assert Saved.at(saved).read()[1] == OTHER
    assert sorted(digests(saved)) == sorted(FILES)
    assert list(saved.parent.iterdir()) == [saved]


def test_overwrite_without_an_exchange(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_exchange", lambda first, second: False)
    write_adapter(saved, MANIFEST, OTHER, overwrite=True)
    assert Saved.at(saved).read()[1] == OTHER
    assert list(saved.parent.iterdir()) == [saved]


def test_a_failed_rename_restores_the_old_adapter(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if target == saved and not str(source).endswith("-old"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target)

    monkeypatch.setattr(folder_module, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", fail)
    assert "writable" in writing(saved, OTHER, overwrite=True)
    assert Saved.at(saved).read()[1].keys() == TENSORS.keys()


def test_overwrite_deletes_no_other_files(saved: Path, tmp_path: Path) -> None:
    (saved / "thesis.tex").write_text("x")
    assert "thesis.tex" in writing(saved, overwrite=True)
    (tmp_path / "link").symlink_to(saved)
    assert "not a folder" in writing(tmp_path / "link", overwrite=True)
    (tmp_path / "file").write_text("x")
    assert "not a folder" in writing(tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "empty", MANIFEST, TENSORS, overwrite=True)
    assert Saved.at(tmp_path / "empty").manifest.name == "polite"


@pytest.mark.parametrize("place", ["", ".", "/", "a/.."])
def test_a_path_without_a_folder_name_is_refused(place: str) -> None:
    with pytest.raises(OutputError, match="does not name a new folder"):
        write_adapter(Path(place), MANIFEST, TENSORS)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "writable"),
        (errno.EACCES, "writable"),
        (errno.EIO, "another folder"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "mkdir"])
def test_a_full_or_read_only_disk(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str, call: str
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    before = digests(saved)
    monkeypatch.setattr(os, call, fail)
    for place in (saved, saved.with_name("new")):
        message = writing(place, OTHER, overwrite=True)
        assert remedy in message
        assert os.strerror(code) in message
    assert digests(saved) == before


def test_a_disk_that_fills_up_at_any_moment(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, failures = os.fsync, 0
    for moment in range(4):
        calls: list[int] = []

        def fail(descriptor: int, moment: int = moment, calls: list[int] = calls) -> None:
            calls.append(descriptor)
            if len(calls) > moment:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        failures += "No space left" in writing(saved, OTHER, overwrite=True)
        assert Saved.at(saved).read()[1].keys() == TENSORS.keys()
    assert failures == 4


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "writable" in writing(tmp_path / "a")
    finally:
        tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"):
        write_adapter(tmp_path / "file" / "a", MANIFEST, TENSORS)


def test_a_truncated_write_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files = folder_module.write_files

    def lose_the_end(staged: Path, payload: dict[str, bytes]) -> None:
        write_files(staged, payload)
        os.truncate(staged / "adapter.safetensors", 40)

    monkeypatch.setattr("adapterhub.files.native.write_files", lose_the_end)
    assert "differ from the adapter in memory" in writing(tmp_path / "a")


def test_wrong_values_on_the_disk_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = safetensors.torch.save

    def save_zeros(tensors: dict[str, torch.Tensor]) -> bytes:
        return save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})

    monkeypatch.setattr(safetensors.torch, "save", save_zeros)
    message = writing(tmp_path / "a")
    assert "- encoder.0.attn.q.lora.A" in message
    assert "- scale" in message


def crash(moment: str, place: Path) -> None:
    """Overwrite an adapter and end, without any cleaning up, before or after the exchange."""
    exchange = folder_module._exchange

    def die(*arguments: Any) -> None:
        if moment == "after the exchange":
            exchange(*arguments)
        os._exit(9)

    folder_module._exchange = die
    write_adapter(place, Saved.at(place).manifest, OTHER, overwrite=True)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize(
    ("moment", "value"),
    [("before the exchange", 2.0), ("after the exchange", 3.0)],
)
def test_a_crash_leaves_the_old_adapter_or_the_new_one(
    saved: Path, moment: str, value: float
) -> None:
    process = get_context("fork").Process(target=crash, args=(moment, saved))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads at a fork
        process.start()
    process.join(60)
    assert process.exitcode == 9
    tensors = Saved.at(saved).read()[1]
    assert tensors["scale"] == value
    assert len(tensors) == (2 if value == 2.0 else 1)


@given(st.text(min_size=1, max_size=20))
def test_any_name_round_trips_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.mktemp("names") / "a"
    try:
        write_adapter(folder, replace(MANIFEST, name=name), TENSORS)
    except OutputError:
        assert not folder.exists()
        assert not name.isalnum()
    else:
        assert Saved.at(folder).manifest.name == name


def test_a_card_is_read_if_it_is_a_regular_file(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_adapter(folder, MANIFEST, TENSORS, card="# Größe\n")
    assert read_card(folder) == "# Größe\n"
    card = folder / CARD_FILE
    card.rename(tmp_path / "card")
    assert read_card(folder) == ""
    card.symlink_to(tmp_path / "card")
    assert read_card(folder) == ""
