"""One head of an adapter that has several: with it alone, the adapter is like any other.

heads.rte.classifier.weight   the tensor in the file
head.classifier.weight        its name in the adapter with the head `rte` alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapterhub.errors import ConfigError, did_you_mean
from adapterhub.files.manifest import Manifest
from adapterhub.files.scores import ERRORS, TEST

_MOST_LABELS = 10  # of a head, in its description
ONE_HEAD, SEVERAL_HEADS = "head.", "heads."


def with_head(manifest: Manifest, head: str | None) -> Manifest:
    """Return the manifest of the adapter with one of its heads alone.

    Its tensors have the names that they have with one head; `name_in_file` returns those in the
    file. Without several heads, the manifest stays as it is.

    `head` is None if the adapter has one at most.

    Raises:
        ConfigError: the adapter has several heads and none is named, or it has not this one.
    """
    if head is None and not manifest.heads:
        return manifest
    if head is None or head not in manifest.heads:
        raise _no_head(manifest, head)
    record, prefix = manifest.heads[head], f"{SEVERAL_HEADS}{head}."
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(SEVERAL_HEADS)}
    of_head = {n: t for n, t in manifest.tensors.items() if n.startswith(prefix)}
    tensors |= {f"{ONE_HEAD}{n.removeprefix(prefix)}": t for n, t in of_head.items()}
    return replace(
        manifest,
        name=f"{manifest.name}-{head}",
        task=record.task,
        labels=record.labels,
        head=record.head,
        heads={},
        tensors=tensors,
        training=_training_of(manifest.training, head),
        metrics=_of_head(manifest.metrics, head),
    )


def without_heads(manifest: Manifest) -> Manifest:
    """Return the manifest of the adapter without any head."""
    prefixes = (ONE_HEAD, SEVERAL_HEADS)
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(prefixes)}
    return replace(manifest, head=None, heads={}, labels=(), tensors=tensors)


def only_head(manifest: Manifest) -> Manifest:
    """Return the manifest of the adapter's head alone, with what it reads of the states."""
    tensors = {n: t for n, t in manifest.tensors.items() if n.startswith(ONE_HEAD)}
    return replace(manifest, methods=({"head": {}},), tensors=tensors, tokens=(), on=())


def heads_text(manifest: Manifest) -> str:
    """Describe several heads: `rte (classification: no, yes), sts-b (regression)`."""
    return ", ".join(
        f"{name} ({record.task}{': ' * bool(record.labels)}{_few(record.labels)})"
        for name, record in manifest.heads.items()
    )


def _few(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_LABELS:,} more" if len(labels) > _MOST_LABELS else ""
    return ", ".join(labels[:_MOST_LABELS]) + more


def name_in_file(name: str, head: str | None) -> str:
    """Return the name of a tensor in the file, from that in the adapter with one head alone."""
    if head is None or not name.startswith(ONE_HEAD):
        return name
    return f"{SEVERAL_HEADS}{head}.{name.removeprefix(ONE_HEAD)}"


def _no_head(manifest: Manifest, head: str | None) -> ConfigError:
    names, adapter = list(manifest.heads), repr(manifest.name)
    if not names:
        return ConfigError(
            f"the adapter {adapter} has no heads with names, so none is called {head!r}",
            hint="leave out the name of the head",
        )
    problem = f"the adapter {adapter} has {len(names)} heads: which one?"
    if head is not None:
        problem = f"the adapter {adapter} has no head {head!r}{did_you_mean(head, names)}"
    return ConfigError(
        problem,
        expected=f"one of {', '.join(names)}",
        hint=f'--head {names[0]}; in Python ah.load(..., head="{names[0]}")',
    )


def _training_of(training: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return the training record with the task and the data of one head in their usual place."""
    recipe = training.get("recipe")
    tasks = recipe.get("tasks") if isinstance(recipe, Mapping) else None
    own = tasks.get(head) if isinstance(tasks, Mapping) else None
    errors = training.get(ERRORS)
    if isinstance(errors, Mapping):
        training = {**training, ERRORS: _of_head(errors, head)}
    if not isinstance(recipe, Mapping) or not isinstance(own, Mapping):
        return dict(training)
    rest = {name: value for name, value in recipe.items() if name not in ("tasks", "mixing")}
    return {**training, "recipe": {**rest, "task": own.get("task"), "data": own.get("data") or {}}}


def _of_head(metrics: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return what belongs to the metrics of one head, under their usual names."""
    found = {}
    for name, value in metrics.items():
        tested = TEST if name.startswith(TEST) and head != TEST.rstrip("/") else ""
        own = name.removeprefix(tested)
        if own.startswith(f"{head}/"):
            found[tested + own.removeprefix(f"{head}/")] = value
    return found
