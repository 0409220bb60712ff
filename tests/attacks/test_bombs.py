"""Small files that expand: Parquet, pickles, sparse files.

test_memory.py reads them in a process of limited memory.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from forge import join_header, new_model, refused

import adapterhub as ah
from adapterhub.backbones.checkpoint import opened_tensors
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import BackboneError
from adapterhub.interchange.checkpoint_files import read_tensor_file

MOST = 200 << 20  # bytes above the memory of a small read
GROWN = 120 << 10  # kB of resident memory: a tenth of what the smallest bomb expands to


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


def read_all(place: Path, note: Callable[[str, Callable[[], object]], None]) -> None:
    """Read every bomb; `note` calls the reader and notes how it ended."""
    for path in sorted(place.iterdir()):
        read = read_rows if path.suffix == ".parquet" else read_pickle
        note(path.name, functools.partial(read, path))


def read_rows(path: Path) -> object:
    return read_examples(str(path), DataOptions(), labelled=True)


def read_pickle(path: Path) -> object:
    return read_tensor_file(path, "none", "adapter_model.bin", allow_pickle=True)


def make_all(place: Path) -> None:
    """Write every bomb, and a small file of each kind."""
    for name, make in DATA.items():
        make(place / f"{name}.parquet")
    small = {"small": lambda path: path.write_bytes(saved({"w": torch.ones(9)}))}
    for name, make in {**PICKLES, **small}.items():
        (place / name).mkdir()
        make(place / name / "adapter_model.bin")
        assert (place / name / "adapter_model.bin").stat().st_size < 6 << 20
    parquet(place / "small.parquet", pyarrow.array(["a good movie"] * 1000))


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


@pytest.mark.parametrize("name", PICKLES)
def test_no_bomb_is_a_backbone(name: str, tmp_path: Path) -> None:
    PICKLES[name](tmp_path / "pytorch_model.bin")
    with (
        pytest.raises(BackboneError, match="cannot be read"),
        opened_tensors(tmp_path / "pytorch_model.bin"),
    ):
        pass
