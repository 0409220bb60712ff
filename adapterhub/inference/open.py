"""Open trained adapters for use: a folder alone determines backbone, head and labels."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activation import text_positions
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import activate, adapters
from adapterhub.adapters.state import find_state
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.checkpoint import stored_quantization
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.layer_timing import times_in_bf16, without_slow_bf16
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.pooling import max_positions, vector_length
from adapterhub.backbones.quantized import DECODED
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.backbones.torch_free_checks import DEQUANTIZE, dtype_name
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, MergeError, MismatchError, one_line, warn_user
from adapterhub.files.manifest import FAMILY, Manifest, with_head
from adapterhub.files.native import Saved
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.files.shown_table import ScoreError
from adapterhub.inference.embed import embed
from adapterhub.inference.inputs import empty_error, empty_inputs, examples_of
from adapterhub.inference.record import LONGEST_UNRECORDED, TrainingRecord, training_record
from adapterhub.pages.evaluation import (
    EvaluationResult,
    evaluate_off_and_on,
    evaluate_rows,
    with_evaluation_reference,
)
from adapterhub.pages.row_scores import EvaluatedRows, outcomes_of, score_errors
from adapterhub.registry.pull import Fetched, pull_verified
from adapterhub.status import doing
from adapterhub.tasks import TASKS, Encoded, Prediction, Setting, Task
from adapterhub.tasks.common.base import NoPrediction, encode_whole, lost_tokens, truncate
from adapterhub.tasks.common.batches import UNLIMITED, limit_of
from adapterhub.tasks.common.language_models import Writing, check_writes, streamed
from adapterhub.tasks.embedding import Embedding
from adapterhub.training.loading import make_ready

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


_BATCH = 64  # rows


@dataclass(frozen=True)
class Predictor:
    """A model, with or without an adapter, ready to predict.

    Attributes:
        model: the backbone, with the adapter.
        task: the task.
        setting: the tokenizer, the longest input and the labels.
        data: the columns of the training data, which define how rows are read.
    """

    model: PreTrainedModel
    task: Task
    setting: Setting
    data: DataOptions = field(default_factory=DataOptions)

    def __repr__(self) -> str:
        state = find_state(self.model)
        active = ", ".join(map(repr, state.adapters)) if state else "no adapter"
        few = ", ".join(self.labels) if 0 < len(self.labels) < 5 else f"{len(self.labels)} labels"
        labels = f", {few}" if self.labels else ""
        about = f"{active} on {Path(self.backbone).name}, {self.task.name}{labels}"
        return one_line(f"<Predictor {about}, at most {self.max_length} tokens>", 300)

    @property
    def backbone(self) -> str:
        """The name or the folder of the backbone."""
        return Backbone.of(self.model).source

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the backbone, with the adapter's new tokens."""
        return self.setting.tokenizer

    @property
    def max_length(self) -> int:
        """The longest input, in tokens; longer inputs are cut, or read in windows."""
        return limit_of(self.setting)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the logits; () if the task has none."""
        return self.setting.labels

    def predict(self, inputs: Any, *, batch_size: int = 64, keep_empty: bool = False) -> Any:
        """Return the prediction for one input, or a list of predictions for several.

        One input is a text, a file name for tasks on images or audio, a tuple of texts (a pair, or
        a question and its context), a row as a mapping with the columns of the training data, or a
        list of messages for language models with a chat template. Several inputs are a list of
        these, or a table of pandas, polars, pyarrow or datasets.

        Predictions have the results of the task as attributes, such as `label`, `probability` and
        `scores` for a class, or `text` for a generated text. `as_dict()` returns all of them. The
        attribute `truncated` counts the tokens of the input that were cut.

        An input without a text is an error; with `keep_empty`, it gets a prediction without values.

        Raises:
            DataError: an input has another form, or lacks a column or a text.
        """
        examples, single = examples_of(inputs, self.task, self.data, keep_empty=keep_empty)
        predictions = self.predict_examples(examples, batch_size, keep_empty=keep_empty)
        self.warn_of_cuts(predictions)
        return predictions[0] if single else predictions

    def predict_examples(
        self,
        examples: Sequence[Any],
        batch_size: int = 64,
        *,
        keep_empty: bool = False,
        places: Sequence[str] = (),
    ) -> list[Prediction]:
        """Return one prediction per example of the task.

        `places` name the examples in errors. With `keep_empty`, examples without a text get no
        values.

        Raises:
            EmptyInputError: an example has no text.
        """
        empty = empty_inputs(self.task, examples, self.setting)
        if empty and not keep_empty:
            named = places or [f"item {number}" for number in range(len(examples))]
            raise empty_error(empty, named, len(examples))
        without = {*empty}
        kept = [example for number, example in enumerate(examples) if number not in without]
        predictions = iter(self._predicted(kept, batch_size))
        return [NoPrediction() if n in without else next(predictions) for n in range(len(examples))]

    def _predicted(self, examples: Sequence[Any], batch_size: int) -> list[Prediction]:
        if not examples:
            return []
        encoded = self.task.encode(examples, self.setting, labelled=False)
        predictions = self.task.predict(self.model, encoded, batch_size)
        for prediction, lost in zip(predictions, encoded.lost, strict=True):
            prediction.cut(lost)
        return predictions

    def cut_note(self, predictions: Sequence[Prediction]) -> str:
        """Return a line that reports how many inputs were cut; "" if none were."""
        lost = [each.truncated for each in predictions if each.truncated]
        if not lost:
            return ""
        return (
            f"{len(lost):,} of {len(predictions):,} inputs are longer than {self.max_length:,} "
            f"tokens: {sum(lost):,} tokens are cut; the column truncated has how many of each"
        )

    def warn_of_cuts(self, predictions: Sequence[Prediction]) -> None:
        """Warn the user about inputs that were cut."""
        if cut := self.cut_note(predictions):
            warn_user(cut)

    def embed(
        self, texts: str | Sequence[str], *, prefix: str | None = None, batch_size: int = 64
    ) -> NDArray[float32]:
        """Return the vector of a text, (d,), or of each of several, (texts, d).

        Args:
            texts: the text or texts.
            prefix: text to put before each text; None: the prefix of queries that the task records.
            batch_size: texts per forward pass.

        Raises:
            ConfigError: the adapter was not trained for vectors.
        """
        if not isinstance(self.task, Embedding):
            raise ConfigError(
                f"{self.task.name} has no vectors of texts",
                expected="an adapter that was trained for the task embedding",
                hint='ah.embed(model, tokenizer, texts) with load_backbone(..., task="features")',
            )
        vectors = embed(
            self.model,
            self.tokenizer,
            [texts] if isinstance(texts, str) else list(texts),
            pooling=self.task.pooling,
            normalize=self.task.normalize,
            prefix=self.task.query_prefix if prefix is None else prefix,
            max_length=self.max_length,
            batch_size=batch_size,
        )
        return vectors[0] if isinstance(texts, str) else vectors

    def generate(
        self,
        prompt: Any,
        *,
        stream: bool = False,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        beams: int | None = None,
    ) -> Any:
        """Generate text; with `stream`, return an iterator over its pieces.

        Options that are None have the values recorded by the adapter. Without `temperature` and
        `top_p`, the most probable tokens are chosen. `torch.manual_seed` makes sampling
        reproducible.

        Args:
            prompt: a text, a chat (a list of messages) or another input, as in `predict`; for a
                list of several, a list of texts is returned.
            stream: whether to return the pieces of the text while they are generated.
            max_new_tokens: the longest text, in tokens.
            temperature: the randomness of the text; 0 chooses the most probable tokens.
            top_p: sample from the most probable tokens with this total probability.
            beams: the number of beams; 1 is greedy.

        Raises:
            ConfigError: the task does not generate, an option is out of range, or a stream has
                several prompts or beams.
            DataError: the prompt has another form.
        """
        writing = Writing(max_new_tokens, temperature, top_p, beams)
        writer = self.writing(writing)
        examples, single = examples_of(prompt, self.task, self.data)
        if stream:
            return writer.streamed(examples, writing)
        with writing.sampling():
            predictions = writer.predict_examples(examples)
        writer.warn_of_cuts(predictions)
        texts = [str(getattr(each, "text", each)) for each in predictions]
        return texts[0] if single else texts

    def writing(self, writing: Writing) -> Predictor:
        """Return the same model with other generation options.

        Raises:
            ConfigError: the task or the model does not generate.
        """
        check_writes(self.task)
        if not self.model.can_generate():
            raise ConfigError(
                f"{self.model.name_or_path} does not generate: it writes one letter for each "
                "piece of audio",
                expected="an encoder-decoder, or a causal language model",
            )
        room = self.setting.positions - 1  # a text begins with at least one token
        if writing.max_new_tokens is not None and writing.max_new_tokens > room:
            raise ConfigError(
                f"max_new_tokens is {writing.max_new_tokens:,}: the model has no room for as many",
                expected=f"at most {room:,}, with the tokens of the prompt",
                hint="--max-new-tokens N, or max_new_tokens=N in Python",
            )
        return replace(self, task=writing.applied(self.task))

    def streamed(self, examples: Sequence[Any], writing: Writing) -> Iterator[str]:
        """Return the pieces of the text for one example while they are generated.

        A warning after the last piece reports how much of the example was cut.

        Raises:
            ConfigError: there are several examples or beams.
        """
        beams = getattr(self.task, "beams", 1)
        if len(examples) != 1 or beams != 1:
            raise ConfigError(
                f"a stream of {len(examples)} prompts with {beams} beams",
                expected="one prompt, and a search with beams=1",
            )
        prompt = not self.model.config.is_encoder_decoder
        predictions: list[Prediction] = []

        def write() -> None:
            predictions.extend(self.predict_examples(examples))

        def pieces() -> Iterator[str]:
            yield from streamed(write, self.tokenizer, writing, prompt=prompt)
            self.warn_of_cuts(predictions)

        return pieces()

    def evaluate(
        self,
        examples: Sequence[Any],
        batch_size: int = 64,
        record: list[Prediction] | None = None,
        places: Sequence[str] = (),
    ) -> dict[str, float]:
        """Compute the task's metrics on labelled examples.

        Args:
            examples: the labelled examples.
            batch_size: the number of rows per batch.
            record: receives one prediction per example, for `errors`.
            places: the names of the examples in errors.

        Raises:
            DataError: the examples have labels that the adapter lacks.
            EmptyInputError: an example has no text for a prediction.
        """
        encoded = self._labelled(examples, batch_size, places)
        return self.task.evaluate(self.model, encoded, batch_size, record)

    def _labelled(self, examples: Sequence[Any], batch_size: int, places: Sequence[str]) -> Encoded:
        """Check and encode labelled examples, and warn about cuts."""
        self.task.check(self.setting.labels, examples)
        predicts = self.task.evaluates_predictions
        if empty := empty_inputs(self.task, examples, self.setting) if predicts else []:
            named = places or [f"example {number}" for number in range(len(examples))]
            raise empty_error(empty, named, len(examples), "correct or delete these rows")
        whole = encode_whole(self.task, examples, self.setting)
        encoded = truncate(whole, self.task, self.setting)
        for lost in lost_tokens(whole, encoded):
            if lost.cut:
                warn_user(lost.sentence("evaluation"))
        for line in self.task.remarks(encoded):
            warn_user(line)
        return with_evaluation_reference(self.model, encoded, batch_size)

    def scored(self, examples: Sequence[Any], places: Sequence[str] = ()) -> EvaluationResult:
        """Evaluate, and keep the errors of the scores and the outcome of each example."""
        return evaluate_rows(self.model, self._labelled(examples, _BATCH, places), _BATCH)

    def scored_off_and_on(
        self, examples: Sequence[Any], places: Sequence[str] = ()
    ) -> tuple[EvaluationResult, EvaluationResult]:
        """Evaluate with the adapter off, and on; the adapters below it apply in both.

        Raises:
            ConfigError: the adapter has the trained head that the task requires.
        """
        self._check_without_adapter()
        rows = self._labelled(examples, _BATCH, places)
        return evaluate_off_and_on(self.model, rows, _BATCH)

    def _check_without_adapter(self) -> None:
        if any(adapter.head for adapter in adapters(self.model).values() if adapter.active):
            raise ConfigError(
                f"the backbone alone has no trained head for {self.task.name}",
                expected="an adapter of a language model, or another task that needs no head",
                hint="adapterhub compare RUN OTHER_RUN, with an adapter of --method head",
            )

    def errors(
        self, metrics: Mapping[str, float], examples: Sequence[Any], record: Sequence[Prediction]
    ) -> dict[str, ScoreError]:
        """Return the errors of an evaluation's metrics, from the predictions that it kept."""
        file = outcomes_of(self.task, examples, record, self.setting.labels, 0)
        return score_errors(metrics, {"": EvaluatedRows(len(examples), file)})


