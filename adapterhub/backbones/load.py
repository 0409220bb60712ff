"""Load a backbone with the head of a task, and its tokenizer or processor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import DTYPES, Backbone
from adapterhub.anatomy.family_file import FamilySource, read_family, use_family
from adapterhub.backbones.checkpoint import BROKEN, stored_quantization
from adapterhub.backbones.diffusion import load_pipeline
from adapterhub.backbones.find import PACKAGED, find_backbone, is_gguf, not_found
from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.pooling import check_pooling, remember_pooling
from adapterhub.backbones.probe import check_causal
from adapterhub.backbones.processor import (
    PictureTextProcessor,
    processor_options,
    snapshot_of,
    tokenizer_of,
)
from adapterhub.backbones.quantized import (
    IN_FP32,
    keep_4bit_layout,
    loading_options,
    remaining_quantization,
    settle_decoded,
)
from adapterhub.backbones.task_models import (
    CAUSAL_LM,
    PICTURES_WITH_TEXT,
    TASK_MODELS,
    TEXT_TO_IMAGE,
    TaskModel,
    label_options,
    task_model,
    text_config,
)
from adapterhub.backbones.tensor_parallel import loading_by_plan
from adapterhub.backbones.torch_free_checks import dtype_name
from adapterhub.config.user_folders import is_file, is_local_name
from adapterhub.errors import BackboneError, ConfigError, unknown
from adapterhub.patch import Patch
from adapterhub.status import MODEL_LOCK, quiet_loading


def load_backbone(
    backbone: str | Path,
    *,
    task: str = "features",
    labels: Sequence[str] | int = (),
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    attention: str | None = None,
    new_tokens: Sequence[str] = (),
    pooling: str | None = None,
    family: FamilySource | None = None,
    tensor_parallel: bool = False,
    num_labels: int | None = None,
    device: str | int | torch.device | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a pre-trained model with the head of a task, and its tokenizer or processor.

    Args:
        backbone: a folder or a Hub id.
        task: features (no head), embedding (nor a pooler), classification, multi-label, regression,
            tagging, question-answering, multiple-choice, seq2seq, masked-lm, causal-lm,
            image-classification, image-text-to-text, audio-classification, speech-recognition, or
            text-to-image: a diffusers pipeline.
        labels: the class names, in the order of the logits, or the number of classes.
        revision: a branch, tag or commit on the Hub.
        dtype: fp32, bf16, fp16 or a torch dtype; by default fp32, or bf16 if quantized and fast.
        quantize: nf4, fp4, int8, int8-weight, fp8-weight; "dequantize" decodes a quantized model.
        device_map: as in transformers.
        attention: the attention implementation, as `attn_implementation` in transformers.
        new_tokens: tokens to add to the tokenizer; their embeddings belong to the adapters.
        pooling: the pooling for heads: cls, mean, last, max, "model"; by default as trained.
        family: replaces the family of the model type: a `Family`, its fields, or a YAML file.
        tensor_parallel: divide projections over the processes of `torchrun` by transformers' plan.
        num_labels: the number of classes, instead of `labels`.
        device: the device to move the model to: "cuda", 0, a `torch.device`.

    Raises:
        BackboneError: the backbone was not found, cannot be loaded, or does not fit an option.
        ConfigError: an option is unknown, or does not fit the model, or a library is missing.
    """
    backbone, dtype, labels = _named(backbone), dtype_name(dtype), _labels(labels, num_labels)
    kind, family = task_model(task), family and read_family(family)
    pooling, place = pooling and check_pooling(pooling), _device(device, device_map)
    if task == TEXT_TO_IMAGE:
        shared = {"quantize": quantize, "attention": attention, "new_tokens": new_tokens}
        return _pipeline(backbone, revision, dtype, shared | {"family": family, "device": place})
    folder, commit = find_backbone(backbone, revision)
    quantize = remaining_quantization(quantize, folder)
    options = label_options(task, labels) | {"dtype": _dtype(dtype, bool(quantize), folder)}
    options |= _given(attn_implementation=attention or None, device_map=device_map)
    with quiet_loading():
        options |= _init_options(folder, task, backbone)
        options |= loading_by_plan(folder) if tensor_parallel else {}
        model = _load_weights(kind, folder, options, quantize, backbone, place)
        processor = _load_processor(kind, folder, backbone)
    _remember_origin(model, folder, backbone, commit)
    _remember_pooling(model, pooling, folder if kind.pools else None)
    return _prepared(model, processor, new_tokens, family, backbone, task)


def _remember_pooling(model: PreTrainedModel, pooling: str | None, folder: Path | None) -> None:
    if folder is not None:
        remember_pooling(model, pooling, folder)


