"""Import of checkpoints of `adapters` (AdapterHub), translated for a backbone.

The files do not identify the backbone's weights: the user's model is assumed to be the right one.
Tensors are named by the modules that they belong to:

    bert.encoder.layer.0.output.adapters.NAME.adapter_down.0.weight      a bottleneck adapter
    bert.encoder.layer.0.attention.self.query.loras.NAME.lora_A          LoRA, and (IA)^3 as lora_B
    bert.prefix_tuning.prefix_tunings.NAME.self_prefix.control_trans     prefixes of all layers
    bert.shared_parameters.NAME.phm_rule                                 shared by Compacter's sites
    bert.invertible_adapters.NAME.F.0.weight                             behind the embeddings

The options determine the expected tensors: missing and unexpected ones are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.activations import ACT2FN

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import MismatchError
from adapterhub.files.schema import show
from adapterhub.hooks.head import FIRST, LAST, NO_ACTIVATION
from adapterhub.interchange.adapters_library.files import (
    AdaptersFiles,
    AdaptersHead,
    MethodConfig,
    read_adapters,
    read_options,
)
from adapterhub.interchange.adapters_library.methods import (
    import_adapters_low_rank,
    import_adapters_prefix,
    import_bottleneck,
)
from adapterhub.interchange.adapters_library.module_paths import RemainingTensors
from adapterhub.interchange.adapters_library.states import import_reft
from adapterhub.interchange.translation import HEAD, CheckpointInfo, ImportedAdapter, Translation

# Model types with tests that compare the results with `adapters`. For other types, `adapters` uses
# a generic integration, which applies the last layer's norm to the sum of a block.
SUPPORTED = frozenset(
    ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "gpt2", "llama", "mistral")
) | frozenset(("t5", "mt5", "bart", "mbart"))
_OLD_NAMES = re.compile(
    r"\.(attention_text_task|attention_text_lang|layer_text_task|layer_text_lang)_adapters\."
)
_IMPORTERS: Mapping[str, Callable[[MethodConfig, RemainingTensors, Translation], None]] = {
    "bottleneck": import_bottleneck,
    "prefix_tuning": import_adapters_prefix,
    "lora": import_adapters_low_rank,
    "reft": import_reft,
}


def import_adapters(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """Import the checkpoint of `adapters` in a folder for a backbone.

    Raises:
        FileError: the files are damaged, or have options that are not supported.
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    most = anatomy.most_bytes()
    files = read_adapters(folder, allow_pickle=allow_pickle, head=head, most=most)
    return from_adapters(files, anatomy)


def adapters_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Read the records of a checkpoint of `adapters` about its backbone and its head.

    Raises:
        FileError: a configuration cannot be read.
    """
    config, head = read_options(folder)
    options = head.get("config") if isinstance(head.get("config"), dict) else {}
    name, count = config.get("model_name"), (options or head).get("num_labels", 0)
    return CheckpointInfo(
        backbone=name if isinstance(name, str) and name else None,
        task=head_task(options) if options else None,
        outputs=count if isinstance(count, int) else 0,
    )


def from_adapters(files: AdaptersFiles, anatomy: Anatomy) -> ImportedAdapter:
    """Translate a checkpoint of `adapters` for a backbone.

    Raises:
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    _check_model_type(files, anatomy)
    translation = Translation(anatomy)
    remaining = RemainingTensors(files.name, _with_current_names(files.tensors))
    for part in files.parts:
        _IMPORTERS[part.kind](part, remaining, translation)
    translation.problems += [f"{name}: unexpected tensor" for name in remaining.names()]
    labels: tuple[str, ...] | None = None
    task: str | None = None
    if files.head is not None:
        task, labels = import_head(files.head, files, translation)
    translation.finalize()
    translation.raise_problems(f"the checkpoint {files.name!r} of adapters")
    return ImportedAdapter(
        format="adapters",
        name=files.name,
        methods=tuple(translation.methods),
        tensors=translation.tensors,
        head=translation.head,
        labels=translation.labels if labels is None else labels,
        task=task,
        activation=translation.activation,
        backbone=files.model_name,
        notes=tuple(translation.notes),
    )


