"""Rows of token ids, their batches, a model's outputs for these, and the losses of outputs.

A row is what a task encodes of an example; a batch pads rows of similar length.

The processes of a run may divide the batches: each computes some, and all receive all results.
Process p of N computes the batches p, p + N, ... The batches do not depend on the number of
processes, and neither do the results.

Losses replace the model's own, or compare vectors or responses. The vectors of a batch are (batch,
columns, d): the anchor, its positive and its negatives. `texts` (batch, columns) has a number for
each text, equal for equal texts, and 0 where a row has fewer negatives. All similarities are
cosines. The log probabilities of comparisons are (batch, 2), the chosen response first; each is
summed over the tokens of a response.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from adapterhub.backbones.end_tokens import LEARNED
from adapterhub.status import counting

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


UNLIMITED = 1 << 30  # tokens
IGNORED = -100  # label of the positions that the loss ignores

P = TypeVar("P")

Row = dict[str, Any]
"""The unpadded model inputs for one example: lists of numbers, and `labels` for training."""


@dataclass(frozen=True)
class Setting:
    """The model and run that examples are encoded for.

    Attributes:
        processor: the tokenizer of the backbone, with the adapter's new tokens; or the processor of
            an image or audio backbone.
        max_length: the longest input, in tokens.
        labels: the classes, in the order of the logits.
        seed: the seed of random inputs, such as masks.
        positions: the positions that the model has for a text and its continuation:
            `text_positions`.
        windows: whether long texts are tagged in windows, so that every word gets a tag; training
            truncates them.
    """

    processor: Any
    max_length: int
    labels: tuple[str, ...] = ()
    seed: int = 0
    positions: int = UNLIMITED
    windows: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The processor, or its tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)  # type: ignore[no-any-return]

    @property
    def unlimited(self) -> Setting:
        """Return the same setting for a tokenizer, without a longest input."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.model_max_length = UNLIMITED
        return replace(self, processor=tokenizer, max_length=UNLIMITED, positions=UNLIMITED)


def rows_from_columns(encoded: Mapping[str, Any]) -> list[Row]:
    """Convert the columns that a tokenizer returns into rows."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def pad(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, side: str | None = None
) -> dict[str, Tensor]:
    """Stack rows into tensors: padded lists (batch, tokens), numbers (batch,).

    The default side is the tokenizer's padding side.
    """
    import torch  # slow to import

    fills = {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "labels": IGNORED,
    }
    left = (side or tokenizer.padding_side) == "left"
    batch = {}
    for key, first in (rows[0] if rows else {}).items():
        values = [row[key] for row in rows]
        if isinstance(first, list):
            longest = max(map(len, values))
            gaps = [[fills.get(key, 0)] * (longest - len(value)) for value in values]
            pairs = zip(values, gaps, strict=True)
            values = [gap + value if left else value + gap for value, gap in pairs]
        batch[key] = torch.tensor(values)
    return batch


def limit_of(setting: Setting) -> int:
    """Return the longest input in tokens, from the options and the tokenizer."""
    return min(setting.max_length, setting.tokenizer.model_max_length)


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Truncate a text to a number of tokens."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def without_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text without the tokenizer's end-of-text token."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids


def in_order(by_index: Mapping[int, P]) -> list[P]:
    """List the values of a mapping from 0, 1, ... in the order of the keys."""
    return [by_index[i] for i in range(len(by_index))]


B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True)
class Division:
    """The processes that divide batches.

    Attributes:
        index: the number of this process, from 0.
        count: the number of processes.
        gather: collects a value from each process, in their order; all call it together.
        in_step: whether all must compute the same number of batches, because each batch is computed
            together (sharded parameters).
    """

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    in_step: bool = False

    def compute(self, batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
        """Return the result of each batch, in their order.

        The batches are the same in each process; results are sent to the others.
        """
        own, total, last = list[T](), 0, list[B]()
        for total, batch in enumerate(batches, start=1):
            last = [batch]
            if (total - 1) % self.count == self.index:
                own.append(compute(batch))
        if self.in_step and 0 < total % self.count <= self.index:
            compute(*last)  # others still compute
        every: list[list[T]] = self.gather(own)
        return [every[i % self.count][i // self.count] for i in range(total)]


_DIVISION: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def dividing(division: Division) -> Iterator[None]:
    """Divide all batches computed inside the context."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def results(batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
    """Return the result of each batch, in their order; processes may divide them."""
    division = _DIVISION.get()
    if division is None:
        return [compute(batch) for batch in batches]
    return division.compute(batches, compute)


