"""Write a merged model as a plain `transformers` checkpoint, verified by loading it again."""

from __future__ import annotations

import math
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.load import quiet_loading
from adapterhub.backbones.probe import probe
from adapterhub.backbones.processor import processor_of, remember_processor
from adapterhub.backbones.quantized import quantization_of
from adapterhub.backbones.quantized_layers import keep_4bit_layout
from adapterhub.backbones.same import coarsest_dtype
from adapterhub.backbones.task_models import TASK_MODELS, task_kind
from adapterhub.backbones.weights import DTYPES
from adapterhub.errors import MergeError, OutputError
from adapterhub.files.atomic import check_place, explained, put_in_place
from adapterhub.inference.sentence_encoder import SentenceEncoder, sentence_encoder
from adapterhub.merging.merge import (
    Merge,
    check_outputs,
    merge,
)
from adapterhub.patch import Patch
from adapterhub.tasks import Task


def auto_class(model: PreTrainedModel) -> Any:
    """Return the auto class that loads a checkpoint of this model, or the class of the model."""
    kind = task_kind(model)
    return (
        getattr(transformers, TASK_MODELS[kind].auto_name(type(model.config)))
        if kind
        else type(model)
    )


def merge_for_checkpoint(
    adapter: Adapter, tolerance: float | None, dtype: str | None, task: Task | None = None
) -> tuple[Merge, dict[str, Tensor], SentenceEncoder | None]:
    """Merge an adapter that is to be written as a checkpoint.

    Args:
        adapter: the adapter, active.
        tolerance: as for `merge`.
        dtype: the dtype of the checkpoint; None: it is quantized again.
        task: the task that it was trained for, if it is known.

    Returns:
        The merge, the outputs on the probe batch that the checkpoint must have, and the pooling and
        head of a sentence-transformers model, if it must be one.

    Raises:
        MergeError: as `merge`.
    """
    model, requantize = adapter.model, dtype is None
    pooled = probe(model) if adapter.pooling else {}
    encoder = sentence_encoder(adapter, task)
    if encoder and not pooled:
        pooled = encoder.merged_outputs(model)
    record = merge(model, tolerance=tolerance, requantize=requantize)
    if encoder:
        precision = math.inf if requantize else tolerance or model.dtype
        compared = check_outputs(pooled, encoder.merged_outputs(model), precision)
        record.expected = pooled
        record.differences, record.tolerances = compared.differences, compared.tolerances
    if dtype is not None:
        if model.dtype != DTYPES[dtype]:  # computed in fp32, as this processor is slow in bf16
            model.to(DTYPES[dtype])  # type: ignore[arg-type]
        return record, record.expected, encoder
    # The checkpoint has the weights that were rounded again.
    return record, encoder.merged_outputs(model) if encoder else probe(model), encoder


def write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    expected: dict[str, Tensor],
    tolerance: float | None = None,
    encoder: SentenceEncoder | None = None,
) -> dict[str, float]:
    """Write a model and its tokenizer, load the checkpoint and compare the outputs.

    The folder is created only if all of this succeeds.

    Args:
        model: the merged model.
        tokenizer: its tokenizer.
        folder: a folder that does not exist.
        expected: the expected outputs on the probe batch, by name.
        tolerance: the largest difference, relative to the largest value of an output; by default
            that of the dtype.
        encoder: the pooling and the head, for a sentence-transformers model.

    Returns:
        The largest absolute difference of each output on the probe batch.

    Raises:
        OutputError: the folder exists, or cannot be written.
        MergeError: the checkpoint loads with other tensors, or its outputs differ.
    """
    folder = Path(folder)
    with explained(folder), quiet_loading():
        check_place(folder, overwrite=False, replaceable=())
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f".adapterhub-{secrets.token_hex(8)}"
        try:
            _save(model, tokenizer, temporary, encoder)
            if encoder:
                outputs = encoder.outputs(model, temporary)
            else:
                outputs = probe(_reloaded(model, temporary))
            precision = tolerance or (model.dtype if encoder else coarsest_dtype(model))
            compared = check_outputs(expected, outputs, precision)
            put_in_place(temporary, folder, overwrite=False)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return compared.differences


def _save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    encoder: SentenceEncoder | None,
) -> None:
    try:
        if encoder:
            encoder.save(model, tokenizer, folder)
            return
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # What safetensors and tokenizers raise on a full disk.
        if type(error) in (SafetensorError, Exception):
            problem = f"cannot write {folder}: {error}"
            raise OutputError(problem, hint="free some space") from error
        raise


def _reloaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    loaded, info = auto_class(model).from_pretrained(
        folder, dtype=model.dtype, device_map={"": model.device}, output_loading_info=True
    )
    problems = [f"{kind}: {key}" for kind, keys in info.items() for key in keys if keys]
    if type(loaded) is not type(model):
        problems.append(f"it loads as {type(loaded).__name__}, not as {type(model).__name__}")
    if problems:
        raise MergeError(
            "the merged checkpoint does not load as it was written", offenders=problems
        )
    keep_4bit_layout(loaded, Patch())
    if loaded.dtype == torch.bfloat16 and without_slow_bf16("bf16") != "bf16":
        loaded = loaded.float() if quantization_of(loaded) is None else loaded  # the same weights
    if (processor := processor_of(model)) is not None:  # what the model is probed with
        remember_processor(loaded, processor)
    return loaded.eval()  # type: ignore[no-any-return]
