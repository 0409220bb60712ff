"""Small files that expand, and large ones: Parquet, pickles, gzip, holes.

A process of limited memory reads what expands. Of large files none is in memory as a whole before
it is known to be right. Holes take no space on a disk, so that a folder of some kB can hold files
of any size.
"""

import gzip
import io
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from forge import CARD, MANIFEST, TENSORS, forge, join_header, limited, new_model, refused
from test_hostile_registry import sparse

import adapterhub as ah
from adapterhub.backbones.checkpoint import opened_tensors
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, BackboneError, FileError
from adapterhub.files.native import Saved, published_texts, write_adapter
from adapterhub.interchange.checkpoint_files import read_tensor_file
from adapterhub.pages.page import read_run
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Publication
from tests.kit import registries
from tests.kit.selection import long_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits and holes")

MOST = 200 << 20  # bytes above the memory of a small read
GROWN = 120  # MB of resident memory: a tenth of what the smallest bomb expands to


def parquet(path: Path, text: Any, **options: Any) -> None:
    """Write a Parquet file with the columns text and label."""
    rows = len(text)
    label = pyarrow.array(["x"]).take(pyarrow.nulls(rows, pyarrow.int32()).fill_null(0))
    table = pyarrow.table({"text": text, "label": label})
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)


def repeated(size: int, rows: int) -> Any:
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.nulls(rows, pyarrow.int32()).fill_null(0), ["a" * size]
    )


def plain(path: Path, count: int, size: int, **options: Any) -> None:
    parquet(path, pyarrow.array(["a" * size] * count), use_dictionary=False, **options)


DATA: dict[str, Callable[[Path], None]] = {
    "a dictionary": lambda path: parquet(path, repeated(20_000, 70_000)),
    "one page": lambda path: plain(path, 1, 300 << 20, write_statistics=False),
    "many pages": lambda path: plain(path, 300, 1 << 20, data_page_size=1000),
    "rows of nothing": lambda path: parquet(path, pyarrow.nulls(20_000_000, pyarrow.string())),
}