def _with_current_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_OLD_NAMES.sub(".adapters.", name): tensor for name, tensor in tensors.items()}


def _check_model_type(files: AdaptersFiles, anatomy: Anatomy) -> None:
    model_type = anatomy.backbone.model_type
    if files.model_type == model_type and model_type in SUPPORTED:
        return
    is_supported = files.model_type in SUPPORTED
    expected: Iterable[str] = [files.model_type] if is_supported else sorted(SUPPORTED)
    raise MismatchError(
        f"the checkpoint {files.name!r} is for a {files.model_type} backbone, not {model_type}",
        expected=f"a model of type {', '.join(expected)}",
        hint="load the backbone that it was trained on"
        if is_supported
        else "other types are not imported: no test compares their outputs",
    )


# Heads: our tasks by their types.
TASKS = {
    "classification": "classification",
    "multilabel_classification": "multi-label",
    "tagging": "tagging",
    "question_answering": "question-answering",
    "seq2seq_lm": "seq2seq",
    "causal_lm": "causal-lm",
}
_CLASSIFIERS = ("classification",)  # including multi-label heads
_ONE_OUTPUT = {"classification": "regression"}
_LANGUAGE_MODELS = ("seq2seq_lm", "causal_lm")
# Tensors that `adapters` stores once for all layers.
_POOL = re.compile(
    r"(?:.+\.)?(?P<rest>(?:prefix_tunings|shared_parameters)\.(?P<adapter>[^.]+)\..+)"
)


@dataclass(frozen=True)
class Form:
    """The head of a model class, in terms of `adapters`.

    A head of `adapters` is a stack of layers (0: dropout, 1: linear, 2: activation, 3: dropout, 4:
    linear) on the first token, the last token, or every token.

    `kind` is its head type; `layers` maps the linear layers' numbers to module paths; `activation`
    is the one between two layers; `pooled` heads read the pooled output. `rescaled`: with tied
    embeddings, the head of `adapters` reads d**-0.5 times the output, and ours the output.
    """

    kind: str
    layers: Mapping[str, str]
    activation: str | None = None
    pooled: bool = False
    bias: bool = True
    rescaled: bool = False

    def fits(self, options: Mapping[str, Any]) -> bool:
        """Return whether a head with these options has this form."""
        return (
            _kind(options) == self.kind
            and options.get("layers") == len(self.layers)
            and (self.activation in (None, options.get("activation_function")))
            and options.get("use_pooler", False) is self.pooled
            and options.get("bias", True) is self.bias
        )


def _dense(head: str, activation: str = "tanh") -> tuple[Form, ...]:
    return (Form("classification", {"1": f"{head}.dense", "4": f"{head}.out_proj"}, activation),)


