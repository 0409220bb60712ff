"""One request: an input, encoded as its adapter's task does, and the outputs that are read for it.

A task predicts by calling a model on rows. Here the rows of several requests were computed
together, so each task gets an object that gives back the outputs for its own rows, in place of a
model. What is predicted of them is then what the task predicts anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adapterhub.errors import DataError, ServingError
from adapterhub.inference.inputs import empty_error, empty_inputs, examples_of
from adapterhub.inference.open import Predictor
from adapterhub.serving.batches import RequestSize
from adapterhub.tasks import Encoded
from adapterhub.tasks._lengths import lost_of_each
from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import Row

MASK = "attention_mask"


def read_example(given: Any, predictor: Predictor) -> Any:
    """Return one input as an example of the task.

    Raises:
        DataError: it is of another form, lacks a column or a text, or there are several.
    """
    refuse_half_characters(given)
    examples, single = examples_of(given, predictor.task, predictor.data)
    if not single:
        raise DataError(
            f"a list of {len(examples)} inputs",
            expected="one input for each request: a text, a tuple of texts, or a row",
            hint="submit each of them; they are computed together",
        )
    return examples[0]


def refuse_half_characters(given: Any) -> None:
    """Refuse texts with a part of a character, which no tokenizer takes.

    Raises:
        DataError: there is one.
    """
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text with half a character, U+{ord(given[error.start]):04X}",
                expected="text of whole characters",
            ) from None
    elif isinstance(given, Mapping):
        refuse_half_characters([*given, *given.values()])
    elif isinstance(given, list | tuple):
        for each in given:
            refuse_half_characters(each)


@dataclass(frozen=True)
class EncodedInput:
    """An example, its rows for the task, and for each of these the rows that a model reads.

    `batches` has the inputs of each row of the task, `rows` the same without padding. `virtual` is
    how many tokens the adapter puts in front of each row: with one of 20, all are computed for each
    row of its batch. `lost` is how many tokens were cut.
    """

    example: Any
    encoded: Encoded
    batches: tuple[dict[str, Tensor], ...] = ()
    rows: tuple[tuple[Row, ...], ...] = ()
    virtual: int = 0
    lost: int = 0

    @property
    def size(self) -> RequestSize:
        """How large the request is."""
        if not self.rows:
            lengths = self.encoded.lengths or [1]
            return RequestSize(len(lengths), max(lengths), sum(lengths))
        lengths = [self.virtual + len(row[MASK]) for rows in self.rows for row in rows]
        return RequestSize(len(lengths), max(lengths), sum(lengths))


def encode_input(example: Any, predictor: Predictor) -> EncodedInput:
    """Encode an example for its task alone.

    Raises:
        EmptyInputError: it has no text.
    """
    if empty_inputs(predictor.task, [example], predictor.tokenizer):
        raise empty_error([0], ["the input"], 1)
    encoded = predictor.task.encode([example], predictor.setting, labelled=False)
    return EncodedInput(example, encoded, lost=sum(lost_of_each(encoded)))


def encode_rows(example: Any, predictor: Predictor, virtual: int = 0) -> EncodedInput:
    """Encode an example, and list its rows, for a batch with those of other tasks.

    `virtual` is how many tokens its adapter puts in front of each row.

    Raises:
        DataError: a row has no tokens.
        ServingError: the inputs of the task are not rows of tokens with a mask.
    """
    whole = encode_input(example, predictor)
    batches = tuple(whole.encoded.batch([number]) for number in range(len(whole.encoded.rows)))
    rows = tuple(map(_rows_of, batches))
    if not all(row[MASK] for own in rows for row in own):
        raise DataError(
            "a text without tokens: it is empty, or the tokenizer leaves all of it out",
            expected="a text of one token or more",
        )
    return replace(whole, batches=batches, rows=rows, virtual=virtual)


def _rows_of(batch: Mapping[str, Tensor]) -> tuple[Row, ...]:
    """Return the inputs of a model as rows of different lengths."""
    inputs = model_inputs(batch)
    mask = inputs.get(MASK)
    if mask is None or any(each.shape != mask.shape for each in inputs.values()):
        shapes = [f"{name}: {list(each.shape)}" for name, each in inputs.items()]
        raise ServingError(
            "this input cannot share a batch with others",
            offenders=shapes,
            expected="rows of tokens, with an attention_mask",
        )
    lists = {name: each.tolist() for name, each in inputs.items()}
    kept = [[i for i, real in enumerate(row) if real] for row in lists[MASK]]
    return tuple(
        {name: [values[n][i] for i in places] for name, values in lists.items()}
        for n, places in enumerate(kept)
    )


@dataclass
class RowOutputs:
    """The outputs for the rows of one request, in place of a model that a task calls.

    Attributes:
        fields: the outputs of a batch by name, (rows, ...).
        rows: for each row of the task, the rows of the batch that are its own.
        by_token: the names of outputs whose second dimension is that of tokens.
        left: whether rows are padded on the left.
        asked: the rows that the task has just collated.
    """

    fields: Mapping[str, Tensor]
    rows: Sequence[Sequence[int]]
    by_token: frozenset[str]
    left: bool
    asked: list[int] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def eval(self) -> None:
        """Do nothing: it has been computed."""

    def __call__(self, **inputs: Tensor) -> OutputFields:
        """Return the outputs for the rows that were collated last, as wide as these inputs."""
        own = [row for number in self.asked for row in self.rows[number]]
        width = inputs[MASK].shape[1]
        return OutputFields({name: self._cut(name, own, width) for name in self.fields})

    def _cut(self, name: str, rows: list[int], width: int) -> Tensor:
        whole = self.fields[name]
        first = rows[0]
        consecutive = rows == list(range(first, first + len(rows)))
        own = whole[first : first + len(rows)] if consecutive else whole[rows]
        if name not in self.by_token:
            return own
        return own[:, -width:] if self.left else own[:, :width]


class OutputFields(dict[str, Any]):
    """The outputs of a model, by name or as attributes."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class _ComputedRows(Encoded):
    """Encoded rows that are collated already, and tell the outputs which of them are asked for."""

    batches: tuple[dict[str, Tensor], ...] = ()
    outputs: RowOutputs | None = None

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        assert self.outputs is not None
        self.outputs.asked = list(indices)
        return self.batches[indices[0]] if len(indices) == 1 else super().batch(indices, epoch)


def predict_from(outputs: RowOutputs, request: EncodedInput, predictor: Predictor) -> Any:
    """Return the prediction of a task for the outputs that were computed for a request."""
    given = request.encoded
    parts = (given.task, given.setting, given.examples, given.rows, given.owners)
    computed = _ComputedRows(*parts, batches=request.batches, outputs=outputs)
    model: Any = outputs
    return predictor.task.predict(model, computed, len(given.rows))[0]