def zipped(path: Path, sizes: dict[str, int], data: bytes) -> None:
    """Write torch's zip format with records of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("a/data.pkl", data)
        file.writestr("a/version", "3\n")
        for name, size in sizes.items():
            with file.open(f"a/{name}", "w", force_zip64=True) as record:
                for _ in range(size >> 20):
                    record.write(bytes(1 << 20))


def saved(tensors: dict[str, torch.Tensor]) -> bytes:
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


def with_pickle(path: Path, tensors: dict[str, torch.Tensor], **sizes: int) -> None:
    data = zipfile.ZipFile(io.BytesIO(saved(tensors))).read("archive/data.pkl")
    zipped(path, {f"data/{name[1:]}": size for name, size in sizes.items()}, data)


def doubled(path: Path) -> None:
    """Write a pickle of nested lists that double: 2^40 items when compared or copied."""
    tree: Any = {"w": torch.zeros(2)}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    path.write_bytes(saved(tree))


def legacy(path: Path) -> None:
    many = torch.zeros(1).expand(10**12)
    torch.save({"w": many}, path, _use_new_zipfile_serialization=False)


STORAGE = torch.zeros(1 << 20)
PICKLES: dict[str, Callable[[Path], None]] = {
    "stride 0": lambda path: path.write_bytes(saved({"w": torch.zeros(1).expand(10**12)})),
    "stride 0, old format": legacy,
    "strides that overlap": lambda path: path.write_bytes(
        saved({"w": torch.zeros(40_000).as_strided((20_000, 20_000), (1, 1))})
    ),
    "many views of one storage": lambda path: path.write_bytes(
        saved({f"w{i}": STORAGE[i:] for i in range(300)})
    ),
    "a compressed record": lambda path: with_pickle(
        path, {"w": torch.zeros(100 << 18)}, r0=200 << 20
    ),
    "a large pickle": lambda path: zipped(path, {}, pickle.dumps("a" * (200 << 20))),
    "doubling": doubled,
}
CONFIG = {"peft_type": "LORA", "target_modules": ["query"], "r": 1, "base_model_name_or_path": "x"}


def gzipped(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(b"text\tlabel\n" * 100_000)


# By file: whether it is refused. Equal texts of a dictionary are one object.
BOMBS = {
    **{f"{name}.parquet": (make, name != "a dictionary") for name, make in DATA.items()},
    **{f"{name}.bin": (make, True) for name, make in PICKLES.items()},
    "lines.tsv.gz": (gzipped, True),
    "small.parquet": (lambda path: parquet(path, pyarrow.array(["good"] * 1000)), False),
    "small.bin": (lambda path: path.write_bytes(saved({"w": torch.ones(9)})), False),
    "small.tsv.gz": (
        lambda path: path.write_bytes(gzip.compress(b"text\tlabel\n" + b"a\tb\n" * 9)), False,
    ),
}  # fmt: skip


def read(path: Path) -> object:
    if path.suffix != ".bin":
        return read_examples(str(path), DataOptions(), labelled=True)
    return read_tensor_file(path.parent, "none", path.name, allow_pickle=True)


def read_all(place: Path) -> None:
    """Read each file, first the small ones, in little memory; print how it ended."""
    for path in sorted(place.iterdir(), key=lambda path: "small" not in path.name):
        try:
            with limited(GROWN, MOST):
                read(path)
            outcome = "accepted"
        except AdapterhubError as error:
            outcome = "refused" if error.problem else "refused without a word"
        except BaseException as error:
            outcome = repr(error)[:200]
        print(json.dumps([path.name, outcome]), flush=True)


@pytest.mark.apart
def test_no_bomb_expands(tmp_path: Path) -> None:
    for name, (make, _) in BOMBS.items():
        make(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 6 << 20
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = dict(map(json.loads, done.stdout.splitlines()))
    assert outcomes == {n: "refused" if bad else "accepted" for n, (_, bad) in BOMBS.items()}


def test_a_sparse_file_of_peft_is_not_read(tmp_path: Path) -> None:
    """60 GB that take no space on the disk, in a file whose header agrees with them."""
    model = new_model()
    count = 15 * 10**9
    info = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    data = join_header({"base_model.model.x": info}, b"")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    os.truncate(tmp_path / "adapter_model.safetensors", len(data) + 4 * count)
    with refused(model, "60000000"):
        ah.load(model, tmp_path)


@long_table("name", PICKLES, parts=4)
def test_no_bomb_is_a_backbone(name: str, tmp_path: Path) -> None:
    PICKLES[name](tmp_path / "pytorch_model.bin")
    with (
        pytest.raises(BackboneError, match="cannot be read"),
        opened_tensors(tmp_path / "pytorch_model.bin"),
    ):
        pass


# Large files


HUGE = 40 << 30
LARGE = 32 << 20
PIECES = 20 << 20  # bytes of Python objects at any time: some pieces of a file


def large(folder: Path) -> Path:
    """Write an adapter of LARGE bytes."""
    manifest = Saved.at(registries.write_sample(folder)).manifest
    manifest = replace(manifest, tensors={}, files={})
    numbers = {"encoder.0.attn.q.lora.a": torch.ones(LARGE // 4)}
    write_adapter(folder, manifest, numbers, overwrite=True)
    return folder


READERS: dict[str, tuple[str, ...]] = {
    "publish": ("publish", "made", "--registry", "registry"),
    "verify": ("verify", "made"),
    "verify a version": ("verify", "polite", "--registry", "registry"),
    "pull": ("pull", "polite", "--to", "out", "--registry", "registry"),
    "lock": ("lock", "polite", "--registry", "registry"),
    "registry verify": ("registry", "verify", "--registry", "registry"),
    "diff": ("diff", "made", "made"),
    "sign": ("sign", "made", "--key", "key"),
    "publish again": ("publish", "made", "--registry", "registry", "--description", "mine"),
}


@pytest.fixture
def place(tmp_path, monkeypatch, adapterhub):
    """Return a function that puts a folder where READERS have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert adapterhub("key", "new", "key")[0] == 0

    def put(make: Callable[[Path], Path]) -> list[Path]:
        LocalRegistry(Path("registry")).put(make(Path("made")), Publication("polite"))
        (version,) = Path("registry").glob("*/polite/v1")
        return [Path("made"), version]

    return put