def in_step() -> bool:
    """Return whether other processes compute their batches in step with this one."""
    division = _DIVISION.get()
    return division is not None and division.in_step


PIXELS = "pixel_values"
"""The input name of images, also of models whose main input is text."""

CPU_TOKENS = 4096
"""Largest padded size of a batch on a CPU, in tokens: larger batches exceed the CPU's caches."""


class Batches(Protocol):
    """Encoded rows that are combined into batches."""

    @property
    def lengths(self) -> list[int]:
        """The size of each row, in tokens."""

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the model inputs for some rows."""


@dataclass(frozen=True)
class Passed:
    """A processed batch: the indices of its rows, the inputs, and the model's output.

    The inputs are on the device of the model, with the labels if there are any. They lack the first
    `skipped` tokens of each row if these were computed before.
    """

    indices: list[int]
    batch: dict[str, Tensor]
    output: Any
    skipped: int = 0


class PromptPrefix(Protocol):
    """A common prefix of rows, which a model has read once for all of them."""

    @property
    def length(self) -> int:
        """The number of tokens of the prefix."""

    @property
    def rows(self) -> frozenset[int]:
        """The rows that begin with the prefix."""

    def continued(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the inputs after the prefix, with the model's cache of the prefix."""


def each_row(
    model: PreTrainedModel,
    data: Batches,
    batch_size: int,
    read: Callable[[Passed], Iterable[T]],
    *,
    run: Callable[[dict[str, Tensor]], Any] | None = None,
    prefix: PromptPrefix | None = None,
    even: bool = False,
) -> list[T]:
    """Run a model on all rows, and return the value read from its output for each, in order.

    The model is put in evaluation mode. Rows of similar length share a batch of at most
    `batch_size` rows; if `even`, they have the same length. The values that `read` returns, one per
    row of a batch, are sent to the other processes of the run. `run` and `prefix` are as in
    `each_batch`.
    """

    def numbered(passed: Passed) -> list[tuple[int, T]]:
        return [*zip(passed.indices, read(passed), strict=True)]

    batches = each_batch(model, data, batch_size, numbered, run=run, prefix=prefix, even=even)
    return in_order({index: value for batch in batches for index, value in batch})


def each_batch(
    model: PreTrainedModel,
    data: Batches,
    batch_size: int,
    read: Callable[[Passed], T],
    *,
    labels: bool = False,
    run: Callable[[dict[str, Tensor]], Any] | None = None,
    prefix: PromptPrefix | None = None,
    even: bool = False,
) -> list[T]:
    """Run a model on all rows, and return the value read from its output for each batch.

    Batches are formed as in `each_row`. With `labels` the model also gets the labels, to compute
    its loss. `run` replaces the call of the model and may call it. For rows that start with
    `prefix`, only the remaining tokens are computed.
    """

    def compute(indices: list[int]) -> T:
        batch = on_device(data.batch(indices), model, model.device)
        skipped = prefix.length if prefix and indices[0] in prefix.rows else 0
        if prefix and skipped:
            batch = prefix.continued(batch)
        inputs = {k: v for k, v in model_inputs(batch).items() if labels or k != "labels"}
        with without_gradients(), learned(batch):
            output = model(**inputs) if run is None else run(batch)
        return read(Passed(indices, batch, output, skipped))

    model.eval()
    tokens = CPU_TOKENS if model.device.type == "cpu" else None
    return results(by_length(data, batch_size, tokens, prefix, even=even), compute)


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context that disables gradients.

    Sharded parameters are gathered into tensors that training reuses, so they must not be inference
    tensors.
    """
    import torch  # slow to import

    return torch.no_grad() if in_step() else torch.inference_mode()


def on_device(
    batch: Mapping[str, Tensor], model: nn.Module, device: torch.device
) -> dict[str, Tensor]:
    """Move a batch to a device; images and audio get the dtype of the model."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if (dtype := getattr(model, "dtype", None)) is None:
        return moved
    for name in {getattr(model, "main_input_name", ""), PIXELS} & moved.keys():
        if moved[name].is_floating_point():
            moved[name] = moved[name].to(dtype)
    return moved


