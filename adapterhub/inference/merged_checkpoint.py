"""Write a merged model as a `transformers` checkpoint, verified by loading it again.

A plain checkpoint of a classifier uses the pooling of its class; one without a head does not pool.
If an adapter's head reads another pooling, or its task is embedding, the merged model is written in
the format of sentence-transformers: the base model as a plain checkpoint, a folder for the pooling,
and a folder for the head, whose outputs are the logits, or for the normalization.
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
from adapterhub.anatomy.backbone import DTYPES, Backbone
from adapterhub.backbones.compare import coarsest_dtype
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.pooling import NAMES, trained_length, vector_length
from adapterhub.backbones.probe import evaluation_mode, probe, probe_batch
from adapterhub.backbones.quantized import keep_4bit_layout
from adapterhub.backbones.sentence_modules import (
    FLAGS,
    LengthStep,
    SentenceModules,
    VectorStep,
    dense_step,
    modules_of_model,
    read_modules,
)
from adapterhub.backbones.task_models import TASK_MODELS, task_kind, text_config
from adapterhub.errors import MergeError, OutputError
from adapterhub.files.atomic import check_place, explained, put_in_place
from adapterhub.merging.merge import (
    Merge,
    check_outputs,
    merge,
)
from adapterhub.patch import Patch
from adapterhub.status import MODEL_LOCK, quiet_loading
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
    """Merge an adapter for writing a checkpoint.

    Without a `dtype`, the checkpoint is quantized again. `task` is the adapter's training task, if
    it is known.

    Returns:
        The merge, the expected outputs of the checkpoint on the probe batch, and the pooling and
        head of a sentence-transformers model, if one is needed.

    Raises:
        MergeError: as in `merge`.
    """
    model, requantize = adapter.backbone.pretrained, dtype is None
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
    # The checkpoint contains the requantized weights.
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

    The outputs on the probe batch must equal the `expected` ones, by name. `tolerance` is the
    largest difference, relative to the largest value of an output; by default it follows the dtype.

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
        # Raised by safetensors and tokenizers on a full disk.
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
        loaded = (
            loaded.float() if Backbone.of(loaded).quantization is None else loaded
        )  # the same weights
    if (processor := Backbone.of(model).processor) is not None:  # inputs of the probe
        Backbone.of(loaded).processor = processor
    return loaded.eval()  # type: ignore[no-any-return]


_POOLING, _HEAD = "1_Pooling", "2_Dense"


@dataclass(frozen=True)
class SentenceEncoder:
    """The pooling and the linear head of a merged model, or its way to compute a vector.

    Without a head, the vector is the output, of length 1 with `normalize`. `prompts` are put before
    texts, by the name of the use. `trained` is the length that the backbone was trained with, which
    a merged model does not record. `modules` are those after the pooling, whose files are copied.
    """

    how: str
    head: nn.Linear | None
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    trained: int | None = None
    modules: SentenceModules = field(default_factory=SentenceModules)

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        """Write the folder."""
        base: Any = model.base_model
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        behind = self._behind()
        kinds = ["Transformer", "Pooling", *(step.kind for step in behind)]
        paths = ["", *(f"{n}_{kind}" for n, kind in enumerate(kinds[1:], start=1))]
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(zip(paths, kinds, strict=True))
        ]
        longest = min(vector_length(model, tokenizer), self.trained or 1 << 30)
        own = self.modules
        whole: dict[str, Any] = {"prompts": dict(self.prompts)}
        if own.prompt and self.prompts.get(own.default_prompt or "") == own.prompt:
            whole["default_prompt_name"] = own.default_prompt
        whole |= {"truncate_dim": own.truncate} if own.truncate else {}
        whole |= {} if own.similarity == "cosine" else {"similarity_fn_name": own.similarity}
        configs: dict[str, Any] = {
            "modules.json": modules,
            "config_sentence_transformers.json": whole,
            "sentence_bert_config.json": {"max_seq_length": longest}
            | ({"do_lower_case": True} if own.lower else {}),
            f"{_POOLING}/config.json": self._pooling(text_config(model).hidden_size),
        }
        for path, step in zip(paths[2:], behind, strict=True):
            configs[f"{path}/config.json"] = step.options()
        for name, content in configs.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
        for path, step in zip(paths[2:], behind, strict=True):
            tensors = {n: t.detach().float().cpu() for n, t in step.state_dict().items()}
            if tensors:
                named = {name: tensor.contiguous() for name, tensor in tensors.items()}
                save_file(named, folder / path / "model.safetensors")

    def _behind(self) -> list[VectorStep]:
        """Return the modules after the pooling."""
        if self.head is not None:
            return [dense_step(self.head)]
        own = [step for step in self.modules.steps if step.kind]
        return [*own, *[LengthStep()] * self.normalize]

    def _pooling(self, size: int) -> dict[str, Any]:
        """Return the options of the pooling, in the form supported by most versions."""
        theirs = {name: other for other, name in NAMES.items()}
        names = [theirs.get(name, name) for name in self.how.split("+")]
        own: dict[str, Any] = {"word_embedding_dimension": size}
        if names == [name for name in FLAGS.values() if name in names]:
            own |= {flag: name in names for flag, name in FLAGS.items()}
        else:
            own["pooling_mode"] = names
        return own | {"include_prompt": self.modules.pools_prompt}

    def merged_outputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the outputs on the probe batch of a merged model with this pooling and head."""
        head = {} if self.head is None else dict(self.head.named_parameters())
        return self._outputs(model.base_model, head, model)

    def outputs(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the folder, and return the outputs on the probe batch of the merged model."""
        with MODEL_LOCK:
            base = AutoModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        keep_4bit_layout(base, Patch())
        if self.head is None:
            own = read_modules(folder)
            encoder = SentenceEncoder(own.pooling, None, own.normalize, modules=own)
            return encoder._outputs(base, {}, model)
        tensors = load_file(folder / _HEAD / "model.safetensors", device=str(model.device))
        head = {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
        return self._outputs(base, head, model)

    def _outputs(
        self, base: Any, head: Mapping[str, Tensor], model: PreTrainedModel
    ) -> dict[str, Tensor]:
        batch = probe_batch(model)
        with evaluation_mode(base), torch.inference_mode():
            states = base(**batch).last_hidden_state
            vectors = self.modules.vectors(
                states, batch["attention_mask"], pooling=self.how, normalize=self.normalize
            )
            if not head:
                return {"vectors": vectors.float().cpu()}
            pooled = vectors.to(states.dtype).float()
            logits = F.linear(pooled, head["weight"].float(), head.get("bias"))
        return {"logits": logits.float().cpu()}


def sentence_encoder(adapter: Adapter, task: Task | None) -> SentenceEncoder | None:
    """Return the pooling that a merged adapter needs in addition to its weights, or None.

    A pooling that belongs to the adapter is removed, as `take_pooling` does.

    Raises:
        MergeError: as in `take_pooling`.
    """
    if adapter.pooling:
        return take_pooling(adapter)
    if not isinstance(task, Embedding):
        return None
    own = modules_of_model(adapter.model, task.modules)
    prompts = {"query": task.query_prefix or "", "passage": task.passage_prefix or ""}
    changed = {use: text for use, text in prompts.items() if text != own.prompt}
    return SentenceEncoder(
        task.pooling or own.pooling,
        None,
        own.normalize if task.normalize is None else task.normalize,
        {**own.prompts, **changed},
        trained_length(Path(str(adapter.backbone.folder))),
        own,
    )


def take_pooling(adapter: Adapter) -> SentenceEncoder:
    """Remove the pooling from an attached adapter, and return it with a copy of the head.

    The adapter then reads the pooling of the model's class, and can be merged into its backbone.

    Raises:
        MergeError: the head is not a single linear layer.
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
