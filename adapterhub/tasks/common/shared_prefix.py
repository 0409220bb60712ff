"""Common prefixes of prompts are computed once, and so are prompts with several answers.

Few-shot examples and instructions begin every row. A causal model reads them once; each batch
continues from their keys and values. Shared tokens are found by comparing rows. The first call
tests one row with the cache against the whole row: if the logits differ, or the model does not
accept a cache, all tokens are computed.

    rows      t1 t2 t3 t4 | a b      one pass of t1 ... t4, then one of
              t1 t2 t3 t4 | c d e    a b _ and c d e

A server keeps the prefix of an adapter between requests (`PrefixStore`), since the weights do not
change. Generation in packed steps stores it in pages (`serving.generation.paged`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from adapterhub.tasks.common.batches import (
    CPU_TOKENS,
    IGNORED,
    Passed,
    Row,
    each_row,
    in_step,
    model_inputs,
    without_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from adapterhub.tasks.common.base import Encoded

_LEAST = 16  # tokens: a shorter prefix costs more than it saves
_WORTHWHILE = 0.25  # of the tokens of all rows
_CANDIDATES = 9  # rows whose middle one is typical
_INPUTS = {"input_ids", "attention_mask", "labels", "position"}
_ANSWER_TOKENS = 4 * CPU_TOKENS  # positions of prompts whose answers are computed together


@dataclass(frozen=True)
class SharedPrefix:
    """A common prefix of rows, and a model's cache of it.

    Attributes:
        ids: the tokens.
        cache: the keys and values of the tokens, for one row.
        rows: the rows that begin with the tokens.
    """

    ids: tuple[int, ...]
    cache: Any
    rows: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    @property
    def is_whole(self) -> bool:
        """Return whether the cache is free of virtual tokens, which `generate` would miscount."""
        return bool(self.cache.get_seq_length() == self.length)

    def cached(self, rows: int) -> Any:
        """Return a copy of the cache for a number of rows."""
        import torch  # slow to import

        return _selected(self.cache, torch.zeros(rows, dtype=torch.long))

    def continued(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the inputs after the prefix, with the cache; the mask stays whole."""
        rest = {n: t if n == "attention_mask" else t[:, self.length :] for n, t in batch.items()}
        return rest | {"past_key_values": self.cached(len(batch["input_ids"]))}


@dataclass
class PrefixStore:
    """The prefix of prompts on the same weights, kept between calls.

    Attributes:
        ids: the common tokens of the prompts so far, or the tokens of the first prompt.
        prefix: the computed prefix of these tokens.
        refused: whether the model cannot continue from a cache.
    """

    ids: list[int] = field(default_factory=list)
    prefix: SharedPrefix | None = None
    refused: bool = False


_KEPT: ContextVar[PrefixStore | None] = ContextVar("prefix_store", default=None)


@contextmanager
def keeping_prefix(store: PrefixStore) -> Iterator[None]:
    """Keep the shared prefix of calls inside; the weights must not change."""
    token = _KEPT.set(store)
    try:
        yield
    finally:
        _KEPT.reset(token)


def shared_prefix(model: PreTrainedModel, rows: Sequence[Row]) -> SharedPrefix | None:
    """Return the computed common prefix of most rows; None if it saves nothing.

    The prefix excludes learned tokens. The model is put in evaluation mode.
    """
    store = _KEPT.get()
    if not _may_share(model, rows) or (store is not None and store.refused):
        return None
    pivot = (store.ids if store else []) or _typical(rows)
    lengths = [_common(pivot, row["input_ids"], _last(row)) for row in rows]
    length = max(lengths, key=lambda n: n * sum(n <= other for other in lengths))
    members = frozenset(i for i, n in enumerate(lengths) if n >= length)
    shortest = min((rows[i]["input_ids"] for i in members), key=len)
    if length < _LEAST:
        return None
    if store is not None:
        return _of_store(model, store, shortest, length, members)
    saved = length * len(members) - (length + len(shortest))
    if saved < _WORTHWHILE * sum(len(row["input_ids"]) for row in rows):
        return None
    cache = _tried_cache(model, shortest, length)
    return None if cache is None else SharedPrefix(tuple(shortest[:length]), cache, members)