def open_adapter(
    reference: str | Path,
    backbone: str | Path | None = None,
    *,
    registry: str | Path | None = None,
    head: str | None = None,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    max_length: int | None = None,
) -> Predictor:
    """Load an adapter on its backbone, and return an object that predicts.

    Args:
        reference: a published adapter, such as polite@v2, or the folder of an adapter or a run.
        backbone: where to load the backbone from, if not from the id in the manifest; its
            fingerprint must match.
        registry: the registry, if not the user's own.
        head: the head to use, if the adapter has several.
        task: the task, for an adapter without a recorded one.
        dtype: fp32, bf16 or fp16, or a torch dtype; by default the training dtype.
        device: "cuda", 0 or a `torch.device`; by default the fastest one.
        max_length: the longest input, in tokens; by default the positions of the backbone.

    Raises:
        ConfigError: the reference is malformed or names a model; the adapter has several heads and
            none is named; the task is missing or belongs to another kind of model; or `max_length`
            is below 1.
        RegistryError: the reference cannot be resolved.
        FileError: the folder does not contain an adapter, or its files are broken.
        BackboneError: the backbone cannot be loaded.
        MismatchError: the adapter belongs to another backbone or tokenizer.
    """
    if isinstance(reference, torch.nn.Module):
        raise ConfigError(
            f"{type(reference).__name__} is a loaded model, and not the name of an adapter",
            expected="a published adapter, or the folder of an adapter or a run",
            hint='ah.open("runs/x"), which loads the backbone; or ah.load(model, "runs/x")',
        )
    backbone = None if backbone is None else os.fspath(backbone)
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length is {max_length}", expected="1 or more tokens")
    saved = pull_verified(reference, registry=registry).own()
    record = training_record(with_head(saved.manifest, head), task)
    model, tokenizer = load_bare_backbone(
        saved, backbone, dtype_name(dtype), head=head, task=task, device=device
    )
    make_ready(model, move=device is None)
    adapter = load_folder(model, saved, head=head or True)
    return predictor_of(model, adapter.labels, tokenizer, record, [adapter], max_length)