_ONE = {"1": "classifier"}
_TAGS = (Form("tagging", _ONE),)
_SPAN = (Form("question_answering", {"1": "qa_outputs"}),)
_T5_SPAN = (Form("question_answering", {"1": "qa_outputs"}, rescaled=True),)
_SCORE = (Form("classification", {"1": "score"}, bias=False),)
_POOLED = (
    # The first layer replaces the pooler, which is also a linear layer with tanh.
    Form("classification", {"1": "bert.pooler.dense", "4": "classifier"}, "tanh"),
    Form("classification", _ONE, pooled=True),
)
FORMS: Mapping[str, tuple[Form, ...]] = {
    "BertForSequenceClassification": _POOLED,
    "RobertaForSequenceClassification": _dense("classifier"),
    "XLMRobertaForSequenceClassification": _dense("classifier"),
    "ElectraForSequenceClassification": _dense("classifier", "gelu"),
    "DistilBertForSequenceClassification": (
        Form("classification", {"1": "pre_classifier", "4": "classifier"}, "relu"),
    ),
    "GPT2ForSequenceClassification": _SCORE,
    "LlamaForSequenceClassification": _SCORE,
    "MistralForSequenceClassification": _SCORE,
    "T5ForSequenceClassification": _dense("classification_head"),
    "MT5ForSequenceClassification": _dense("classification_head"),
    "BartForSequenceClassification": _dense("classification_head"),
    "MBartForSequenceClassification": _dense("classification_head"),
    **{
        f"{name}ForTokenClassification": _TAGS
        for name in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "GPT2")
    },
    **{
        f"{name}ForQuestionAnswering": _SPAN
        for name in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "GPT2", "Llama")
    },
    **{f"{name}ForQuestionAnswering": _SPAN for name in ("Mistral", "Bart", "MBart")},
    **{f"{name}ForQuestionAnswering": _T5_SPAN for name in ("T5", "MT5")},
    **{
        f"{name}ForTokenClassification": (Form("tagging", {"1": "score"}),)
        for name in ("Llama", "Mistral")
    },
}


def import_head(
    head: AdaptersHead, adapter: AdaptersFiles, translation: Translation
) -> tuple[str | None, tuple[str, ...] | None]:
    """Translate a head; return its task and its labels, None if not recorded."""
    options = head.options
    if not options:
        _import_head_of_class(head, adapter, translation)
        is_language_model = translation.anatomy.backbone.output_embedding is not None
        labels = () if is_language_model else sorted(head.labels, key=head.labels.__getitem__)
        return None, () if is_language_model else tuple(labels) or None
    kind = str(options.get("head_type"))
    if kind in _LANGUAGE_MODELS and options.get("layers") == 1:
        _check_language_model(head, translation)
        return TASKS[kind], ()
    model = translation.anatomy.backbone.pretrained
    forms = FORMS.get(type(model).__name__, ())
    form = next((form for form in forms if form.fits(options)), None)
    if form is None and _import_layers(head, translation):
        return head_task(options), _labels(head)
    if form is None:
        translation.problems.append(_refusal(type(model).__name__, options, model.config))
        return None, None
    tied = form.rescaled and getattr(model.config, "scale_decoder_outputs", False)
    for path, tensor in head.tensors.items():
        number, _, parameter = path.partition(".")
        if number in form.layers:
            factor = model.config.hidden_size**-0.5 if tied and parameter == "weight" else 1.0
            translation.values[f"{form.layers[number]}.{parameter}"] = tensor.float() * factor
        else:
            translation.problems.append(f"heads: unexpected tensor {path}")
    return head_task(options), _labels(head)


def _kind(options: Mapping[str, Any]) -> str:
    """Return the type of a head; a multi-label head has the layers of a classifier."""
    return str(options.get("head_type")).removeprefix("multilabel_")


def _import_layers(head: AdaptersHead, translation: Translation) -> bool:
    """Translate a head whose layers replace the head of the model's class.

    Returns whether this is possible: BERT has a pooler in front of its head, which a pooled head
    reads.
    """
    model, options = translation.anatomy.model, head.options
    forms = [f for f in FORMS.get(type(model).__name__, ()) if f.kind == _kind(options)]
    count, activation = options.get("layers"), options.get("activation_function")
    known = count == 1 or (count == 2 and activation in ACT2FN)
    if (
        not known
        or not forms
        or options.get("use_pooler", False)
        or _kind(options) not in _CLASSIFIERS
        or any(form.pooled for form in forms)
    ):
        return False
    names = {"1": LAST} if count == 1 else {"1": FIRST, "4": LAST}
    module = list(translation.anatomy.head())[-1]
    translation.head, translation.activation = True, NO_ACTIVATION if count == 1 else activation
    for path, tensor in head.tensors.items():
        number, _, parameter = path.partition(".")
        if number in names and parameter in ("weight", "bias"):
            name = f"{module}.{names[number]}.{parameter}"
            translation.tensors[f"{HEAD}.{name}"] = tensor.detach().to(torch.float32)
        else:
            translation.problems.append(f"heads: unexpected tensor {path}")
    weights = [f"{number}.weight" for number in names]
    translation.problems += [f"heads: {w} is missing" for w in weights if w not in head.tensors]
    return True