def _of_store(
    model: PreTrainedModel,
    store: PrefixStore,
    row: Sequence[int],
    length: int,
    members: frozenset[int],
) -> SharedPrefix | None:
    """Return the kept prefix, or compute the shorter part of it that the rows share."""
    if not store.ids:  # the first call: the prefix shared with later rows is unknown
        store.ids = list(row)
        return None
    known = store.prefix
    if known is None or known.length != length:
        if known is not None and length < known.length / 2:
            return None  # an exception: the other rows have the whole prefix
        store.ids = list(row[:length])
        cache = _tried_cache(model, row, length)
        store.refused = cache is None
        store.prefix = None if cache is None else SharedPrefix(tuple(store.ids), cache)
    return store.prefix and replace(store.prefix, rows=members)


def _may_share(model: Any, rows: Sequence[Row]) -> bool:
    """Return whether rows consist of tokens only, which a causal model may read in parts."""
    config = getattr(model, "config", None)
    if not rows or in_step() or config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return all(row.keys() <= _INPUTS and "attention_mask" in row for row in rows)


def _typical(rows: Sequence[Row]) -> list[int]:
    """Return the tokens of a row with the most common beginning, if most rows share it."""
    step = max(len(rows) // _CANDIDATES, 1)
    some = sorted(row["input_ids"] for row in rows[::step])
    return list(some[len(some) // 2])


def _last(row: Row) -> int:
    """Return the number of leading tokens of a row that precede all predictions."""
    labels = row.get("labels", ())
    learned = next((i for i, label in enumerate(labels) if label != IGNORED), len(labels) or None)
    ends = (len(row["input_ids"]), learned, row.get("position", -1) + 1 or None)
    return max(min(end for end in ends if end is not None) - 1, 0)


def _common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """Return the length of the common prefix of two lists, at most `most`."""
    low, high = 0, min(len(first), most)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _selected(cache: Any, rows: Tensor) -> Any:
    """Return a copy of a cache with some of its rows."""
    fresh = copy.deepcopy(cache)
    fresh.reorder_cache(rows)
    return fresh


def _tried_cache(model: PreTrainedModel, ids: Sequence[int], length: int) -> Any:
    """Return the cache of the first tokens of a row; None if the model cannot continue from it.

    The logits of the remaining tokens must equal the logits of the whole row, with padding after
    them.
    """
    import torch  # slow to import

    from adapterhub.backbones.compare import same

    whole = torch.tensor([ids], device=model.device)
    first, rest = whole[:, :length], torch.nn.functional.pad(whole[:, length:], (0, 1))
    tokens = whole.shape[1] - length
    mask = torch.ones_like(torch.nn.functional.pad(whole, (0, 1)))
    mask[:, -1] = 0
    model.eval()
    try:
        with without_gradients():
            last, all_of_rest = _keeping(model, 1), _keeping(model, tokens)
            begun = model(input_ids=first, attention_mask=mask[:, :length], use_cache=True, **last)
            cache = begun.past_key_values
            copied = _selected(cache, torch.zeros(1, dtype=torch.long))
            computed = model(input_ids=rest, attention_mask=mask, past_key_values=copied)
            expected = model(input_ids=whole, attention_mask=mask[:, :-1], **all_of_rest)
    except Exception:  # raised by a model that accepts no cache, or no part of a text
        return None
    pairs = {"logits": expected.logits[:, -tokens:]}, {"logits": computed.logits[:, :tokens]}
    return cache if same(*pairs, model.dtype) else None


def _keeping(model: Any, tokens: int) -> dict[str, int]:
    """Return the option that makes a model compute only the logits of its last tokens."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": tokens} if known else {}


# Answers


def answer_scores(
    model: PreTrainedModel, prompts: Encoded, answers: Sequence[Sequence[int]], batch_size: int
) -> list[list[float]]:
    """Return the log likelihood of each answer to each prompt, summed over its tokens.

    The tokens of a prompt are computed once for all answers if the model accepts a cache.
    """
    prefix = shared_prefix(model, prompts.rows)
    longest = max(map(len, answers))
    ids: list[int] = max((row["input_ids"] for row in prompts.rows), key=len, default=[])
    if longest > 1 and not prefix and (len(ids) < 2 or not _continues(model, ids)):
        return _whole_scores(model, prompts, answers, batch_size)

    def run(batch: dict[str, Tensor]) -> Tensor:
        return _continued_scores(model, batch, answers)

    return each_row(model, prompts, batch_size, _listed, run=run, prefix=prefix, even=True)


def _continues(model: PreTrainedModel, ids: Sequence[int]) -> bool:
    if in_step() or getattr(model.config, "is_encoder_decoder", False):
        return False
    return _tried_cache(model, ids, len(ids) // 2) is not None


def _listed(passed: Passed) -> list[list[float]]:
    scores: list[list[float]] = passed.output.tolist()
    return scores


def _continued_scores(
    model: PreTrainedModel, batch: Mapping[str, Tensor], answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return the log likelihoods of answers to prompts of one length, (prompts, answers)."""
    output = model(**model_inputs(batch), use_cache=True, **_keeping(model, 1))
    firsts = [answer[0] for answer in answers]
    scores: Tensor = output.logits[:, -1].float().log_softmax(-1)[:, firsts]
    long = [i for i, answer in enumerate(answers) if len(answer) > 1]
    mask = batch["attention_mask"]
    size = max(_ANSWER_TOKENS // mask.numel(), 1)
    for start in range(0, len(long), size):
        part = long[start : start + size]
        rests = [answers[i] for i in part]
        scores[:, part] += _rest_scores(model, output.past_key_values, mask, rests)
    return scores


def _rest_scores(
    model: PreTrainedModel, cache: Any, mask: Tensor, answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return the log likelihood of all tokens but the first, (prompts, answers)."""
    import torch

    rows, device = len(mask), mask.device
    longest = max(map(len, answers)) - 1
    padded = [[*answer, *[IGNORED] * (longest + 1 - len(answer))] for answer in answers]
    tokens = torch.tensor(padded, device=device).repeat(rows, 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    each = torch.arange(rows).repeat_interleave(len(answers))
    learned = targets != IGNORED
    whole = torch.cat([mask[each.to(device)], learned.to(mask.dtype)], dim=1)
    output = model(
        input_ids=inputs.clamp_min(0), attention_mask=whole, past_key_values=_selected(cache, each)
    )
    scores = output.logits.float().log_softmax(-1)
    each_token = scores.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    sums: Tensor = (each_token * learned).sum(-1)
    return sums.view(rows, len(answers))


def _whole_scores(
    model: PreTrainedModel, prompts: Encoded, answers: Sequence[Sequence[int]], batch_size: int
) -> list[list[float]]:
    """Return the log likelihoods of answers, each after its own copy of the prompt."""
    import torch

    pairs = [(row["input_ids"], answer) for row in prompts.rows for answer in answers]
    inputs = [[*ids, *answer[:-1]] for ids, answer in pairs]
    rows: list[Row] = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in inputs]
    every = replace(prompts, rows=rows, owners=range(len(rows)))

    def read(passed: Passed) -> Iterator[float]:
        for logits, index in zip(passed.output.logits, passed.indices, strict=True):
            ids, answer = pairs[index]
            scores = logits[len(ids) - 1 :][: len(answer)].float().log_softmax(-1)
            chosen = torch.tensor([answer], device=scores.device).T
            yield float(scores.gather(-1, chosen).sum())

    flat = each_row(model, every, batch_size, read)
    return [flat[i : i + len(answers)] for i in range(0, len(flat), len(answers))]