def _named(backbone: object) -> str:
    """Return the name or folder of a backbone; refuse a loaded model.

    Raises:
        ConfigError: `backbone` is neither a name nor a folder.
    """
    if isinstance(backbone, (str, os.PathLike)):
        return os.fspath(backbone)
    is_model = isinstance(backbone, torch.nn.Module)
    raise ConfigError(
        f"the backbone is {'a loaded ' * is_model}{type(backbone).__name__}",
        expected="a Hub id or a folder",
        hint="ah.attach(model, METHOD) for a new adapter, ah.load(model, ADAPTER) for a trained one"
        if is_model
        else "load_backbone(ID)",
    )


def _labels(labels: Sequence[str] | int, count: int | None) -> Sequence[str]:
    """Return the class names, from names or from a number of classes.

    Raises:
        ConfigError: `labels` and `count` differ, or the number is below one.
    """
    number = labels if isinstance(labels, int) and not isinstance(labels, bool) else count
    names = () if isinstance(labels, int) else labels
    if isinstance(names, str) or (number is not None and number < 1):
        raise ConfigError(
            f"labels={labels!r}" if number is None else f"{number} labels",
            expected="a list of names, or their number",
            hint='labels=["no", "yes"], or labels=2',
        )
    if names and number not in (None, len(names)):
        raise ConfigError(f"num_labels={number}, and {len(names)} labels", hint="leave out one")
    return names or [f"LABEL_{n}" for n in range(number or 0)]


def _device(device: str | int | torch.device | None, device_map: object) -> torch.device | None:
    """Return the device to move a model to, if any.

    Raises:
        ConfigError: the device is not available, or `device_map` is also set.
    """
    if device is None or device == "auto":
        return None
    if device_map is not None:
        raise ConfigError("device beside device_map", hint="leave out one")
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"the device {device!r} cannot be used: {str(error).splitlines()[0][:200]}",
            expected='"cuda", "cuda:0", "mps" or "cpu"',
        ) from None
    return chosen


def _prepared(
    model: PreTrainedModel,
    processor: Any,
    new_tokens: Sequence[str],
    family: FamilySource | None,
    backbone: str,
    task: str,
) -> tuple[PreTrainedModel, Any]:
    """Return a model and its processor, ready for use."""
    _prepare_processor(processor, new_tokens, model)
    _use(family, model)
    if task == CAUSAL_LM:
        check_causal(model, backbone)
    return model.eval(), processor