def _import_head_of_class(
    head: AdaptersHead, adapter: AdaptersFiles, translation: Translation
) -> None:
    """Translate the head of a transformers class, which has its parameter names.

    The files contain everything outside the base model: also an output layer that is tied to the
    embedding, buffers, and the pools of prefixes, which the adapter's own file has too.
    """
    model = translation.anatomy.model
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    uses = Counter(map(id, named.values()))
    for path, tensor in head.tensors.items():
        value = tensor.float()
        if (pool := _POOL.fullmatch(path)) is not None:
            if pool["adapter"] == adapter.name and not _is_in(adapter, pool["rest"], tensor):
                translation.problems.append(f"heads: {path} differs from the adapter's own file")
        elif path in buffers:
            if not torch.equal(buffers[path].detach().float().cpu(), value):
                translation.problems.append(f"heads: {path} differs from this model's, a constant")
        elif path in named and uses[id(named[path])] > 1:
            if not torch.equal(named[path].detach().float().cpu(), value):
                translation.problems.append(
                    f"heads: {path} is tied to the embedding in this model, and differs from it; "
                    "head=False imports the adapter without it"
                )
        else:
            translation.values[path] = value


def _is_in(adapter: AdaptersFiles, name: str, tensor: Tensor) -> bool:
    """Return whether the adapter's own file has a tensor, at any of its copies."""
    copies = [t for n, t in adapter.tensors.items() if n.endswith(name)]
    return any(torch.equal(copy, tensor) for copy in copies)


def _check_language_model(head: AdaptersHead, translation: Translation) -> None:
    """Check that the head is the backbone's output layer, so it need not be imported."""
    output: Any = translation.anatomy.backbone.output_embedding
    weight: Tensor = output.weight.detach().float().cpu() if output is not None else torch.empty(0)
    is_output = head.tensors.keys() == {"0.weight"} and torch.equal(
        head.tensors["0.weight"].float(), weight
    )
    if not is_output:
        translation.problems.append(
            f"heads: a {show(head.options.get('head_type'))} head other than the backbone's output "
            "layer is not supported; head=False imports the adapter without it"
        )


def _refusal(name: str, options: Mapping[str, Any], config: object) -> str:
    """Describe an unsupported head, and the task whose model has such a head, if any."""
    keys = ("head_type", "layers", "activation_function", "use_pooler", "bias")
    description = ", ".join(f"{key} {show(options[key])}" for key in keys if key in options)
    task = TASKS.get(str(options.get("head_type")))
    classes = getattr(transformers, TASK_MODELS[task].auto)._model_mapping if task else {}
    task_class = classes[type(config)].__name__ if type(config) in classes else ""
    fits = task_class != name and any(form.fits(options) for form in FORMS.get(task_class, ()))
    hint = f"load_backbone(..., task={task!r}) has such a head, or " if fits else ""
    return f"heads: {description}: not the head of {name}; {hint}head=False imports without it"


def head_task(options: Mapping[str, Any]) -> str | None:
    """Return the task of a head with these options, None if unknown."""
    kind = str(options.get("head_type"))
    return (_ONE_OUTPUT if options.get("num_labels") == 1 else {}).get(kind, TASKS.get(kind))


def _labels(head: AdaptersHead) -> tuple[str, ...] | None:
    """Return the names of the classes; None to use the model's."""
    count = head.options.get("num_labels")
    if head.options.get("head_type") == "question_answering" or not isinstance(count, int):
        return None
    names = {number: name for name, number in head.labels.items()}
    return () if count == 1 else tuple(names.get(i, f"LABEL_{i}") for i in range(count))
