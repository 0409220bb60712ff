"""Tensors in torch's own files, which are pickles: read without running code or expanding.

`weights_only` restricts what the pickle may call. Its tensors are views of storages, so a few bytes
can describe 10^12 values; and a zip file's records may be compressed, which torch never writes.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_MOST_SHARING = 4  # tensors of one storage: a tied weight under each of its names


def load_torch_file(source: Path | BinaryIO) -> dict[str, Tensor]:
    """Load the tensors of a file by name; a file on disk is mapped into memory where it can be.

    Raises:
        ValueError: it is damaged, contains other objects than named tensors, or would expand.
        OSError: it cannot be read.
    """
    size = _size(source)
    _check_records(source, size)
    try:
        loaded = _load(source)
    except OSError:
        raise
    except Exception as error:  # any type; its message would advise to load with code execution
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
    """Refuse tensors with more values than stored: views that repeat, sparse or meta tensors."""
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized:
            raise ValueError(f"{name!a} is no plain tensor")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name!a} has more values than are stored: {tensor.numel()}")
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total > _MOST_SHARING * size:
        raise ValueError(f"its tensors have {total} bytes, from a file of {size}")
