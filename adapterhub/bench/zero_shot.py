"""What the bare language model predicts by a plain prompt: a baseline without any training.

A prompt has the texts, and then the names of the labels; the label whose name is the most probable
continuation is predicted. There is one for classes with names, where the checkpoint of the backbone
is that of a language model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.load import load_backbone, quiet_loading
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.backbones.trained_length import max_positions
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.label_scores import LabelScorer
from adapterhub.bench.prompted_rows import (
    ZERO_SHOT_NAME,
    PromptedRows,
    read_prompted,
    write_prompted,
)
from adapterhub.data.examples import Example
from adapterhub.errors import AdapterhubError
from adapterhub.status import doing
from adapterhub.tasks.classification import Classification
from adapterhub.training.loading import make_ready

PROMPT = "{texts}\nOne of {labels}:"
MOST_TOKENS = {"cpu": 500_000}  # of all prompts of a task; elsewhere:
MOST = 20_000_000
LENGTH = 512  # of a prompt, at most
LEAST = 16  # tokens that the names of the labels leave for the texts
_NUMBER = re.compile(r"[-+]?[\d.,]+")


def language_model_of(backbone: str, revision: str | None = None) -> str | None:
    """Return the kind of language model that a checkpoint is of, by its configuration, or None.

    Args:
        backbone: a folder or a Hub id.
        revision: a branch, tag or commit on the Hub.
    """
    folder, _ = find_backbone(backbone, revision)
    with quiet_loading():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    made = set(getattr(config, "architectures", None) or ())
    for kind in ("seq2seq", "masked-lm", "causal-lm"):  # BART is listed as a masked one too
        if made & {each.__name__ for each in TASK_MODELS[kind].classes_for(config)}:
            return kind
    return None


def prompt_of(texts: Sequence[str], labels: Sequence[str]) -> str:
    """Return the prompt for some texts.

    Args:
        texts: a text, or a pair.
        labels: the names of the labels.
    """
    return PROMPT.format(texts="\n".join(texts), labels=", ".join(labels))


def predict_by_prompt(context: TaskContext) -> PromptedRows | None:
    """Predict the test rows of a task by a prompt; None where nothing can be.

    Args:
        context: the task.
    """
    recipe, data = context.recipe, context.data
    labels = tuple(data.run.labels)
    if not isinstance(data.run.task, Classification) or not data.test:
        return None
    if all(_NUMBER.fullmatch(label) for label in labels):  # their names say nothing
        return None
    kind = language_model_of(recipe.backbone, recipe.revision)
    if kind is None:
        return None
    try:
        model, tokenizer = load_backbone(
            recipe.backbone,
            task=kind,
            revision=recipe.revision,
            dtype=recipe.dtype,
            quantize=recipe.quantize,
            attention=recipe.attention,
        )
    except AdapterhubError:
        return None
    make_ready(model)
    most = min(LENGTH, tokenizer.model_max_length, max_positions(model))
    scorer = LabelScorer(model.eval(), tokenizer, kind, labels, most)
    return _predicted(context, scorer, data.test, labels)


def _predicted(
    context: TaskContext, scorer: LabelScorer, test: Sequence[Example], labels: Sequence[str]
) -> PromptedRows:
    key = prompt_key(context)
    texts = [[t for t in (e.text, e.pair) if t is not None] for e in test]
    room = scorer.room(prompt_of([""] * len(texts[0]), labels))
    if not scorer.possible or room < LEAST:
        return PromptedRows(key)
    prompts = [prompt_of(scorer.cut(each, room), labels) for each in texts]
    count = scorer.passes * sum(len(scorer.tokenizer(p)["input_ids"]) for p in prompts)
    limit = MOST_TOKENS.get(scorer.model.device.type, MOST)
    if count > limit:
        note = f"{ZERO_SHOT_NAME}: left out, its prompts have {count:,} tokens, more than {limit:,}"
        return PromptedRows(key, note=note)
    with doing("predicting by a prompt"):
        scores = scorer.scores(prompts)
    columns: dict[str, list[Any]] = {"label": [], "prediction": [], "score": []}
    for example, row in zip(test, scores, strict=True):
        best = max(range(len(labels)), key=row.__getitem__)
        total = sum(math.exp(value - row[best]) for value in row)
        columns["label"].append(str(example.label))
        columns["prediction"].append(labels[best])
        columns["score"].append(float(f"{1 / total:.5g}"))
    return PromptedRows(key, columns)


def prompt_key(context: TaskContext) -> str:
    """Return the digest of what the predictions of a task by a prompt depend on."""
    recipe = context.recipe
    kernels = [recipe.dtype, recipe.attention, recipe.quantize]
    facts = [PROMPT, LENGTH, context.backbone, context.data.digests, kernels]
    facts.append(list(context.data.run.labels))
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def predict_tasks(contexts: Mapping[str, TaskContext], folder: Path) -> list[str]:
    """Predict the test rows of each task by a prompt, once, and keep that; return notes.

    Args:
        contexts: the tasks.
        folder: the folder of the study.
    """
    known = read_prompted(folder)
    found: dict[str, PromptedRows] = {}
    for name, context in contexts.items():
        kept = known.get(name)
        mine = kept if kept and kept.key == prompt_key(context) else predict_by_prompt(context)
        found |= {name: mine} if mine else {}
    if found and found != known:
        write_prompted(folder, found)
    return [f"{name}: {rows.note}" for name, rows in found.items() if rows.note]
