"""Heads of `adapters`, as the heads of models of transformers that compute the same.

Its head is a stack of linear layers (0: dropout, 1: linear, 2: activation, 3: dropout, 4: linear)
on the first token, the last one, or every one. FORMS holds, by the class of our model, where each
layer is in the head that transformers has for the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.files.schema import show
from adapterhub.interchange.adapters_library.files import AdaptersHead
from adapterhub.interchange.adapters_library.places import same
from adapterhub.interchange.translation import Translation

TASKS = {
    "classification": "classification",
    "tagging": "tagging",
    "question_answering": "question-answering",
    "seq2seq_lm": "seq2seq",
    "causal_lm": "causal-lm",
}
_ONE_OUTPUT = {"classification": "regression"}
_LANGUAGE_MODELS = ("seq2seq_lm", "causal_lm")


@dataclass(frozen=True)
class Form:
    """A head of a model class: its kind there, the module of each linear layer by its number, the
    activation between two, and whether it is on the pooled output, and has a bias. `rescaled`:
    where embeddings are tied, it reads d**-0.5 times the output there, and the output here."""

    kind: str
    layers: Mapping[str, str]
    activation: str | None = None
    pooled: bool = False
    bias: bool = True
    rescaled: bool = False

    def fits(self, options: Mapping[str, Any]) -> bool:
        """Whether a head with these options is of this form."""
        return (
            options.get("head_type") == self.kind
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
    # Its first layer stands in for the pooler, which is a linear layer and tanh too.
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
    head: AdaptersHead, draft: Translation
) -> tuple[str | None, tuple[str, ...] | None]:
    """Translate a head: the task, and the labels where they are told."""
    options = head.options
    if not options:  # the head of a class of transformers, by its own names
        draft.values |= {path: t.float() for path, t in head.tensors.items()}
        return None, tuple(sorted(head.labels, key=head.labels.__getitem__)) or None
    kind = str(options.get("head_type"))
    if kind in _LANGUAGE_MODELS and options.get("layers") == 1:
        _language_model(head, draft)
        return TASKS[kind], ()
    name = type(draft.anatomy.model).__name__
    form = next((form for form in FORMS.get(name, ()) if form.fits(options)), None)
    if form is None:
        draft.problems.append(_refusal(name, options, draft.anatomy.model.config))
        return None, None
    config = draft.anatomy.model.config
    tied = form.rescaled and getattr(config, "scale_decoder_outputs", False)
    for path, tensor in head.tensors.items():
        number, _, parameter = path.partition(".")
        if number in form.layers:
            factor = config.hidden_size**-0.5 if tied and parameter == "weight" else 1.0
            draft.values[f"{form.layers[number]}.{parameter}"] = tensor.float() * factor
        else:
            draft.problems.append(f"heads: {path} has no place here")
    return head_task(options), _labels(head)


def _language_model(head: AdaptersHead, draft: Translation) -> None:
    """A tied head is the backbone's own, which every adapter shares: nothing of it is carried."""
    own = draft.anatomy.model.get_output_embeddings()
    weight = own.weight.detach().float().cpu() if own is not None else torch.empty(0)
    if head.tensors.keys() != {"0.weight"} or not same(head.tensors["0.weight"].float(), weight):
        draft.problems.append(
            f"heads: a {show(head.options.get('head_type'))} head that is not the backbone's own "
            "is not expressible; head=False imports the adapter without it"
        )


def _refusal(name: str, options: Mapping[str, Any], config: object) -> str:
    keys = ("head_type", "layers", "activation_function", "use_pooler", "bias")
    asked = ", ".join(f"{key} {show(options[key])}" for key in keys if key in options)
    task = TASKS.get(str(options.get("head_type")))
    other = getattr(transformers, TASK_MODELS[task].auto)._model_mapping if task else {}
    found = other[type(config)].__name__ if type(config) in other else ""
    fits = found != name and any(form.fits(options) for form in FORMS.get(found, ()))
    hint = f"load_backbone(..., task={task!r}) has a place for it, or " if fits else ""
    return f"heads: {asked}: not the head of {name}; {hint}head=False imports without it"


def head_task(options: Mapping[str, Any]) -> str | None:
    """The kind of model that a head with these options is for."""
    kind = str(options.get("head_type"))
    return (_ONE_OUTPUT if options.get("num_labels") == 1 else {}).get(kind, TASKS.get(kind))


def _labels(head: AdaptersHead) -> tuple[str, ...] | None:
    """The names of the classes; None where the model's own serve."""
    count = head.options.get("num_labels")
    if head.options.get("head_type") == "question_answering" or not isinstance(count, int):
        return None
    names = {number: name for name, number in head.labels.items()}
    return () if count == 1 else tuple(names.get(i, f"LABEL_{i}") for i in range(count))
