"""Language models in GGUF files, as llama.cpp has them, made into ordinary folders once.

The weights are decoded: a model that transformers reads from GGUF consists of plain layers and yet
says that it is quantized, and cannot be saved. Its folder, in the user's cache, is a backbone as
any other: trained, merged, quantized and identified by its own weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
from pathlib import Path

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import BackboneError
from adapterhub.status import doing

SUFFIX = ".gguf"


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
        with doing(f"decoding {file.name}"):
            _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write the folder of a GGUF file; it appears when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draft = folder.with_name(f"{secrets.token_hex(8)}.new")
    try:
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16
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
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        os.replace(draft, folder)
    except Exception as error:  # the library raises what its parsers raise
        if (folder / "config.json").is_file():  # another process was first
            return
        raise BackboneError(
            f"{file} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}",
            expected="a GGUF file of an architecture that transformers reads",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
