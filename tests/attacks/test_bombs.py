"""Small files that expand: Parquet, pickles, gzip, sparse files.

A process of limited memory reads them.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from forge import join_header, limited, new_model, refused

import adapterhub as ah
from adapterhub.backbones.checkpoint import opened_tensors
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, BackboneError
from adapterhub.interchange.checkpoint_files import read_tensor_file
from tests.kit.selection import long_table

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


def overlapping(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Let many names share one storage, each a copy when it is read."""
    path.write_bytes(saved(tensors))


def doubled(path: Path) -> None:
    """Write a pickle of nested lists that double: 2^40 items when compared or copied."""
    tree: Any = {"w": torch.zeros(2)}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    path.write_bytes(saved(tree))


def legacy(path: Path) -> None:
    torch.save(
        {"w": torch.zeros(1).expand(10**12)}, path, _use_new_zipfile_serialization=False
    )  # fmt: skip


STORAGE = torch.zeros(1 << 20)
PICKLES: dict[str, Callable[[Path], None]] = {
    "stride 0": lambda path: path.write_bytes(saved({"w": torch.zeros(1).expand(10**12)})),
    "stride 0, a gigabyte": lambda path: path.write_bytes(
        saved({"w": torch.zeros(1).expand(1 << 14, 1 << 14)})
    ),
    "stride 0, old format": legacy,
    "strides that overlap": lambda path: path.write_bytes(
        saved({"w": torch.zeros(40_000).as_strided((20_000, 20_000), (1, 1))})
    ),
    "many views of one storage": lambda path: overlapping(
        path, {f"w{i}": STORAGE[i:] for i in range(300)}
    ),
    "a compressed record": lambda path: with_pickle(
        path, {"w": torch.zeros(100 << 18)}, r0=200 << 20
    ),
    "a compressed record of nothing": lambda path: with_pickle(
        path, {"w": torch.zeros(1)}, r0=200 << 20
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
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
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
    with open(tmp_path / "adapter_model.safetensors", "wb") as file:
        file.write(data)
        file.truncate(len(data) + 4 * count)
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


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
