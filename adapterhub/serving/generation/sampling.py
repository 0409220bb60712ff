"""Choice of the next token, for rows with different options.

The random number of a token depends only on the seed of its request and its place in the text. It
chooses among the tokens in the order of their ids. Sampling therefore does not depend on the other
rows of a batch, and a text that is computed again gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from adapterhub.serving.generation.request import GenerationOptions

_COLDEST = 1e-6  # lower temperatures count as 0: dividing by them overflows
_LEAST = -9999.0  # log-probability: JSON has no infinity
_FIRST = 256  # most probable tokens that usually reach the probability top_p together


@dataclass(frozen=True)
class NextToken:
    """The sampling options at one place of one text."""

    options: GenerationOptions
    seed: int
    place: int

    @property
    def samples(self) -> bool:
        """Whether the token is sampled; at a lower temperature it is the most probable one."""
        return self.options.temperature > _COLDEST

    def number(self) -> float:
        """Return the random number of the place, from 0 to 1."""
        key = self.seed.to_bytes(16, "little", signed=True) + self.place.to_bytes(8, "little")
        return int.from_bytes(blake2b(key, digest_size=7).digest(), "little") / 2**56


@dataclass(frozen=True)
class ScoredToken:
    """The score of one token: log-probability, rank from 1, and the most probable tokens."""

    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: Tensor, ids: Tensor, count: int) -> list[ScoredToken]:
    """Score one token for each row of logits.

    Args:
        logits: (rows, tokens).
        ids: the token of each row, (rows,).
        count: the number of most probable tokens to list.
    """
    scores = logits.float().log_softmax(dim=-1).clamp_min(_LEAST)
    own = scores.gather(1, ids[:, None])
    ranks = (scores > own).sum(dim=1) + 1
    best = scores.topk(min(count, scores.shape[1]))
    listed = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        ScoredToken(logprob, rank, tuple(zip(*alternatives, strict=True)))
        for logprob, rank, alternatives in zip(
            own[:, 0].tolist(), ranks.tolist(), listed, strict=True
        )
    ]


@dataclass(frozen=True)
class ChosenToken:
    """A token, with the requested log-probabilities."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def choose_tokens(logits: Tensor, requests: Sequence[NextToken]) -> list[ChosenToken | None]:
    """Choose a token for each row of logits, (rows, tokens).

    Returns:
        The tokens; None for rows with logits that are not finite.
    """
    logits = logits.float()
    best, ids = logits.max(dim=-1)
    finite = best.isfinite().tolist()
    drawn = [n for n, each in enumerate(requests) if each.samples and finite[n]]
    if drawn:
        ids = ids.clone()
        ids[drawn] = _sampled(logits[drawn], [requests[n] for n in drawn])
    chosen: list[ChosenToken | None] = [
        ChosenToken(token) if usable else None
        for token, usable in zip(ids.tolist(), finite, strict=True)
    ]
    for n, each in enumerate(requests):
        if each.options.logprobs is not None and (token := chosen[n]) is not None:
            chosen[n] = _with_logprobs(token.id, logits[n], each.options.logprobs)
    return chosen


def _sampled(logits: Tensor, requests: Sequence[NextToken]) -> Tensor:
    """Sample a token for each row."""
    heat = torch.tensor([each.options.temperature for each in requests], device=logits.device)
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / heat[:, None]
    weights = scaled.softmax(dim=-1).double()
    for row, each in zip(weights, requests, strict=True):
        _drop_improbable(row, each.options)
    totals = weights.cumsum(dim=-1)
    numbers = torch.tensor([[each.number()] for each in requests], device=logits.device).double()
    places = torch.searchsorted(totals, numbers * totals[:, -1:], right=True)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(places[:, 0], last)


def _drop_improbable(weights: Tensor, options: GenerationOptions) -> None:
    """Set the probability of tokens that must not be sampled to 0."""
    least = weights.new_zeros(())
    if 0 < options.top_k < len(weights):
        least = weights.topk(options.top_k).values[-1]
    if options.top_p < 1:
        kept = weights.where(weights >= least, 0.0)
        most = options.top_p * kept.sum()
        values = kept.topk(min(_FIRST, len(kept))).values
        if values.sum() < most:
            values = kept.sort(descending=True).values
        enough = int((values.cumsum(0) < most).sum())
        least = torch.maximum(least, values[min(enough, len(values) - 1)])
    weights.masked_fill_(weights < least, 0.0)


def _with_logprobs(token: int, logits: Tensor, count: int) -> ChosenToken:
    scores = logits.log_softmax(dim=-1)
    best = scores.topk(min(count, len(scores)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return ChosenToken(token, float(scores[token]), tuple(pairs))
