"""The maximum length of a run: chosen from the data, with a report of the truncation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from adapterhub.data.text_stream import TextStream
from adapterhub.tasks import Encoded, Setting, Task
from adapterhub.tasks.common.encoding import limit_of
from adapterhub.tasks.common.infer_task import (
    LostTokens,
    encode_whole,
    longest_row,
    lost_tokens,
    truncate,
)
from adapterhub.tasks.common.packing import Windows
from adapterhub.training.run_data import RunData
from adapterhub.training.stream import ExampleStream, stream_rows
from adapterhub.training.task_mixture import MixedRows, TaskRows, TaskSwitch

LEAST = 128  # tokens: prediction may use longer texts, and short rows are not padded to it


@dataclass(frozen=True)
class FittedRows:
    """The encoded examples of a run.

    Attributes:
        max_length: the longest input, in tokens.
        train: the training rows.
        evaluation: the evaluation rows; none without evaluation data.
        test: the test rows; None without test data.
        lost: the loss by truncation in the training rows.
        notes: sentences about the length and the truncation.
    """

    max_length: int
    train: Encoded
    evaluation: Encoded
    lost: tuple[LostTokens, ...]
    notes: tuple[str, ...]
    test: Encoded | None = None


def fit_rows(
    data: RunData, setting: Setting, chosen: int | None, trained: int | None = None
) -> FittedRows:
    """Encode the examples of a run, with a maximum length that is `chosen` or follows the data.

    The `max_length` of the setting is the limit of the backbone; `trained` is the length that it
    was trained with, if it is recorded.
    """
    fitted = _fitted(data, setting, chosen, trained)
    if chosen is None or not data.task.limits(setting):
        return fitted
    reads = limit_of(setting)
    if chosen <= reads or fitted.max_length != reads:
        return fitted
    lowered = f"train.max_length={chosen:,} is lowered to {reads:,}: the backbone reads no more"
    return replace(fitted, notes=(lowered, *fitted.notes))


def _fitted(data: RunData, setting: Setting, chosen: int | None, trained: int | None) -> FittedRows:
    """Encode the examples as in `fit_rows`, up to the backbone's limit of tokens."""
    if isinstance(data.train, ExampleStream):
        return _streamed_rows(data, data.train, setting, chosen)
    if data.streams:
        return _windows(data, setting, chosen)
    parts = {"training": data.train, "evaluation": data.evaluation, "test": data.test}
    whole = {name: encode_whole(data.task, rows, setting) for name, rows in parts.items() if rows}
    if not data.task.limits(setting):
        return _unlimited(data, whole, setting, chosen)
    longest = max(longest_row(rows) for name, rows in whole.items() if name != "test")
    reads = limit_of(setting)
    most = min(reads, data.task.most_tokens)
    if trained is not None and data.task.cuts_as_trained:
        most = min(most, trained)
    length = default_length(most if data.task.packs else longest, most)
    limited = replace(setting, max_length=min(chosen or length, setting.max_length))
    encoded = {name: truncate(rows, data.task, limited) for name, rows in whole.items()}
    lost = {name: lost_tokens(whole[name], encoded[name]) for name in whole}
    notes = [] if chosen else [_choice(length, longest, reads, split=not lost["training"][0].cut)]
    notes += [line for name, parts in lost.items() for line in _losses(name, parts, reads, data)]
    notes += _remarks(data, whole)
    notes += _beyond(trained, min(longest, limited.max_length))
    return FittedRows(
        max_length=min(chosen or length, reads),
        train=encoded["training"],
        evaluation=encoded.get("evaluation", Encoded(data.task, limited, (), [], ())),
        lost=tuple(lost["training"]),
        notes=tuple(notes),
        test=encoded.get("test"),
    )


def _unlimited(
    data: RunData, whole: dict[str, Encoded], setting: Setting, chosen: int | None
) -> FittedRows:
    """Return rows that no option truncates."""
    nothing = Encoded(data.task, setting, (), [], ())
    ignored = f"train.max_length={chosen} has no effect: {data.task.name} has no longest input"
    notes = (ignored,) * (chosen is not None)
    notes += _remarks(data, whole)
    evaluation, test = whole.get("evaluation", nothing), whole.get("test")
    return FittedRows(LEAST, whole["training"], evaluation, (), notes, test)


def _remarks(data: RunData, whole: dict[str, Encoded]) -> tuple[str, ...]:
    """Return the task's remarks on the training and evaluation rows."""
    remarks = [(name, data.task.remarks(rows)) for name, rows in whole.items()]
    return tuple(f"{name}: {line}" for name, lines in remarks for line in lines)