def peak(act: Callable[[], object]) -> int:
    """Return the most bytes of Python objects that a call had at a time."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@long_table("reader", READERS, 3)
def test_no_file_of_tensors_is_in_memory_as_a_whole(reader, place, adapterhub):
    place(large)
    adapterhub(*READERS[reader], "--help")  # imports
    results = []
    assert peak(lambda: results.append(adapterhub(*READERS[reader]))) < PIECES, results
    assert results[0][0] == (1 if "verify" in reader.split()[:1] else 0), results  # 1: not signed


def holes(folder: Path) -> None:
    """Declare HUGE bytes in the manifest alone."""
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[HUGE // 4]))
    size = (folder / TENSORS).stat().st_size
    os.truncate(folder / TENSORS, size - 32 + HUGE)  # 32: the bytes of the sample


def agreeing_holes(folder: Path, size: int = LARGE) -> None:
    """Declare so many bytes in manifest and header, with the digest of something else."""
    count = size // 4
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[count]))
    (name,) = Saved.at(folder).manifest.tensors
    info = {"dtype": "F32", "shape": [count], "data_offsets": [0, size]}
    header = join_header({name: info}, b"")
    (folder / TENSORS).write_bytes(header)
    os.truncate(folder / TENSORS, len(header) + size)


ATTACKS = {
    "holes": holes,
    "agreeing holes": agreeing_holes,
    **{
        f"a huge {name}": lambda folder, name=name: sparse(folder / name, HUGE)
        for name in (MANIFEST, CARD, "adapter.sig")
    },
}
OPEN_NO_CARD = {"verify", "verify a version", "registry verify", "diff", "sign", "lock",
                "publish again"}  # fmt: skip
OPEN_NO_SIGNATURE = {"registry verify", "diff"}


@long_table(("attack", "reader"), itertools.product(ATTACKS, READERS))
def test_holes_are_refused_in_little_time_and_memory(attack, reader, place, adapterhub):
    for folder in place(registries.write_sample):
        ATTACKS[attack](folder)
    results = []
    with limited():
        assert peak(lambda: results.append(adapterhub(*READERS[reader]))) < PIECES
    (code, out, err) = results[0]
    unopened = (CARD in attack and reader in OPEN_NO_CARD) or (
        "sig" in attack and reader in OPEN_NO_SIGNATURE
    )
    assert "Traceback" not in err
    if not unopened:
        assert code != 0, out
        assert re.search(
            r"damaged|match its manifest|more than|too large|cannot be read|not what was published",
            out + err,
        )


@pytest.mark.parametrize("more", [(), ("--tag", "best")])
def test_what_does_not_fit_is_refused_before_it_is_read(place, adapterhub, monkeypatch, more):
    """The manifest and the header agree on HUGE bytes."""
    place(registries.write_sample)
    agreeing_holes(Path("made"), HUGE)
    usage = shutil.disk_usage(".")._replace(free=HUGE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with limited():
        code, _, err = adapterhub(*READERS["publish"], *more)
    assert code != 0
    assert re.search(r"an adapter of 42,949,672,960 bytes does not fit into registry", err)


def test_a_bucket_gets_and_gives_large_files_in_pieces(tmp_path, monkeypatch):
    objects = pytest.importorskip("obstore.store")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = Registry(Bucket("s3://b", objects.MemoryStore()))
    folder = large(tmp_path / "made")
    entries = []
    assert peak(lambda: entries.append(store.put(folder, Publication("polite")))) < PIECES
    assert store.verify() == []
    files = Bucket("s3://b", objects.LocalStore(str(folder)))
    assert peak(lambda: files.download(TENSORS, tmp_path / "got", HUGE)) < PIECES
    assert (tmp_path / "got").read_bytes() == (folder / TENSORS).read_bytes()


HUGE_FILES: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("metrics.jsonl", "timings.jsonl", "predictions.jsonl"), read_run),
    CARD: lambda folder: published_texts(folder, (CARD,)),
    MANIFEST: lambda folder: published_texts(folder, (MANIFEST,)),
}


@pytest.mark.parametrize("name", HUGE_FILES)
def test_a_huge_file_is_refused(name, tmp_path):
    registries.write_sample(tmp_path / "adapter")
    for size in (2 << 30, HUGE):
        sparse(tmp_path / name, size)
        with limited(), pytest.raises(FileError, match="bytes"):
            HUGE_FILES[name](tmp_path)


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
