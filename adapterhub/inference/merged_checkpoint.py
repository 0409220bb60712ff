"""Write a merged model as a `transformers` checkpoint, verified by loading it again.

A plain checkpoint of a classifier pools in the way of its class, and one without a head not at all.
Where an adapter's head reads another pooling, or its task is embedding, the merged model is written
as sentence-transformers does: the base model as a plain checkpoint, and a folder each for the
pooling and for the head, whose outputs are the logits, or for the length of the vectors.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.route import activate
from adapterhub.backbones.identity import ORIGIN
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.model_lock import MODEL_LOCK
from adapterhub.backbones.pooling import POOLS, trained_length, vector_length
from adapterhub.backbones.probe import evaluation_mode, probe, probe_batch
from adapterhub.backbones.processor import processor_of, remember_processor
from adapterhub.backbones.quantized import quantization_of
from adapterhub.backbones.quantized_layers import keep_4bit_layout
from adapterhub.backbones.same import coarsest_dtype
from adapterhub.backbones.task_models import TASK_MODELS, task_kind, text_config
from adapterhub.backbones.weights import DTYPES
from adapterhub.errors import MergeError, OutputError
from adapterhub.files.atomic import check_place, explained, put_in_place
from adapterhub.merging.merge import (
    Merge,
    check_outputs,
    merge,
)
from adapterhub.patch import Patch
from adapterhub.status import quiet_loading
from adapterhub.tasks import Task
from adapterhub.tasks.embedding import Embedding


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

    Without a `dtype` the checkpoint is quantized again. `task` is what the adapter was trained for,
    if it is known.

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
    """Write a model and its tokenizer, load the checkpoint and return the largest differences.

    The folder is created only if all of this succeeds.

    The outputs on the probe batch must be the `expected` ones, by name. `tolerance` is the largest
    difference, relative to the largest value of an output; by default that of the dtype.

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
    with MODEL_LOCK:
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


_POOLING, _HEAD, _LENGTH = "1_Pooling", "2_Dense", "2_Normalize"
_TYPES = {"": "Transformer", _POOLING: "Pooling", _HEAD: "Dense", _LENGTH: "Normalize"}
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}


@dataclass(frozen=True)
class SentenceEncoder:
    """The pooling (cls, mean, last or max) and the linear head of a merged model.

    Without a head, the vector is the output, of length 1 with `normalize`. `prompts` are put before
    texts, by the name of the use; `trained` is the length that the backbone was trained with, which
    a merged model does not tell.
    """

    how: str
    head: nn.Linear | None
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    trained: int | None = None

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        """Write the folder."""
        base: Any = model.base_model
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        left_out = {_HEAD} if self.head is None else set[str]()
        left_out |= set() if self.normalize else {_LENGTH}
        types = {path: name for path, name in _TYPES.items() if path not in left_out}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(types.items())
        ]
        longest = min(vector_length(model, tokenizer), self.trained or 1 << 30)
        size = {"word_embedding_dimension": text_config(model).hidden_size}
        configs: dict[str, Any] = {
            "modules.json": modules,
            "config_sentence_transformers.json": {"prompts": dict(self.prompts)},
            "sentence_bert_config.json": {"max_seq_length": longest},
            f"{_POOLING}/config.json": size | {f: how == self.how for how, f in _FLAGS.items()},
        }
        if self.normalize:
            configs[f"{_LENGTH}/config.json"] = {}
        if self.head is not None:
            configs[f"{_HEAD}/config.json"] = {
                "in_features": self.head.in_features,
                "out_features": self.head.out_features,
                "bias": self.head.bias is not None,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
        for name, content in configs.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
        if self.head is not None:
            named = self.head.named_parameters()
            tensors = {f"linear.{n}": p.detach().float().cpu().contiguous() for n, p in named}
            save_file(tensors, folder / _HEAD / "model.safetensors")

    def merged_outputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the outputs on the probe batch of a merged model with this pooling and head."""
        head = {} if self.head is None else dict(self.head.named_parameters())
        return self._outputs(model.base_model, head, model)

    def outputs(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the folder, and return the outputs on the probe batch of the merged model."""
        with MODEL_LOCK:
            base = AutoModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        keep_4bit_layout(base, Patch())
        head: dict[str, Tensor] = {}
        if self.head is not None:
            tensors = load_file(folder / _HEAD / "model.safetensors", device=str(model.device))
            head = {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
        return self._outputs(base, head, model)

    def _outputs(
        self, base: Any, head: Mapping[str, Tensor], model: PreTrainedModel
    ) -> dict[str, Tensor]:
        batch = probe_batch(model)
        with evaluation_mode(base), torch.inference_mode():
            states = base(**batch).last_hidden_state
            pooled = POOLS[self.how](states.float(), batch["attention_mask"].bool())
            if not head:
                vectors = F.normalize(pooled, dim=-1) if self.normalize else pooled
                return {"vectors": vectors.float().cpu()}
            pooled = pooled.to(states.dtype).float()
            logits = F.linear(pooled, head["weight"].float(), head.get("bias"))
        return {"logits": logits.float().cpu()}


def sentence_encoder(adapter: Adapter, task: Task | None) -> SentenceEncoder | None:
    """Return the pooling that a merged adapter needs beside its weights, or None.

    A pooling of the adapter's own is taken off, as `take_pooling` does.

    Raises:
        MergeError: as `take_pooling`.
    """
    if adapter.pooling:
        return take_pooling(adapter)
    if not isinstance(task, Embedding):
        return None
    prompts = {"query": task.query_prefix, "passage": task.passage_prefix}
    prompts = {use: text for use, text in prompts.items() if text}
    return SentenceEncoder(
        task.pooling or "mean",
        None,
        task.normalize,
        prompts,
        trained_length(Path(getattr(adapter.model, ORIGIN))),
    )


def take_pooling(adapter: Adapter) -> SentenceEncoder:
    """Remove the pooling from an attached adapter, and return it with a copy of the head.

    The adapter, which then reads what the model's class pools, can be merged into its backbone.

    Raises:
        MergeError: the head is not one linear layer.
    """
    assert adapter.head is not None
    assert adapter.pooling is not None
    (head, *others) = adapter.head.own.values()
    if others or not isinstance(head, nn.Linear):
        raise MergeError(
            f"pooling={adapter.pooling.how}: a merged checkpoint pools like that only as a "
            "sentence-transformers model, whose head is one linear layer",
            offenders=[f"{n}: {type(m).__name__}" for n, m in adapter.head.own.items()],
            hint="train with pooling=model, or keep the adapter attached",
        )
    encoder = SentenceEncoder(adapter.pooling.how, head)
    activate(adapter.model)
    adapter.pooling.eject()
    adapter.pooling = None
    activate(adapter.model, adapter.name)
    return encoder