def predictor_of(
    model: Any,
    labels: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    record: TrainingRecord,
    adapters: Sequence[Adapter] = (),
    max_length: int | None = None,
) -> Predictor:
    """Return the predictor of a loaded adapter, whose head has these labels.

    `adapters` are the active ones: the loaded adapter, in the parts that it was attached in. None
    as the longest input means `read_length`.
    """
    # The parts of a pipeline are the model; the pipeline is the processor.
    model = Backbone.of(model).module
    positions = text_positions(model, adapters)
    length = max_length or read_length(record, positions)
    if record.task.cuts_as_trained and not max_length:
        length = min(length, vector_length(model, tokenizer))
    limit = min(length, positions)
    setting = Setting(tokenizer, limit, labels, record.seed, positions, windows=True)
    return Predictor(model, record.task.for_model(model), setting, record.data)


def read_length(record: TrainingRecord, positions: int) -> int:
    """Return the longest input of a prediction: the number of positions of the backbone.

    Training may have cut texts to fewer tokens. For backbones without a number of positions, such
    as T5 and Mamba, it is the training length, but not less than `LONGEST_UNRECORDED`. A context
    that contains an answer is read in windows of the training length.
    """
    if record.task.keeps_length:
        return record.max_length
    return positions if positions < UNLIMITED else max(record.max_length, LONGEST_UNRECORDED)


