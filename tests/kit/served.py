"""Small adapters of several tasks and methods on one backbone, for the tests of serving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.inference.inputs import examples_of
from adapterhub.inference.open import open_adapter
from adapterhub.serving import Engine
from tests.kit import tiny_models

TEXTS = (
    "the movie was good",
    "a plot",
    "the film is very very dull",
    "the actor was awful and the end was great",
    "fine",
    "a scene is bad a scene is bad a scene is bad a scene is bad",
)
CONTEXT = "the movie was very good and the end was poor"


@dataclass(frozen=True)
class TaskExample:
    """A task, the model that it needs, inputs, and the column of a second text."""

    task: str
    kind: str
    labels: tuple[str, ...] = ()
    inputs: tuple[Any, ...] = TEXTS
    pair: str | None = None


@contextmanager
def busy(engine: Engine) -> Iterator[threading.Event]:
    """Keep the compute thread busy until the event is set, or the block ends."""
    begun, free = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        free.wait(30)

    engine._between_batches(wait)
    assert begun.wait(30)
    try:
        yield free
    finally:
        free.set()


EXAMPLES = (
    TaskExample("classification", "classification", ("neg", "pos")),
    TaskExample("classification", "classification", ("a", "b", "c", "d", "e")),
    TaskExample("multi-label", "multi-label", ("good", "strong", "long")),
    TaskExample("regression", "regression"),
    TaskExample(
        "reranking", "regression", (), (("good film", CONTEXT), ("a plot", "a movie")), "pair"
    ),
    TaskExample("tagging", "tagging", ("O", "B-x", "I-x")),
    TaskExample("question-answering", "question-answering", (), (("the end was", CONTEXT),)),
    TaskExample("embedding", "embedding", (), (*TEXTS, (TEXTS[0], TEXTS[2]))),
)


def write_adapter(
    backbone: Path,
    folder: Path,
    method: str = "lora(rank=2)",
    example: TaskExample = EXAMPLES[0],
    seed: int = 1,
    **options: Any,
) -> str:
    """Save an adapter with random values; return its folder."""
    model, _ = load_backbone(str(backbone), task=example.kind, labels=example.labels)
    adapter = ah.attach(model, method, name="served", **options)
    tiny_models.scramble(adapter, seed=seed)
    recipe = {"task": example.task, "data": {"pair": example.pair}}
    adapter.metadata.training = {"recipe": recipe}
    adapter.save(folder)
    return str(folder)


def expected_answers(folder: str, inputs: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return what `predict --json` prints for each input alone."""
    opened = open_adapter(folder)
    found = []
    for given in inputs:
        (example,), _ = examples_of(given, opened.task, opened.data)
        found.append(opened.task.printed(example, opened.predict(given)))
    return found


def same_answer(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    """Return whether two answers are equal, but for the last digits of their numbers."""
    if isinstance(one, float):
        return abs(one - other) <= tolerance
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_answer(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_answer, one, other))
    return bool(one == other)
