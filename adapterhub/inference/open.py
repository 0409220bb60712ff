"""Open trained adapters for use: a folder alone determines backbone, head and labels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import activate, only_foundations
from adapterhub.backbones.early_checks import DEQUANTIZE
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.layer_timing import times_in_bf16, without_slow_bf16
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.pooling import max_positions
from adapterhub.backbones.quantized import DECODED, stored_quantization
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import ConfigError, MergeError, MismatchError, warn_user
from adapterhub.files.heads import with_head
from adapterhub.files.manifest import FAMILY, Manifest
from adapterhub.files.native import read_manifest
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.files.scores import ScoreError
from adapterhub.inference.record import TrainingRecord, training_record
from adapterhub.pages.predictions import outcomes_of
from adapterhub.pages.score_errors import EvaluatedRows, score_errors
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import pull_verified
from adapterhub.status import doing
from adapterhub.tasks import TASKS, Prediction, Setting, Task
from adapterhub.tasks._lengths import encode_whole, lost_tokens, truncate
from adapterhub.training.loading import make_ready


@dataclass(frozen=True)
class Predictor:
    """A model, with or without an adapter, ready to predict."""

    model: PreTrainedModel
    task: Task
    setting: Setting

    def predict(self, examples: Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """Return one prediction per example."""
        encoded = self.task.encode(examples, self.setting, labelled=False)
        return self.task.predict(self.model, encoded, batch_size)

    def evaluate(
        self,
        examples: Sequence[Any],
        batch_size: int = 64,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Compute the task's metrics on labelled examples.

        Args:
            examples: what is predicted.
            batch_size: the rows that are computed together.
            record: gets one prediction per example, for `errors`.

        Raises:
            DataError: the examples have labels that the adapter lacks.
        """
        self.task.check(self.setting.labels, examples)
        whole = encode_whole(self.task, examples, self.setting)
        encoded = truncate(whole, self.task, self.setting)
        for lost in lost_tokens(whole, encoded):
            if lost.cut:
                warn_user(lost.sentence("evaluation"))
        for line in self.task.remarks(encoded):
            warn_user(line)
        if self.task.compares_with_reference:
            with only_foundations(self.model):
                encoded = self.task.with_reference(self.model, encoded, batch_size)
        return self.task.evaluate(self.model, encoded, batch_size, record)

    def errors(
        self, metrics: Mapping[str, float], examples: Sequence[Any], record: Sequence[Prediction]
    ) -> dict[str, ScoreError]:
        """Return how sure the metrics of an evaluation are, from the predictions that it kept."""
        file = outcomes_of(self.task, examples, record, self.setting.labels, 0)
        return score_errors(metrics, {"": EvaluatedRows(len(examples), file)})


def open_adapter(
    reference: str | Path,
    backbone: str | None = None,
    *,
    registry: str | Path | None = None,
    head: str | None = None,
    task: str | None = None,
) -> Predictor:
    """Load an adapter on its backbone.

    `reference` is also the folder of an adapter or a run. `backbone` is where to load the backbone
    from, if not from the id in the manifest; its fingerprint must match. `task` is for an adapter
    that records none.

    Raises:
        ConfigError: the reference is malformed, several heads and none is named, no task, or one
            for another kind of model.
        RegistryError: the reference cannot be resolved.
        FileError: the folder has no adapter, or its files are broken.
        BackboneError: the backbone cannot be loaded.
        MismatchError: the adapter belongs to another backbone or tokenizer.
    """
    fetched = pull_verified(reference, registry=registry)
    folder = fetched.folder
    record = training_record(with_head(read_manifest(folder), head), task)
    model, tokenizer = load_bare_backbone(folder, backbone, head=head, task=task)
    make_ready(model)
    digest = fetched.digest
    adapter = load_folder(model, folder, sha256=digest, head=head or True, on=fetched.on)
    return _predictor(adapter, tokenizer, record)


def _predictor(
    adapter: Adapter, tokenizer: PreTrainedTokenizerBase, record: TrainingRecord
) -> Predictor:
    model, positions = adapter.model, max_positions(adapter.model)
    limit = min(record.max_length, positions)
    setting = Setting(tokenizer, limit, adapter.labels, record.seed, positions)
    return Predictor(model, record.task.for_model(model), setting)


def open_backbone(backbone: str, task: Task, max_length: int = 128) -> Predictor:
    """Load a pre-trained backbone without an adapter, as a baseline.

    Raises:
        ConfigError: the task needs a trained head.
        BackboneError: the backbone cannot be loaded.
    """
    if TASK_MODELS[task.head].has_head:
        headless = sorted(n for n, cls in TASKS.items() if not TASK_MODELS[cls().head].has_head)
        raise ConfigError(
            f"{task.name} needs a trained head",
            expected=f"an adapter, or one of {', '.join(headless)}",
        )
    with doing(f"loading {backbone}"):
        model, tokenizer = load_backbone(backbone, task=task.head)
    make_ready(model)
    limit = min(max_length, max_positions(model))
    setting = Setting(tokenizer, limit, positions=max_positions(model))
    return Predictor(model, task.for_model(model), setting)