def _pipeline(
    backbone: str, revision: str | None, dtype: str | None, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return a diffusers pipeline as both model and processor.

    Raises:
        ConfigError: an option does not apply to pipelines.
    """
    place = options.pop("device")
    if wrong := [name for name, value in options.items() if value]:
        raise ConfigError(
            f"{', '.join(wrong)} with a pipeline of diffusers",
            expected="dtype and revision alone",
            hint="leave it out; ah.attach(pipe, ...) takes a pipeline that you loaded yourself",
        )
    pipeline = load_pipeline(backbone, revision, dtype)
    pipeline = pipeline if place is None else pipeline.to(place)
    return pipeline, pipeline


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _dtype(name: str | None, quantized: bool, folder: Path) -> torch.dtype:
    """Return the torch dtype of a name; by default bf16 if quantized, else fp32.

    Kernels for codes stored in other formats need bf16, even where it is slow.
    """
    stored = stored_quantization(folder)
    if name is None:
        name = "bf16" if quantized or stored else "fp32"
        name = without_slow_bf16(name) if quantized or stored in IN_FP32 else name
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def _use(family: FamilySource | None, model: PreTrainedModel) -> None:
    if family:
        use_family(model, family)


def _remember_origin(
    model: PreTrainedModel, folder: Path, backbone: str, commit: str | None
) -> None:
    # A folder's name must stay valid if the working directory changes.
    is_folder = folder == Path(backbone) or is_local_name(backbone) or is_file(backbone)
    model.config._name_or_path = model.name_or_path = (
        str(folder.absolute()) if is_folder else backbone
    )
    model.config._commit_hash = commit
    Backbone.of(model).folder = str(folder.absolute())


def _init_options(folder: Path, task: str, backbone: str) -> dict[str, Any]:
    """Return the constructor options for a kind of model.

    An architecture without a model of this kind is refused before its weights are read.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except BROKEN:
        return {}  # loading the model raises the right error
    if not task_model(task).classes_for(config):
        kinds = [name for name, row in TASK_MODELS.items() if row.classes_for(config)]
        raise BackboneError(
            f"{backbone!r} is of type {config.model_type}, which has no model for {task}",
            expected=f"one of {', '.join(kinds)}" if kinds else "another backbone",
            hint=f"another --task, or another backbone for {task}",
        )
    kind = task_model(task)
    own = {name: value for name, value in kind.config.items() if hasattr(config, name)}
    return own | kind.init_options(config)


def _auto(kind: TaskModel, folder: Path) -> Any:
    """Return the auto class of transformers that loads a checkpoint as a kind of model."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except BROKEN:
        return getattr(transformers, kind.auto)  # loading the model raises the right error
    return getattr(transformers, kind.auto_name(type(config)))


def _load_weights(
    kind: TaskModel,
    folder: Path,
    options: dict[str, Any],
    quantize: str | None,
    backbone: str,
    place: torch.device | None,
) -> Any:
    """Load a model, and record the names of its new weights in it."""
    options = loading_options(auto := _auto(kind, folder), folder, options, quantize)
    model, info = _load(auto, folder, options | {"output_loading_info": True}, backbone)
    settle_decoded(model, folder, options["dtype"])
    keep_4bit_layout(model, Patch())
    model = model if place is None else model.to(place)
    Backbone.of(model).fresh = frozenset(info["missing_keys"])
    return model


def _load(auto: Any, folder: Path, options: dict[str, Any], backbone: str) -> Any:
    try:
        with MODEL_LOCK:
            # False: never run code from a checkpoint, and never prompt for it.
            return auto.from_pretrained(folder, trust_remote_code=False, **options)
    except BROKEN as error:
        raise BackboneError(
            f"the backbone {backbone!r} cannot be loaded by {auto.__name__}: {error}",
            expected="a transformers checkpoint whose architecture has a model for this task",
        ) from error


def _load_processor(kind: TaskModel, folder: Path, backbone: str) -> Any:
    joined = kind.processor == PICTURES_WITH_TEXT
    auto = PictureTextProcessor if joined else getattr(transformers, kind.processor)
    return _load(auto, folder, processor_options(kind.processor), backbone)


def _prepare_processor(
    processor: Any, new_tokens: Sequence[str], model: PreTrainedModel | None = None
) -> None:
    """Add a padding token and new tokens to a tokenizer, and record it for its model.

    A processor may lack a tokenizer. `model` is None if the model is not loaded.

    Raises:
        ConfigError: there are new tokens, but the processor lacks a tokenizer.
    """
    if model is not None:
        Backbone.of(model).processor = processor
    tokenizer = tokenizer_of(processor)
    if tokenizer is None:
        if new_tokens:
            raise ConfigError(
                f"new tokens for a backbone that reads no text: {', '.join(new_tokens)}",
                hint="leave out new_tokens",
            )
        return
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model is not None:
        config = model.config if hasattr(model.config, "pad_token_id") else text_config(model)
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        known = Backbone.of(model)
        known.remember_vocabulary_size()
        size = max(tokenizer.get_vocab().values(), default=-1) + 1
        known.tokenizer = snapshot_of(known, tokenizer, size)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in new_tokens])


def load_processor(
    backbone: str, task: str, revision: str | None = None, new_tokens: Sequence[str] = ()
) -> Any:
    """Load the tokenizer or processor of a backbone without the model.

    `new_tokens` are added to the tokenizer.

    Raises:
        BackboneError: the backbone was not found, or cannot be loaded.
        ConfigError: there are new tokens, but the processor lacks a tokenizer.
    """
    if task == TEXT_TO_IMAGE:
        return load_pipeline(backbone, revision)
    folder, _ = find_backbone(backbone, revision)
    with quiet_loading():
        processor = _load_processor(task_model(task), folder, backbone)
    _prepare_processor(processor, new_tokens)
    return processor


def meta_model(
    backbone: str,
    *,
    task: str = "features",
    labels: Sequence[str] = (),
    revision: str | None = None,
    family: FamilySource | None = None,
) -> PreTrainedModel:
    """Make a backbone from its configuration on the meta device: modules and sizes, no weights.

    Raises:
        BackboneError: the backbone was not found, or does not fit `family`.
        ConfigError: the task is unknown, or `family` is invalid.
    """
    options = label_options(task, labels)
    is_here = is_local_name(backbone) or is_gguf(backbone)
    is_here = is_here or (backbone in PACKAGED and not revision)
    source = str(find_backbone(backbone)[0]) if is_here else backbone
    try:
        with guarded_hub(), quiet_loading():
            config = transformers.AutoConfig.from_pretrained(source, revision=revision, **options)
        auto = getattr(transformers, task_model(task).auto_name(type(config)))
        with MODEL_LOCK, torch.device("meta"):
            model = auto.from_config(config, **task_model(task).init_options(config))
    except (OSError, ValueError, KeyError) as error:  # its cause may quote a server
        raise not_found(backbone, str(error).splitlines()[0]) from None
    name = source if is_local_name(backbone) or is_file(backbone) else backbone
    model.config._name_or_path = model.name_or_path = name
    _use(family, model)
    return model.eval()  # type: ignore[no-any-return]
