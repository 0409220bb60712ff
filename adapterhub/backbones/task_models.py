"""Kinds of task model, each with its transformers class and the outputs of its head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adapterhub.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# transformers is imported where it is used, since pages and commands read the table without it.
PICTURES_WITH_TEXT = "PictureTextProcessor"
CAUSAL_LM = "causal-lm"
TEXT_TO_IMAGE = "text-to-image"
REGRESSION = "regression"
MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True)
class TaskModel:
    """A kind of task model.

    Attributes:
        auto: the name of the transformers auto class.
        outputs: the names of the head's outputs, if they are fixed; "" is a single unnamed number.
        classes: whether the outputs are classes that the user names.
        pools: whether the head reads one vector of each text.
        problem_type: the problem type in transformers; it selects the loss of a new head.
        pooler: whether the pooler of a class is kept, a dense layer after the last token states.
        processor: the name of the class that loads the tokenizer or processor.
        other_auto: the auto class for architectures that `auto` lacks.
        config: options of the configuration, for architectures that have them.
        reads_states: whether the outputs depend only on the token states of one text, so that such
            kinds can share one pass of the backbone.
    """

    auto: str
    outputs: tuple[str, ...] = ()
    classes: bool = False
    pools: bool = False
    problem_type: str = "single_label_classification"
    pooler: bool = True
    processor: str = "AutoTokenizer"
    other_auto: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    reads_states: bool = False

    @property
    def autos(self) -> tuple[str, ...]:
        """The names of the auto classes."""
        return tuple(filter(None, (self.auto, self.other_auto)))

    def auto_name(self, config: type[PreTrainedConfig]) -> str:
        """Return the name of the first auto class that supports a configuration, else the first."""
        fitting = (name for name in self.autos if config in _mapping(name))
        return next(fitting, self.auto)

    def auto_of_type(self, model_type: str) -> str:
        """Return the name of the auto class for a model type, as `auto_name` does."""
        if not self.other_auto:
            return self.auto
        import transformers

        known = model_type in transformers.CONFIG_MAPPING
        return self.auto_name(transformers.CONFIG_MAPPING[model_type]) if known else self.auto

    @property
    def has_head(self) -> bool:
        """Whether the model has a new head, without pre-trained weights."""
        return self.classes or bool(self.outputs)

    def classes_for(self, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
        """List the transformers classes of this kind for a configuration."""
        classes = _mapping(self.auto_name(type(config))).get(type(config), ())
        return classes if isinstance(classes, tuple) else (classes,)

    def init_options(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the constructor options that leave out an unused pooler."""
        if self.pooler:
            return {}
        parameters = inspect.signature(self.classes_for(config)[0].__init__).parameters
        return {name: False for name in ("add_pooling_layer",) if name in parameters}


def _mapping(auto: str) -> Any:
    """Return the classes of an auto class by the class of their configuration."""
    import transformers

    # Pipelines come from diffusers.
    return getattr(getattr(transformers, auto, None), "_model_mapping", {})


TASK_MODELS = {
    "features": TaskModel("AutoModel", reads_states=True),
    "embedding": TaskModel("AutoModel", pooler=False, reads_states=True),
    "classification": TaskModel(
        "AutoModelForSequenceClassification", classes=True, pools=True, reads_states=True
    ),
    "multi-label": TaskModel(
        "AutoModelForSequenceClassification",
        classes=True,
        pools=True,
        problem_type=MULTI_LABEL,
        reads_states=True,
    ),
    "regression": TaskModel(
        "AutoModelForSequenceClassification",
        outputs=("",),
        pools=True,
        problem_type=REGRESSION,
        reads_states=True,
    ),
    "tagging": TaskModel("AutoModelForTokenClassification", classes=True, reads_states=True),
    "question-answering": TaskModel(
        "AutoModelForQuestionAnswering", outputs=("start", "end"), reads_states=True
    ),
    "multiple-choice": TaskModel(
        "AutoModelForMultipleChoice", outputs=("",), pools=True, problem_type=REGRESSION
    ),
    # First: transformers lists the language models of BART and mBART as masked ones too.
    "seq2seq": TaskModel("AutoModelForSeq2SeqLM"),
    "masked-lm": TaskModel("AutoModelForMaskedLM"),
    CAUSAL_LM: TaskModel("AutoModelForCausalLM"),
    "image-classification": TaskModel(
        "AutoModelForImageClassification", classes=True, processor="AutoImageProcessor"
    ),
    "image-text-to-text": TaskModel("AutoModelForImageTextToText", processor=PICTURES_WITH_TEXT),
    TEXT_TO_IMAGE: TaskModel("DiffusionPipeline"),
    "audio-classification": TaskModel(
        "AutoModelForAudioClassification", classes=True, processor="AutoFeatureExtractor"
    ),
    # A sum would depend on the batch size, and a text that is too long would have infinite loss.
    "speech-recognition": TaskModel(
        "AutoModelForCTC",
        other_auto="AutoModelForSpeechSeq2Seq",
        processor="AutoProcessor",
        config={"ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
    ),
}


def task_model(task: str) -> TaskModel:
    """Look up a kind of task model by its name.

    Raises:
        ConfigError: the kind is unknown.
    """
    if task not in TASK_MODELS:
        raise unknown("task", task, TASK_MODELS)
    return TASK_MODELS[task]


def task_kind(model: nn.Module, problem_type: str | None = None) -> str | None:
    """Return the kind of a model, a key of TASK_MODELS, by its class; None for any other class.

    If several kinds have this class, the problem type selects one, by default the model's. Among
    the rest, kinds without a pooler are preferred if the model lacks an optional pooler. Otherwise
    the first kind is used.
    """
    from torch import nn

    from adapterhub.anatomy.backbone import PipelineParts

    if isinstance(model, PipelineParts) or not isinstance(model, nn.Module):
        return TEXT_TO_IMAGE
    config: Any = getattr(model, "config", None)  # of any class, outside transformers
    chosen = problem_type or getattr(config, "problem_type", None)
    kinds = [name for name, row in TASK_MODELS.items() if type(model) in row.classes_for(config)]
    same = [name for name in kinds if TASK_MODELS[name].problem_type == chosen] or kinds
    if getattr(model, "pooler", None) is None:
        same = [name for name in same if TASK_MODELS[name].init_options(config)] or same
    return next(iter(same), None)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the text part of a configuration; in most models, the whole configuration."""
    return model.config.get_text_config(decoder=True)


def label_options(task: str, labels: Sequence[str]) -> dict[str, Any]:
    """Return the configuration options for a head's outputs; `labels` are the user's classes.

    Without labels, the head keeps the checkpoint's labels, or transformers' LABEL_0 and LABEL_1.
    Loaded adapters have their own labels.

    Raises:
        ConfigError: there is only one label, or labels repeat.
    """
    row = task_model(task)
    if row.outputs == ("",):
        return {"num_labels": 1, "problem_type": row.problem_type}
    if not row.has_head:
        return {}
    labels = labels if row.classes else row.outputs
    if not labels:
        return {"problem_type": row.problem_type}
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ConfigError(
            f"{task} needs two or more different labels, got {list(labels)!r}",
            hint=f'load_backbone(..., task="{task}", labels=["no", "yes"])',
        )
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": row.problem_type,
    }