def open_backbone(backbone: str, task: Task, max_length: int = LONGEST_UNRECORDED) -> Predictor:
    """Open a pre-trained backbone without an adapter, as a baseline.

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
    inside: Any = Backbone.of(model).module
    reads = vector_length(inside, tokenizer) if task.cuts_as_trained else max_positions(inside)
    limit = min(max_length, reads)
    setting = Setting(tokenizer, limit, positions=max_positions(inside), windows=True)
    return Predictor(inside, task.for_model(inside), setting)


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

    With a `dtype`, the backbone is not quantized, and bf16 becomes fp32 on a processor that is slow
    in bf16; None quantizes it as in training.

    Raises:
        ConfigError: the adapter has several heads and none is named, the named head does not exist,
            or the task is missing or belongs to another kind of model.
        MergeError: `dtype` is None, but the backbone was not quantized in training.
        FileError: the folder does not contain an adapter, or its files are broken.
        BackboneError: the backbone cannot be loaded.
        MismatchError: the adapter belongs to another backbone or tokenizer.
    """
    saved = pull_verified(folder, registry=registry).own()
    quantize = None if dtype else saved.manifest.backbone.quantization
    if dtype is None and quantize is None:
        raise MergeError(
            f"{folder} was trained on a backbone that is not quantized: there is nothing to "
            "quantize again",
            hint="adapterhub merge without --requantize",
        )
    computed = dtype and without_slow_bf16(dtype)
    model, tokenizer = load_bare_backbone(saved, backbone, computed, quantize, head, task)
    return load_folder(model, saved, name=name, head=head or True), tokenizer