def _windows(data: RunData, setting: Setting, chosen: int | None) -> FittedRows:
    """Cut streamed text into rows of the maximum length."""
    reads = limit_of(setting)
    length = min(chosen or data.task.most_tokens, reads)
    limited = replace(setting, max_length=length)
    train, evaluation, test = (
        data.task.encode_stream(texts, limited)
        if isinstance(texts, TextStream)
        else Encoded(data.task, limited, (), [], ())
        for texts in (data.train, data.evaluation, data.test)
    )
    rows, held = len(train.rows), len(evaluation.rows)
    evaluation, test = (_with_texts(each, setting) for each in (evaluation, test))
    note = f"the text is packed into {rows:,} rows of {length:,} tokens"
    notes = (note + f", and {held:,} to evaluate on" * bool(held),)
    nothing = LostTokens("texts", "train.max_length", length, rows, 0, 0, 0, length)
    return FittedRows(length, train, evaluation, (nothing,), notes, test if test.rows else None)


def _with_texts(windows: Encoded, setting: Setting) -> Encoded:
    """Return the windows of streamed text with their texts as examples."""
    if not isinstance(windows.rows, Windows):
        return windows
    shown = windows.rows.texts(setting.tokenizer)
    return replace(windows, examples=shown, owners=range(len(windows.rows)))


def _streamed_rows(
    data: RunData, stream: ExampleStream, setting: Setting, chosen: int | None
) -> FittedRows:
    """Return rows that are encoded on access, cut to the maximum length."""
    limited, length = setting, LEAST
    if data.task.limits(setting):
        length = min(chosen or data.task.most_tokens, limit_of(setting))
        limited = replace(setting, max_length=length)
    train = stream_rows(stream, data.task, limited)
    evaluation = Encoded(data.task, limited, (), [], ())
    if data.evaluation:
        evaluation = data.task.encode(data.evaluation, limited, labelled=True)
    test = data.task.encode(data.test, limited, labelled=True) if data.test else None
    note = f"train.max_length is {length:,}: longer texts are cut when they are drawn"
    nothing = LostTokens("texts", "train.max_length", length, len(stream), 0, 0, 0, length)
    notes = (note,) * (chosen is None)
    return FittedRows(length, train, evaluation, (nothing,), notes, test)


def default_length(longest: int, most: int) -> int:
    """Return the maximum length for data: a multiple of 8, at least `LEAST`, at most `most`."""
    return min(max(-(-longest // 8) * 8, LEAST), most)


def _choice(length: int, longest: int, reads: int, split: bool) -> str:
    if longest <= length:
        why = f"no text is cut, the longest has {longest:,} tokens"
    else:
        origin = "the backbone reads" if length == reads else "is chosen by default"
        why = f"the most that {origin}; the longest text has {longest:,} tokens"
        why += ", and is split" * split
    return f"train.max_length is {length:,}: {why}"


def _losses(name: str, lost: list[LostTokens], reads: int, data: RunData) -> Iterator[str]:
    for part in lost:
        if part.cut:
            needed = -(-part.longest // 8) * 8
            fitting = f"{part.option}={needed} keeps all"
            if part.option == "train.max_length" and part.limit >= reads:
                fitting = "the backbone reads no more"
            text = f"{part.sentence(name)}; {fitting}"
            yield f"{text}; {data.task.cut_note}" if data.task.cut_note else text


def _beyond(trained: int | None, longest: int) -> list[str]:
    if trained is None or longest <= trained:
        return []
    return [
        f"the backbone was trained on at most {trained} tokens; texts here have up to {longest:,}: "
        f"compare with train.max_length={trained}"
    ]


def mix_rows(rows: Mapping[str, FittedRows], mixture: Task, switch: TaskSwitch) -> FittedRows:
    """Merge the rows of several tasks into the rows of one run."""
    train = {name: each.train for name, each in rows.items()}
    evaluation = {name: each.evaluation for name, each in rows.items() if each.evaluation.rows}
    test = {name: each.test for name, each in rows.items() if each.test}
    first = next(iter(rows.values()))
    return FittedRows(
        max_length=max(each.max_length for each in rows.values()),
        train=_mixed(train, mixture, switch),
        evaluation=_mixed(evaluation, mixture, switch) if evaluation else first.evaluation,
        lost=(replace(first.lost[0], cut=sum(each.lost[0].cut for each in rows.values())),),
        notes=tuple(f"{name}: {note}" for name, each in rows.items() for note in each.notes),
        test=_mixed(test, mixture, switch) if test else None,
    )


def _mixed(rows: Mapping[str, Encoded], mixture: Task, switch: TaskSwitch) -> MixedRows:
    tagged = {
        name: TaskRows(
            **{each.name: getattr(encoded, each.name) for each in fields(Encoded)},
            name=name,
            switch=switch,
        )
        for name, encoded in rows.items()
    }
    return MixedRows(
        mixture,
        next(iter(rows.values())).setting,
        tuple(example for encoded in rows.values() for example in encoded.examples),
        [row for encoded in rows.values() for row in encoded.rows],
        (),
        tagged,
        switch,
    )
