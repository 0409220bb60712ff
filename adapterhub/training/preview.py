"""The first rows of a run as the model gets them, without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.load import load_processor, meta_model
from adapterhub.backbones.pooling import max_positions, trained_length
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import Encoded, Setting
from adapterhub.tasks._lengths import encode_whole
from adapterhub.tasks._rows import Row
from adapterhub.tasks._show import removed_text
from adapterhub.training.lengths import fit_rows
from adapterhub.training.run_data import read_data
from adapterhub.training.stream_batches import StreamedRows


@dataclass(frozen=True)
class RowPreview:
    """One row: its title, and what it holds by name."""

    title: str
    facts: dict[str, str]


def preview_rows(recipe: Recipe, count: int) -> tuple[list[RowPreview], tuple[str, ...]]:
    """Return the first training rows of a recipe, and the notes that the run begins with.

    Virtual tokens of a method are not in them.

    Raises:
        AdapterhubError: as in a run, up to its first step.
    """
    if recipe.tasks:
        return _preview_tasks(recipe, count)
    data = read_data(recipe)
    names: dict[str, Any] = {"task": data.task.head, "labels": data.labels}
    names |= {"revision": recipe.revision, "family": recipe.family}
    positions = max_positions(meta_model(recipe.backbone, **names))
    head, tokens = data.task.head, recipe.new_tokens
    processor = load_processor(recipe.backbone, head, recipe.revision, tokens)
    setting = Setting(processor, positions, data.labels, recipe.seed, positions)
    folder, _ = find_backbone(recipe.backbone, recipe.revision)
    rows = fit_rows(data, setting, recipe.train.max_length, trained_length(folder))
    train = rows.train.head if isinstance(rows.train, StreamedRows) else rows.train
    return _previews(train, count), (*data.notes, *rows.notes)


def _preview_tasks(recipe: Recipe, count: int) -> tuple[list[RowPreview], tuple[str, ...]]:
    """Return the first rows of each of several tasks, and the notes on each."""
    previews: list[RowPreview] = []
    notes: list[str] = []
    for name in recipe.tasks:
        rows, own = preview_rows(recipe.of_task(name), count)
        previews += [replace(row, title=f"{name}: {row.title}") for row in rows]
        notes += [f"{name}: {note}" for note in own]
    return previews, tuple(notes)


def _previews(encoded: Encoded, count: int) -> list[RowPreview]:
    task, setting = encoded.task, encoded.setting
    indices = range(min(count, len(encoded.rows)))
    rows = [task.vary(encoded.rows[i], setting, (setting.seed, 0, i)) for i in indices]
    previews = []
    for i, row in zip(indices, rows, strict=True):
        facts = {**_texts(encoded, i), **task.show_row(row, setting)}
        if task.limits(setting):
            facts |= {"length": _length(row, rows, encoded), **_cut(encoded, i)}
        previews.append(RowPreview(f"row {i + 1} of {len(encoded.rows):,}", facts))
    return previews


def _length(row: Row, rows: list[Row], encoded: Encoded) -> str:
    """Describe the length of a row, and its padding in a batch of some rows."""
    task, setting = encoded.task, encoded.setting
    length, longest = len(row["input_ids"]), max(task.row_lengths(each)[0] for each in rows)
    side = task.padding_side(setting)
    padding = f"; {longest - length} of padding on the {side} in a batch of these rows"
    return f"{length} tokens{padding * (length < longest)}"


def _texts(encoded: Encoded, index: int) -> dict[str, str]:
    if not encoded.owners:  # packed: a row has several texts
        return {}
    task = encoded.task
    first, *others = task.shown(encoded.examples[encoded.owners[index]])
    further = enumerate(others, start=2)
    named = {task.pair_name or f"{task.input_name} {i}": text for i, text in further}
    return {task.input_name: first, **named}


def _cut(encoded: Encoded, index: int) -> dict[str, str]:
    """Describe what truncation removes from the example of a row."""
    if not encoded.owners:
        return {}
    owner, setting = encoded.owners[index], encoded.setting
    whole = encode_whole(encoded.task, [encoded.examples[owner]], setting)
    windows = [r for o, r in zip(encoded.owners, encoded.rows, strict=True) if o == owner]
    facts = {"windows": f"the text has {len(windows)}"} if len(windows) > 1 else {}
    for name, key in (("cut", "input_ids"), ("cut from the target", "labels")):
        before = [i for row in whole.rows for i in _tokens(row.get(key))]
        after = [i for row in windows for i in _tokens(row.get(key))]
        if len(after) < len(before) and not (key == "labels" and "cut" in facts):
            text = removed_text(before, after, setting.tokenizer)
            facts[name] = f"{len(before) - len(after)} of {len(before)} tokens: {text}"
    return facts


def _tokens(values: object) -> list[int]:
    return [v for v in values if isinstance(v, int)] if isinstance(values, list) else []
