"""Adapters are written canonically and read back exactly, or refused."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import FileError, OutputError
from adapterhub.files import atomic as folder_module
from adapterhub.files import manifest as manifests
from adapterhub.files import native
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES, read_card
from adapterhub.files.manifest import BackboneRef, FoundationRef, Manifest, TensorInfo, to_json
from adapterhub.files.native import TENSORS_FILE, Foundation, Saved, write_adapter
from adapterhub.files.run_folder import backbone_of_adapter, no_adapter
from tests.kit import registries
from tests.kit.registries import IDENTITY

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
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


def test_the_golden_adapter_round_trips(tmp_path: Path) -> None:
    assert digests(GOLDEN) == GOLDEN_SHA256
    manifest, tensors = Saved.at(GOLDEN).read()
    assert manifest.name == "höflich/polite-🙂.v1"
    assert manifest.labels == ("no", "yes", "vielleicht später")
    assert len({tensor.dtype for tensor in tensors.values()}) == 10
    assert torch.equal(tensors["encoder.1.attn.v.lora.A"], torch.arange(8.0).reshape(2, 4) / 7)
    assert torch.signbit(tensors["encoder.scale"])
    card = (GOLDEN / "README.md").read_text("utf-8")
    assert write_adapter(tmp_path / "again", manifest, tensors, card=card) == manifest
    assert digests(tmp_path / "again") == GOLDEN_SHA256


@pytest.mark.parametrize("name", READ)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), junk=st.binary(max_size=3))
def test_a_changed_file_is_detected(scratch, name, place, bit, junk):
    whole = (GOLDEN / name).read_bytes()
    flipped, at = bytearray(whole), int(place * len(whole))
    flipped[at] ^= 1 << bit
    for changed in (bytes(flipped), whole[:at] + junk, whole + b"\0" + junk):
        try:
            (scratch / name).write_bytes(changed)
            assert changed == whole or name in reading(scratch)
        finally:
            shutil.copyfile(GOLDEN / name, scratch / name)


def test_what_is_no_adapter_is_named(saved: Path, tmp_path: Path) -> None:
    for name in reversed(READ):
        (saved / name).unlink()
        assert f"{name}: missing" in reading(saved)
    (tmp_path / "file").write_text("x")
    for said in (reading, no_adapter):
        assert "no such folder" in str(said(tmp_path / "nothing"))
        assert "not a folder" in str(said(tmp_path / "file"))
    for number in range(9):
        (tmp_path / f"d{number}").mkdir()
    assert "in it: d0/, d1/, d2/, d3/, d4/, d5/, d6/, d7/ and 3 more" in str(no_adapter(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "a peft checkpoint" in reading(tmp_path)


def test_other_files_are_ignored_and_the_manifest_is_enough_to_list(saved: Path) -> None:
    (saved / ".gitattributes").write_text("x")
    (saved / "more").mkdir()
    manifest, tensors = Saved.at(saved).read()
    assert tensors.keys() == TENSORS.keys()
    (saved / "adapter.safetensors").unlink()
    assert Saved.at(saved).manifest == manifest


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
        manifest=replace(MANIFEST, head=manifests.TaskHead()),
    )
    for part in ("'a..b'", "'../evil'", "'spa ce'", "empty: ", "nan: 1 of 2", "half: 1 of 1"):
        assert part in message
    for part in ("complex: ", "sparse: ", "meta: ", "head.*"):
        assert part in message


def test_overwrite_replaces_the_whole_adapter(saved: Path) -> None:
    before = digests(saved)
    assert "already exists" in writing(saved, OTHER)
    assert digests(saved) == before
    (saved / "adapter_config.json").write_text("{}")
    (saved / ".README.md.0123abcd.new").write_text("x")  # of a killed process
    write_adapter(saved, MANIFEST, OTHER, overwrite=True)
    assert Saved.at(saved).read()[1] == OTHER
    assert sorted(digests(saved)) == sorted(FILES)
    assert list(saved.parent.iterdir()) == [saved]


def test_a_failed_rename_restores_the_old_adapter(saved, monkeypatch):
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


def test_an_empty_or_too_large_adapter_is_refused(tmp_path: Path, monkeypatch) -> None:
    assert "the adapter is empty" in writing(tmp_path / "a", {})
    monkeypatch.setattr("adapterhub.files.manifest.MAX_TENSOR_BYTES", 27)
    assert "28 bytes of tensors, more than 27" in writing(tmp_path / "a")


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    for place in ("", ".", "/", "a/.."):
        with pytest.raises(OutputError, match="does not name a new folder"):
            write_adapter(Path(place), MANIFEST, TENSORS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"):
        write_adapter(tmp_path / "file" / "a", MANIFEST, TENSORS)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"),
     (errno.EROFS, "writable"), (errno.EACCES, "writable"), (errno.EIO, "another folder")],
)  # fmt: skip
@pytest.mark.parametrize("call", ["fsync", "mkdir"])
def test_a_full_or_read_only_disk(saved, monkeypatch, code, remedy, call):
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    before = digests(saved)
    monkeypatch.setattr(os, call, fail)
    for place in (saved, saved.with_name("new")):
        message = writing(place, OTHER, overwrite=True)
        assert remedy in message
        assert os.strerror(code) in message
    assert digests(saved) == before


def test_wrong_values_on_the_disk_are_detected(tmp_path, monkeypatch):
    save = safetensors.torch.save

    def save_zeros(tensors: dict[str, torch.Tensor]) -> bytes:
        return save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})

    monkeypatch.setattr(safetensors.torch, "save", save_zeros)
    message = writing(tmp_path / "a")
    assert "- encoder.0.attn.q.lora.A" in message
    assert "- scale" in message


def test_a_card_has_unix_line_ends_and_is_read_if_it_is_a_regular_file(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_adapter(folder, MANIFEST, TENSORS, card="# höflich\r\nmore")
    assert (folder / CARD_FILE).read_bytes() == "# höflich\nmore\n".encode()
    assert read_card(folder) == "# höflich\nmore\n"
    (folder / CARD_FILE).rename(tmp_path / "card")
    assert read_card(folder) == ""
    (folder / CARD_FILE).symlink_to(tmp_path / "card")
    assert read_card(folder) == ""
    assert "card" in writing(tmp_path / "b", card="x" * (MAX_CARD_BYTES + 1))


def test_equal_values_of_another_dtype_or_sign_of_zero_are_not_the_same():
    zero = torch.zeros(2)
    assert native.is_same_tensor(zero, zero.clone())
    assert not native.is_same_tensor(zero, -zero)
    assert not native.is_same_tensor(zero, zero.double())


def test_the_backbone_is_the_choice_then_that_of_the_run_then_that_of_the_manifest(tmp_path):
    backbone = replace(MANIFEST.backbone, revision="a" * 40)
    adapter = tmp_path / "run" / "adapter", replace(MANIFEST, backbone=backbone)
    adapter[0].mkdir(parents=True)
    recorded = ("acme/bert-tiny", "a" * 40)
    assert backbone_of_adapter(*adapter) == recorded
    recipe = tmp_path / "run" / "recipe.yaml"
    for place, found in ((tmp_path, (str(tmp_path), None)), ("not/here", recorded)):
        recipe.write_text(f"backbone: {place}\n", encoding="utf-8")
        assert backbone_of_adapter(*adapter) == found
    assert backbone_of_adapter(*adapter, "acme/bert") == ("acme/bert", None)


# A file of tensors: the checks without torch are those that torch makes of the same bytes.

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def problems_of(folder, dtype, count, data):
    """Return the problems of a file for a manifest with one tensor, and the digest of the file."""
    digest = hashlib.sha256(data).hexdigest()
    manifest = replace(
        MANIFEST, tensors={"a": TensorInfo(dtype, (count,))}, files={TENSORS_FILE: digest}
    )
    (folder / TENSORS_FILE).write_bytes(data)
    try:
        with native.open_tensors(folder, manifest) as file:
            file.check()
            assert b"".join(file.pieces()) == data
            assert len(b"".join(file.values("a", 8))) == manifest.nbytes
    except FileError as error:
        return list(error.offenders)
    return []


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_are_finite_as_torch_says(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.pieces_of, "__defaults__", (16,))  # several pieces
    info = torch.finfo(FLOATS[dtype])
    values = [0.0, -0.0, info.max, info.min, info.tiny, info.tiny / 4]
    for bad in ([], [float("inf")], [float("nan"), float("-inf")]):
        tensor = torch.tensor([*values, *bad], dtype=FLOATS[dtype])
        assert int((~tensor.isfinite()).sum()) == len(bad)
        data = safetensors.torch.save({"a": tensor})
        said = [f"a: {len(bad)} of {len(tensor)} values are NaN or infinite"] if bad else []
        assert problems_of(tmp_path, dtype, len(tensor), data) == said


def file_of(header, numbers=bytes(8)):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
OTHER_SIZES = {
    "another shape": ({"a": {**ENTRY, "shape": [3]}}, 8, "a: F32 [3], the manifest has F32 [2]"),
    "a shape of no numbers": ({"a": {**ENTRY, "shape": [2.0]}}, 8, "a: F32 [2.0], the manifest"),
    "no shape": ({"a": {**ENTRY, "shape": "x" * 999}}, 8, "a: F32 xxx"),
    "another dtype": ({"a": {**ENTRY, "dtype": ["F32"]}}, 8, "a: ['F32'] [2], the manifest"),
    "other bytes": ({"a": {**ENTRY, "data_offsets": [8, 16]}}, 16, "a: its bytes are not those"),
    "fractions": ({"a": {**ENTRY, "data_offsets": [0.0, 8.0]}}, 8, "a: its bytes are not those"),
    "no offsets": ({"a": {**ENTRY, "data_offsets": {"0": 8}}}, 8, "a: its bytes are not those"),
    "more bytes": ({"a": ENTRY}, 12, "bytes, its header and manifest declare"),
    "another tensor": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}}, 16, "'b': unexpect"),
    "no text": ({"a": ENTRY, "__metadata__": {"x": 1}}, 8, "__metadata__ is not an object"),
    "another field": ({"a": {**ENTRY, "x": 1}}, 8, "header: 'a': its fields must be exactly"),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_sizes_are_compared_before_a_value_is_read(name, tmp_path):
    header, size, said = OTHER_SIZES[name]
    (problem,) = problems_of(tmp_path, "F32", 2, file_of(header, bytes(size)))
    assert said in problem
    assert len(problem) < 300


def test_all_differences_are_listed(tmp_path):
    problems = problems_of(tmp_path, "F32", 2, file_of({"b": ENTRY}))
    assert problems == ["a: missing", "'b': unexpected"]


# The copies of the adapters that a saved one was trained on.


@pytest.fixture
def foundation(tmp_path: Path) -> Foundation:
    folder = registries.write_sample(tmp_path / "lang", 1, card="the card")
    saved = Saved.at(folder)
    return Foundation(FoundationRef("lang", saved.digest, "v1", "lang@v1"), saved)


def test_copies_are_adapters_with_copies(foundation: Foundation, tmp_path: Path) -> None:
    top = registries.write_sample(tmp_path / "top", 2)
    saved = replace(Saved.at(top), on=(foundation,))
    upper = Foundation(FoundationRef("upper", saved.digest), saved)
    (tmp_path / "target").mkdir()
    native.write_copies(tmp_path / "target", [upper, upper])
    copy = native.copy_of(tmp_path / "target", upper.ref)
    assert Saved.at(copy).read()[0] == Saved.at(top).manifest
    below = native.copy_of(copy, foundation.ref)
    assert Saved.at(below).digest == foundation.ref.digest
    assert (below / "README.md").read_text() == "the card\n"
    file = foundation.saved.folder / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"x\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(FileError, match="is not what 'lang' was"):
        native.write_copies(tmp_path / "other", [foundation])


def test_the_manifest_names_them_and_older_files_keep_their_bytes(foundation: Foundation) -> None:
    manifest = foundation.saved.manifest
    assert b'"on"' not in to_json(manifest)
    stacked = replace(manifest, on=(foundation.ref,))
    assert manifests.from_json(to_json(stacked)).on == (foundation.ref,)
    saved = replace(foundation.saved, manifest=stacked, on=(foundation,))
    native.check_foundations(saved)
    for on in ((), (foundation, foundation)):
        with pytest.raises(FileError, match="which are not here"):
            native.check_foundations(replace(saved, on=on))
    for wrong in ({"digest": "ab"}, {"reference": "/home/me/lang"}, {"reference": "../x"},
                  {"name": "a/../b"}):  # fmt: skip
        with pytest.raises(OutputError, match="cannot be written"):
            to_json(replace(manifest, on=(replace(foundation.ref, **wrong),)))


def test_a_chain_is_named_from_above_and_listed_from_below(foundation: Foundation) -> None:
    saved = replace(foundation.saved, on=(foundation,))
    upper = Foundation(FoundationRef("upper", "b" * 64), saved)
    assert list(native.all_below([upper])) == [foundation, upper]
    digest = foundation.ref.digest[:12]
    assert native.chain_text([upper]) == (
        f"upper (sha256 {'b' * 12}), which is on lang@v1 (sha256 {digest})"
    )


def test_missing_and_altered_copies_are_listed(foundation: Foundation, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    manifest = replace(foundation.saved.manifest, on=(foundation.ref,))
    saved = replace(foundation.saved, folder=folder, manifest=manifest)
    (problem,) = native.copy_problems(saved)
    assert problem.startswith("lang@v1: ")
    folder.mkdir()
    native.write_copies(folder, [foundation])
    assert native.copy_problems(saved) == []
    file = native.copy_of(folder, foundation.ref) / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (problem,) = native.copy_problems(saved)
    assert "damaged" in problem


def test_only_a_folder_of_copies_is_replaced(foundation: Foundation, tmp_path: Path) -> None:
    folder = registries.write_sample(tmp_path / "task", 3)
    assert "on" not in native.replaceable(folder)
    native.write_copies(folder, [foundation])
    assert "on" in native.replaceable(folder)
    (folder / "on" / "thesis.txt").write_text("the only copy")
    assert "on" not in native.replaceable(folder)