def load_bare_backbone(
    saved: Saved,
    backbone: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    head: str | None = None,
    task: str | None = None,
    kind: str | None = None,
    device: str | int | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an adapter's backbone for its task, without the adapter, and its tokenizer.

    A quantized checkpoint is decoded into `dtype` if possible. None loads the weights in the dtype
    and quantization of the training recipe, or in fp32 on a processor that is several times slower
    in bf16. `quantize` replaces the recipe's value, and `kind` the kind of model.

    Raises:
        ConfigError: the adapter has several heads and none is named, or the named head does not
            exist.
        BackboneError: the backbone cannot be loaded.
    """
    manifest = with_head(saved.manifest, head)
    location, revision = backbone_of_adapter(saved.folder, manifest, backbone)
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
            task=kind or training_record(manifest, task).kind,
            labels=manifest.labels,
            revision=revision,
            dtype=dtype or trained,
            quantize=quantize or recipe.get("quantize"),
            device=device,
        )


@dataclass(frozen=True)
class AdapterSource:
    """The adapter to open, by reference or folder, with one of its heads.

    `digest` is the required sha256 of its manifest, "" for any. `task` is for an adapter without a
    recorded task.
    """

    reference: str
    head: str | None = None
    digest: str = ""
    task: str | None = None


@dataclass(frozen=True)
class PulledAdapter:
    """An adapter with local, verified files, and the requirements for its model.

    Attributes:
        source: the requested adapter.
        fetched: its folder, and the adapters that it was trained on.
        manifest: the adapter's manifest, with the chosen head alone.
        record: its training record.
        location: the folder or Hub id of its backbone, and its revision.
    """

    source: AdapterSource
    fetched: Fetched
    manifest: Manifest
    record: TrainingRecord
    location: tuple[str, str | None]

    @property
    def digest(self) -> str:
        """The sha256 of its manifest."""
        return self.fetched.own().digest

    @property
    def reference(self) -> str:
        """The requested reference, with the version that it resolved to."""
        return str(self.fetched.reference or self.source.reference)

    @property
    def needs_own_model(self) -> str:
        """The reason why other adapters cannot share its model; "" if they can.

        Tokens, rows of sites and adapters below belong to one model.
        """
        if self.manifest.tokens:
            return "it has new tokens"
        if self.fetched.own().on:
            return "it is on top of other adapters"
        return "it has a row of sites of its own" if FAMILY in self.manifest.training else ""

    @property
    def model_class(self) -> tuple[Hashable, ...]:
        """The requirements for its model in addition to the backbone: class, pooling, weights."""
        return TASK_MODELS[self.record.kind].auto, self.record.task.pooling, *self.stored_form

    @property
    def stored_form(self) -> tuple[Any, Any]:
        """The dtype and the quantization of its backbone."""
        recipe = self.manifest.training.get("recipe", {})
        return recipe.get("dtype"), recipe.get("quantize")

    def load_model(
        self,
        backbone: str | None = None,
        kind: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load its backbone, ready to compute, and the tokenizer.

        `backbone` replaces the location in the manifest; `kind` replaces the adapter's kind of
        model; `dtype` and `quantize` replace the values of its training.
        """
        model, tokenizer = load_bare_backbone(
            self.fetched.own(),
            backbone,
            dtype,
            quantize,
            head=self.source.head,
            task=self.source.task,
            kind=kind,
        )
        make_ready(model)
        return model, tokenizer

    def attach_to(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        head: bool = True,
        modules: bool = True,
        any_backbone: bool = False,
    ) -> Adapter:
        """Attach the adapter under a name; leave out its head or its modules if these are False."""
        return load_folder(
            model,
            self.fetched.own(),
            name=name,
            any_backbone=any_backbone,
            head=head and (self.source.head or True),
            modules=modules,
        )


def read_source(
    source: AdapterSource,
    backbone: str | None = None,
    registry: str | Path | None = None,
    *,
    signed: bool = False,
    refuse_yanked: bool = False,
    among: str | None = None,
) -> PulledAdapter:
    """Pull an adapter, verify it, and read its requirements; do not load a model.

    With `refuse_yanked`, a yanked version is an error. `among` is the id or fingerprint of a
    backbone, which selects the adapter if several have the same name.

    Raises:
        ConfigError: it has several heads and none is named, or no task.
        MismatchError: the digest of the adapter differs from the required one.
        RegistryError: the reference cannot be resolved.
        FileError: its files are broken.
        SignatureError: a signature is required, and none is by a trusted key.
    """
    fetched = pull_verified(
        source.reference,
        backbone=among,
        registry=registry,
        signed=signed,
        refuse_yanked=refuse_yanked,
    )
    saved = fetched.own()
    if source.digest and saved.digest != source.digest:
        raise MismatchError(
            f"{source.reference} is another adapter here than where the job was started",
            expected="the same version in the registry, or folder, of every machine",
            hint="a reference with a version, such as sst2@v3",
        )
    manifest = with_head(saved.manifest, source.head)
    record = training_record(manifest, source.task)
    location = backbone_of_adapter(saved.folder, manifest, backbone)
    return PulledAdapter(source, fetched, manifest, record, location)


@dataclass(frozen=True)
class OpenedAdapters:
    """Adapters that are ready to predict, by name; `attached` are their names on their models."""

    predictors: Mapping[str, Predictor]
    attached: Mapping[str, str]

    def predict(
        self, name: str, examples: Sequence[Any], batch_size: int = 64, **empty: Any
    ) -> list[Prediction]:
        """Return one prediction per example; `empty` are the options of `predict_examples`."""
        activate(self.predictors[name].model, self.attached[name])
        return self.predictors[name].predict_examples(examples, batch_size, **empty)


def open_several(
    sources: Mapping[str, AdapterSource],
    backbone: str | None = None,
    registry: str | None = None,
    max_length: int | None = None,
) -> OpenedAdapters:
    """Load adapters; those with the same backbone, class of model and tokenizer share one model.

    Raises:
        MismatchError: an adapter's digest differs from the required one, or its backbone differs.
        RegistryError: a reference cannot be resolved.
        FileError: the files of an adapter are broken.
        BackboneError: a backbone cannot be loaded.
    """
    loaded: dict[Hashable, tuple[Any, Any]] = {}
    predictors: dict[str, Predictor] = {}
    attached: dict[str, str] = {}
    for number, (name, source) in enumerate(sources.items()):
        pulled = read_source(source, backbone, registry)
        alone = number if pulled.needs_own_model else None
        key = (pulled.location, pulled.model_class, alone)
        if key not in loaded:
            loaded[key] = pulled.load_model(backbone)
        model, tokenizer = loaded[key]
        adapter = pulled.attach_to(model, f"adapter-{number}")
        predictors[name] = predictor_of(
            model, adapter.labels, tokenizer, pulled.record, [adapter], max_length
        )
        attached[name] = adapter.name
    return OpenedAdapters(predictors, attached)