def by_length(
    data: Batches,
    batch_size: int,
    tokens: int | None = None,
    prefix: PromptPrefix | None = None,
    *,
    even: bool = False,
) -> Iterator[list[int]]:
    """Yield the row indices of each batch, short rows first, to minimize padding.

    Progress is shown to the user if the work takes long.

    A batch has at most `batch_size` rows and `tokens` tokens with padding, unless a single row has
    more. Rows that start with `prefix` are batched separately. If `even`, a batch has rows of one
    length.
    """
    lengths = data.lengths
    kinds = [(prefix is not None and i in prefix.rows, n * even) for i, n in enumerate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: (kinds[i], lengths[i]))
    with counting(len(order), "predicting") as done:
        start = 0
        while start < len(order):
            end = min(start + batch_size, len(order))
            while end > start + 1 and (
                kinds[order[end - 1]] != kinds[order[start]]
                or (tokens and (end - start) * lengths[order[end - 1]] > tokens)
            ):
                end -= 1
            yield order[start:end]
            done(end - start)
            start = end


def rows_at_once(batch_size: int, longest: int) -> int:
    """Return the number of the longest rows that `forward` runs at once on a CPU."""
    return min(batch_size, max(CPU_TOKENS // longest, 1))


Loss = Callable[[Any, Mapping[str, "Tensor"]], "Tensor | None"]
"""Computes the loss of a batch from the model's output and the batch."""

Items = Callable[[Mapping[str, "Tensor"]], float]
"""Counts the items of a batch over which its loss is a mean."""


OF_LOSS = "loss."
"""The prefix of batch entries that only the loss reads; the model does not receive them."""


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch that is passed to the model."""
    return {name: tensor for name, tensor in batch.items() if not name.startswith(OF_LOSS)}


@contextmanager
def learned(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Mark the learned tokens of a batch for the calls of a model inside the context."""
    token = LEARNED.set(batch.get("labels", batch.get(f"{OF_LOSS}labels")))
    try:
        yield
    finally:
        LEARNED.reset(token)


_MEASURED: ContextVar[dict[str, list[Any]] | None] = ContextVar("measured", default=None)


@contextmanager
def measuring() -> Iterator[dict[str, list[Any]]]:
    """Collect the values that are passed to `measure` inside the context, by name."""
    values: dict[str, list[Any]] = {}
    token = _MEASURED.set(values)
    try:
        yield values
    finally:
        _MEASURED.reset(token)


def measure(**values: Tensor | float) -> None:
    """Record numbers of the current training step for its report, such as the mean reward.

    A number that is recorded several times in a step is averaged. Outside a step nothing happens.
    """
    if (measured := _MEASURED.get()) is not None:
        for name, value in values.items():
            measured.setdefault(name, []).append(value)


def batch_rows(batch: Mapping[str, Tensor]) -> float:
    """Count the rows of a batch."""
    return len(next(iter(batch.values())))


def batch_labels(batch: Mapping[str, Tensor], *, shifted: bool = False) -> float:
    """Count the labels of a batch; without labels of classes or tokens, its rows.

    `shifted`: each label is predicted at the token before it, except the first.
    """
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return batch_rows(batch)
    return int(((labels[:, 1:] if shifted else labels) != IGNORED).sum())


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, each predicted at the token before it."""
    import torch.nn.functional as F

    # As in transformers, the labels are shifted: slicing the logits would copy them.
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def relevance_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy of one output for each row."""
    import torch.nn.functional as F

    logits = output.logits.squeeze(-1).float()
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].float())


