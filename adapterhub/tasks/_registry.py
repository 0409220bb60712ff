"""The registered tasks, and task specs.

A task spec has the same syntax as a method spec: `seq2seq`, `seq2seq(metric=rouge)`,
`{seq2seq: {metric: rouge}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from adapterhub.config.options import OptionNames, from_dict, is_neutral, to_dict
from adapterhub.config.spec import parse_calls, spec_error
from adapterhub.errors import unknown
from adapterhub.tasks._base import Task

SPEC_EXAMPLES = "classification, seq2seq(metric=rouge) or {seq2seq: {metric: rouge}}"

TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def register_task(cls: T) -> T:
    """Register a task under its name."""
    TASKS[cls.name] = cls
    return cls


def task_class(name: str) -> type[Task]:
    """Return the task registered under a name or an alias.

    Raises:
        ConfigError: there is none.
    """
    registered, _ = resolve_alias(name)
    if registered not in TASKS:
        raise unknown(
            "task",
            name,
            [*TASKS, *ALIASES],
            expected=f"one of {', '.join(sorted(TASKS))}",
            hint="adapterhub tasks",
        )
    return TASKS[registered]


def parse_task(spec: object) -> Task:
    """Build a task from its spec: a name or alias, one with options, or {name: options}.

    Raises:
        ConfigError: the task or an option is unknown, or the spec is not of one task.
    """
    if isinstance(spec, Task):
        return spec
    parsed = parse_calls(spec, "task", SPEC_EXAMPLES) if isinstance(spec, str) else spec
    pairs = list(parsed.items()) if isinstance(parsed, Mapping) else parsed
    if not isinstance(pairs, list) or len(pairs) != 1 or not _is_named_options(pairs[0]):
        raise spec_error(spec, "task", SPEC_EXAMPLES)
    ((name, options),) = pairs
    cls, (_, implied) = task_class(name), resolve_alias(name)
    given = OptionNames(cls, {}, {}).normal_form(options or {})
    return from_dict(cls, {**implied, **given}, where=cls.name)


def _is_named_options(pair: object) -> bool:
    if not isinstance(pair, tuple) or not isinstance(pair[0], str):
        return False
    return pair[1] is None or isinstance(pair[1], Mapping)


def dump_task(task: Task) -> str | dict[str, Any]:
    """Return the normal form of a task: {name: all options}, or its name if none has an effect."""
    options = to_dict(task)
    neutral = all(is_neutral(value) for value in options.values()) and task == type(task)()
    return task.name if neutral else {task.name: options}


_OTHER_NAMES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "text-classification sequence-classification seq-cls sentiment nli "
        "sentiment-analysis single-label multi-class paraphrase",
        "classification",
        {},
    ),
    ("multilabel multi-label-classification multilabel-classification", "multi-label", {}),
    ("sts sentence-similarity text-regression", "regression", {}),
    ("image-cls picture-classification vision-classification", "image-classification", {}),
    (
        "vqa visual-question-answering image-to-text image-captioning captioning",
        "image-text-to-text",
        {},
    ),
    (
        "audio-cls sound-classification speech-classification keyword-spotting",
        "audio-classification",
        {},
    ),
    ("asr automatic-speech-recognition speech-to-text transcription ctc", "speech-recognition", {}),
    ("ner token-classification token-cls", "tagging", {}),
    (
        "qa squad extractive-qa extractive-question-answering question-answer",
        "question-answering",
        {},
    ),
    ("summarization summarisation", "seq2seq", {"metric": "rouge"}),
    ("translation", "seq2seq", {"metric": "bleu"}),
    ("text2text-generation text2text seq2seq-lm", "seq2seq", {}),
    ("sft clm text-generation language-modeling instruction-tuning", "causal-lm", {}),
    ("chat conversational", "causal-lm", {"data": "chat"}),
    ("mlm fill-mask masked-language-modeling", "masked-lm", {}),
    ("sentence-embedding embeddings feature-extraction retrieval", "embedding", {}),
    ("reward-model reward-modeling", "reward", {}),
    ("dpo", "preference", {"loss_type": "dpo"}),
    ("ipo", "preference", {"loss_type": "ipo"}),
    ("orpo", "preference", {"loss_type": "orpo"}),
    ("reranker rerank cross-encoder text-ranking", "reranking", {}),
    ("mcq mcqa multi-choice", "multiple-choice", {}),
    ("zero-shot-classification zero-shot few-shot pet", "prompted", {}),
)
"""Names in transformers' pipelines and common abbreviations: the task, and options they imply."""

ALIASES = {
    alias: (task, implied) for names, task, implied in _OTHER_NAMES for alias in names.split()
}


def resolve_alias(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the task that a name means, and the options that the name implies."""
    spelled = name.strip().lower().replace("_", "-")
    return ALIASES.get(spelled, (spelled, {}))


def aliases_of(task: str) -> tuple[str, ...]:
    """List the other names of a task."""
    return tuple(alias for alias, (name, _) in ALIASES.items() if name == task)