def load_for_merging(
    folder: str | Path,
    backbone: str | None = None,
    dtype: str | None = "fp32",
    name: str | None = None,
    registry: str | Path | None = None,
    head: str | None = None,
    task: str | None = None,
) -> tuple[Adapter, PreTrainedTokenizerBase]:
    """Load an adapter on its backbone in one dtype, with its tokenizer.

    With a `dtype` the backbone is not quantized, and fp32 in place of bf16 on a processor that is
    slow in bf16; None quantizes it as in training.

    Raises:
        ConfigError: the adapter has several heads and none is named, or it has not this one; no
            task, or one for another kind of model.
        MergeError: `dtype` is None, but the backbone was not quantized in training.
        FileError: the folder has no adapter, or its files are broken.
        BackboneError: the backbone cannot be loaded.
        MismatchError: the adapter belongs to another backbone or tokenizer.
    """
    fetched = pull_verified(folder, registry=registry)
    files = fetched.folder
    quantize = None if dtype else read_manifest(files).backbone.quantization
    if dtype is None and quantize is None:
        raise MergeError(
            f"{folder} was trained on a backbone that is not quantized: there is nothing to "
            "quantize again",
            hint="adapterhub merge without --requantize",
        )
    computed = dtype and without_slow_bf16(dtype)
    model, tokenizer = load_bare_backbone(files, backbone, computed, quantize, head, task)
    chosen, digest = head or True, fetched.digest
    adapter = load_folder(model, files, name=name, sha256=digest, head=chosen, on=fetched.on)
    return adapter, tokenizer


def load_bare_backbone(
    folder: Path,
    backbone: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    head: str | None = None,
    task: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the backbone of an adapter, for its task but without the adapter, and its tokenizer.

    A quantized checkpoint is decoded into `dtype` if it can be; None loads the weights in the dtype
    and quantization of the training recipe, or in fp32 on a processor that is several times slower
    in bf16. `quantize` replaces the recipe's.

    Raises:
        ConfigError: the adapter has several heads and none is named, or it has not this one.
        BackboneError: the backbone cannot be loaded.
    """
    manifest = with_head(read_manifest(folder), head)
    location, revision = backbone_of_adapter(folder, manifest, backbone)
    recipe = {} if dtype else manifest.training.get("recipe", {})
    trained = recipe.get("dtype")
    if trained and without_slow_bf16(trained) != trained:
        warn_user(
            f"the backbone was {trained} in training and is fp32 here: this processor takes "
            f"{times_in_bf16():.0f} times as long in {trained}"
        )
        trained = without_slow_bf16(trained)
    if dtype and stored_quantization(find_backbone(location, revision)[0]) in DECODED:
        quantize = quantize or DEQUANTIZE
    with doing(f"loading {location}"):
        return load_backbone(
            location,
            task=training_record(manifest, task).kind,
            labels=manifest.labels,
            revision=revision,
            dtype=dtype or trained,
            quantize=quantize or recipe.get("quantize"),
        )


@dataclass(frozen=True)
class AdapterSource:
    """Which adapter to open: one of a reference or a folder, with one of several heads.

    `digest` is the sha256 that its manifest must have, "" for any; `task` is for an adapter that
    records none.
    """

    reference: str
    head: str | None = None
    digest: str = ""
    task: str | None = None


@dataclass(frozen=True)
class OpenedAdapters:
    """Adapters that are ready to predict, by name; `attached` are their names on their models."""

    predictors: Mapping[str, Predictor]
    attached: Mapping[str, str]

    def predict(self, name: str, examples: Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """Return one prediction per example."""
        activate(self.predictors[name].model, self.attached[name])
        return self.predictors[name].predict(examples, batch_size)


def open_several(
    sources: Mapping[str, AdapterSource],
    backbone: str | None = None,
    registry: str | None = None,
) -> OpenedAdapters:
    """Load adapters; those with the same backbone, class of model and tokenizer share one model.

    Raises:
        MismatchError: an adapter is not the one whose digest is given, or is for another backbone.
        RegistryError: a reference cannot be resolved.
        FileError: the files of an adapter are broken.
        BackboneError: a backbone cannot be loaded.
    """
    loaded: dict[Hashable, tuple[Any, Any]] = {}
    predictors: dict[str, Predictor] = {}
    attached: dict[str, str] = {}
    for number, (name, source) in enumerate(sources.items()):
        fetched = pull_verified(source.reference, registry=registry)
        if source.digest and digest_of(fetched.folder) != source.digest:
            raise MismatchError(
                f"{source.reference} is another adapter here than where the job was started",
                expected="the same version in the registry, or folder, of every machine",
                hint="a reference with a version, such as sst2@v3",
            )
        digest = source.digest or fetched.digest
        manifest = with_head(read_manifest(fetched.folder, digest), source.head)
        record = training_record(manifest, source.task)
        location = backbone_of_adapter(fetched.folder, manifest, backbone)
        # Tokens, rows of sites and adapters below belong to one model; nothing else is added to it.
        alone = number if manifest.tokens or fetched.on or FAMILY in manifest.training else None
        key = (location, _model_class(manifest, record), alone)
        if key not in loaded:
            loaded[key] = load_bare_backbone(
                fetched.folder, backbone, head=source.head, task=source.task
            )
            make_ready(loaded[key][0])
        model, tokenizer = loaded[key]
        adapter = load_folder(
            model,
            fetched.folder,
            name=f"adapter-{number}",
            sha256=digest,
            head=source.head or True,
            on=fetched.on,
        )
        predictors[name] = _predictor(adapter, tokenizer, record)
        attached[name] = adapter.name
    return OpenedAdapters(predictors, attached)


def _model_class(manifest: Manifest, record: TrainingRecord) -> Hashable:
    """Return what the model of an adapter must be besides its backbone: class, pooling, weights."""
    recipe = manifest.training.get("recipe", {})
    stored = recipe.get("dtype"), recipe.get("quantize")
    return TASK_MODELS[record.kind].auto, record.task.pooling, *stored