def span_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of the first and the last token of the answer.

    Padding is excluded, since no answer begins or ends in it. Models count padding as candidates,
    so the loss of a text would depend on the lengths of the others in its batch.
    """
    import torch.nn.functional as F

    padding, tokens = batch["attention_mask"] == 0, output.start_logits.shape[1]
    losses = [
        F.cross_entropy(
            logits.masked_fill(padding, float("-inf")),
            batch[f"{end}_positions"].clamp(0, tokens),
            ignore_index=tokens,
        )
        for end, logits in (("start", output.start_logits), ("end", output.end_logits))
    ]
    return (losses[0] + losses[1]) / 2


def corrected_loss(model: PreTrainedModel, kind: str) -> Loss | None:
    """Return the loss that replaces the model's own; None if the model's own is right.

    `kind` is the `head` of a task.
    """
    from adapterhub.backbones.probe import shifts_labels  # imports torch

    if kind != "causal-lm" or shifts_labels(model):
        return None
    return next_token_loss


PairLoss = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""Computes a loss of vectors, the numbers of their texts and the scores of pairs."""


def multiple_negatives_loss(vectors: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each anchor's positive among all candidates of the batch.

    InfoNCE with in-batch negatives: Henderson et al. 2017, section 4.4,
    https://arxiv.org/abs/1705.00652; van den Oord et al. 2018, equation 4,
    https://arxiv.org/abs/1807.03748:

        -log(exp(cos(a_i, p_i) / t) / sum over candidates c of exp(cos(a_i, c) / t))

    The candidates are the positives and negatives of all rows. A candidate with the text of the
    anchor, or of one of its positives in any row, is not a negative and is left out.

    vectors: (batch, columns, d), texts: (batch, columns), temperature: t.
    """
    import torch
    import torch.nn.functional as F

    rows = len(vectors)
    vectors = F.normalize(vectors, dim=-1)
    candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives come first
    numbers = texts[:, 1:].T.flatten()
    scores = vectors[:, 0] @ candidates.T / temperature
    same_anchor, same_text = texts[:, :1] == texts[:, 0], texts[:, 1:2] == numbers
    positive = (same_anchor.float() @ same_text.float()) > 0
    left_out = (numbers == 0) | (numbers == texts[:, :1]) | positive
    own = torch.arange(rows, device=texts.device)
    left_out[own, own] = False
    return F.cross_entropy(scores.masked_fill(left_out, -torch.inf), own)


def triplet_loss(vectors: Tensor, texts: Tensor, margin: float) -> Tensor:
    """Return the mean of max(0, cos(a, n) - cos(a, p) + margin) over all negatives of the rows.

    Schroff et al. 2015, equation 3, https://arxiv.org/abs/1503.03832, whose squared distance of
    vectors of length 1 is 2 - 2 cos.

    vectors: (batch, columns, d), texts: (batch, columns).
    """
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, :1], vectors[:, 1:], dim=-1)
    losses = F.relu(cosines[:, 1:] - cosines[:, :1] + margin)
    return losses[texts[:, 2:] != 0].mean()


def cosent_loss(vectors: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return log(1 + sum of exp((cos_j - cos_i) / t) over pairs i with a higher score than j).

    CoSENT: Su 2022, https://kexue.fm/archives/8847. Only the order of the scores counts.

    vectors: (batch, 2, d), scores: (batch,), temperature: t.
    """
    import torch
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1) / temperature
    differences = (cosines[None] - cosines[:, None])[scores[:, None] > scores[None]]
    return torch.cat([cosines.new_zeros(1), differences]).logsumexp(0)


def cosine_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return the mean squared difference of cosines and scores.

    Reimers & Gurevych 2019, section 3, https://arxiv.org/abs/1908.10084.

    vectors: (batch, 2, d), scores: (batch,), from -1 to 1.
    """
    import torch.nn.functional as F

    return F.mse_loss(F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1), scores)


def response_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of the labels of each row, (rows,).

    logits: (rows, tokens, vocabulary); labels: (rows, tokens), each predicted at the token before
    it.
    """
    import torch.nn.functional as F

    after, scores = labels[:, 1:], logits[:, :-1].transpose(1, 2).float()
    return -F.cross_entropy(scores, after, ignore_index=IGNORED, reduction="none").sum(-1)


def bradley_terry_loss(scores: Tensor) -> Tensor:
    """Return -log sigmoid(s_c - s_r) for each comparison.

    Bradley & Terry 1952; Ouyang et al. 2022, equation 1, https://arxiv.org/abs/2203.02155.

    scores: (batch, 2).
    """
    import torch.nn.functional as F

    return -F.logsigmoid(scores[:, 0] - scores[:, 1])
