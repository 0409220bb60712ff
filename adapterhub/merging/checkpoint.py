"""A merged model as a plain `transformers` checkpoint, that is loaded again and compared before it
is put in place."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.backbones.load import quiet_loading
from adapterhub.backbones.quantized_training import keep_4bit_layout
from adapterhub.backbones.task_models import TASK_MODELS, task_kind
from adapterhub.errors import MergeError, OutputError
from adapterhub.files.atomic import check_place, explained, put_in_place
from adapterhub.merging.merge import compare


def auto_class(model: PreTrainedModel) -> Any:
    """The auto class that loads a checkpoint of this model, or its own class if none does."""
    kind = task_kind(model)
    return getattr(transformers, TASK_MODELS[kind].auto) if kind else type(model)


def write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    expected: dict[str, Tensor],
    tolerance: float | None = None,
) -> dict[str, float]:
    """Write a model and its tokenizer as `transformers` does, load the checkpoint by its auto
    class, and compare. Returns the largest differences from the expected outputs on the probe
    batch, by output. The folder is there when all of that went well, and else not at all.

    Raises:
        OutputError: the folder exists, or cannot be written.
        MergeError: what was written computes something else.
    """
    folder = Path(folder)
    with explained(folder), quiet_loading():
        check_place(folder, overwrite=False, replaceable=())
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = folder.parent / f".adapterhub-{secrets.token_hex(8)}"
        try:
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            differences, _ = compare(expected, _reloaded(model, staged), tolerance)
            put_in_place(staged, folder, overwrite=False)
        except SafetensorError as error:
            raise OutputError(f"cannot write {folder}: {error}", hint="free some space") from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return differences


def _reloaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    loaded, info = auto_class(model).from_pretrained(
        folder, dtype=model.dtype, device_map={"": model.device}, output_loading_info=True
    )
    wrong = [f"{kind}: {key}" for kind, keys in info.items() for key in keys if keys]
    if type(loaded) is not type(model):
        wrong.append(f"it loads as {type(loaded).__name__}, not as {type(model).__name__}")
    if wrong:
        raise MergeError("the merged checkpoint does not load as it was written", offenders=wrong)
    keep_4bit_layout(loaded)
    return loaded.eval()  # type: ignore[no-any-return]
