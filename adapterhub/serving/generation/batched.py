"""Texts generated in batches: one step for all of them, then a turn for the engine.

Every model that generates texts has one or two generators. This one computes batches of
transformers' `generate`, and each row uses its own adapter. A batch ends with its last text, and
between two of its steps the engine computes batches of other models. This generator also scores
the tokens of prompts: all logits of a prompt come from one pass, which shares no page with another
text. The other generator is in continuous.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adapterhub.adapters.activation import changes_shared_state
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.route import route
from adapterhub.adapters.state import find_state
from adapterhub.errors import one_line
from adapterhub.serving.generation.detokenize import TextPieces, texts_of_tokens
from adapterhub.serving.generation.paged import own_processors
from adapterhub.serving.generation.prompt import EncodedPrompt
from adapterhub.serving.generation.request import (
    GeneratedText,
    GeneratedToken,
    Piece,
    PromptToken,
    TextGeneration,
)
from adapterhub.serving.generation.sampling import (
    ChosenToken,
    NextToken,
    ScoredToken,
    choose_tokens,
    score_tokens,
)
from adapterhub.serving.shared_backbone import (
    BatchLimits,
    ClassModel,
    RequestSize,
    ServedAdapter,
    choose_batch,
    numbers_not_finite,
)
from adapterhub.tasks.common.batches import on_device, pad, without_gradients
from adapterhub.tasks.common.language_models import head_apart, states_below, token_chunks
from adapterhub.web.errors import DeadlineError, TooLargeError

_PADDING = 0.5  # share of padding in a batch of prompts: generation takes most of the time
_ROWS = 32  # most rows of a batch of `generate`


@dataclass(eq=False)
class TextRequest:
    """A requested text, and its tokens so far.

    Attributes:
        generation: the object that the client holds.
        served: the adapter that generates it.
        prompt: the tokens of its prompt.
        next: the options of its next token.
        pieces: the text so far.
        deadline: the time after which it is useless.
        on_begin: called once, when the prompt is computed or dropped.
        on_end: called once, when computing for it ends.
        limit: the most tokens to generate.
        queued: the time when it began to wait.
        ahead: the tokens that were waiting then.
        first: the time of its first token.
        generated: the tokens so far, with the end token.
        generation_time: the most seconds from the first token to the end, which replace the
            deadline; None: the deadline always applies.
    """

    generation: TextGeneration
    served: ServedAdapter
    prompt: EncodedPrompt
    next: NextToken
    pieces: TextPieces
    deadline: float | None
    on_begin: Callable[[TextRequest], None]
    on_end: Callable[[TextRequest], None]
    limit: int
    queued: float = field(default_factory=time.monotonic)
    ahead: int = 0
    first: float = 0.0
    generated: list[int] = field(default_factory=list)
    generation_time: float | None = None
    _is_begun: bool = False
    _is_left: bool = False

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens of the prompt are scored."""
        return self.next.options.prompt_logprobs is not None

    def begin(self) -> None:
        """Remove it from the count of waiting requests."""
        if not self._is_begun:
            self._is_begun = True
            self.on_begin(self)

    def leave(self) -> None:
        """Report that computing for it has ended."""
        self.begin()
        if not self._is_left:
            self._is_left = True
            self.on_end(self)

    def expire(self) -> bool:
        """Return whether it has ended, or its deadline has passed."""
        ends = self.deadline
        if self.first and self.generation_time is not None:
            ends = self.first + self.generation_time
        late = 0.0 if ends is None else time.monotonic() - ends
        if late > 0:
            self.generation.finish(
                DeadlineError(late, "complete" if self.generated else "computed")
            )
        return self.generation.done

    def accept_prompt(self, scored: Sequence[ScoredToken]) -> None:
        """Add the scores of all prompt tokens but the first."""
        ids = self.prompt.ids
        texts = texts_of_tokens(self.pieces.tokenizer, ids)
        decoded = {i: self.pieces.decode_all([i]) for each in scored for i, _ in each.alternatives}
        self.generation.prompt = (
            PromptToken(ids[0], texts[0]),
            *(
                PromptToken(
                    token, text, own.logprob, own.rank,
                    tuple((i, decoded[i], value) for i, value in own.alternatives),
                )
                for token, text, own in zip(ids[1:], texts[1:], scored, strict=True)
            ),
        )  # fmt: skip
        if not self.limit:
            self.first = time.monotonic()
            self._finish("length")

    def accept(self, chosen: ChosenToken | None) -> None:
        """Add the next token, and end the text where it ends; None: its logits are not finite."""
        if self.generation.done:
            return
        if chosen is None:
            self.generation.finish(numbers_not_finite(self.served))
            return
        self.first = self.first or time.monotonic()
        self.generated.append(chosen.id)
        self.next = NextToken(self.next.options, self.next.seed, len(self.generated))
        ends = chosen.id in self.prompt.ends
        token = self._token(chosen, "" if ends else self.pieces.next_text(chosen.id))
        self._deliver(self.pieces.add(token))
        if ends or self.pieces.stopped:
            self._finish("stop")
        elif len(self.generated) >= self.limit:
            self._finish("length")

    def _token(self, chosen: ChosenToken, text: str) -> GeneratedToken:
        pairs = tuple((self.pieces.decode([i]), value) for i, value in chosen.alternatives)
        return GeneratedToken(chosen.id, text, chosen.logprob, pairs)

    def _deliver(self, piece: Piece | None) -> None:
        if piece is not None:
            self.generation.deliver(piece)

    def _finish(self, reason: str) -> None:
        self._deliver(self.pieces.end())
        now = time.monotonic()
        self.generation.finish(
            GeneratedText(
                self.pieces.text,
                tuple(self.pieces.tokens),
                reason,
                len(self.prompt.row["input_ids"]),
                len(self.generated),
                self.first - self.generation.asked,
                now - self.generation.asked,
            )
        )


class TextGenerator(Protocol):
    """Generates the texts of one model."""

    def add(self, request: TextRequest) -> None:
        """Add a request."""

    @property
    def busy(self) -> bool:
        """Whether there are texts to generate."""

    def step(self) -> None:
        """Compute the next token of some texts, or a batch."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation has failed; on a CPU, only torch's message shows this."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def fail_alone(request: TextRequest, error: Exception) -> None:
    """End a text with the error raised by computing it alone."""
    if is_out_of_memory(error):
        tokens = len(request.prompt.row["input_ids"]) + len(request.generated)
        error = TooLargeError(
            f"a text of {tokens:,} tokens does not fit into memory alone",
            offenders=[one_line(str(error))],
            hint="a shorter prompt, fewer max_tokens, or another device",
        )
    request.generation.finish(error)


def attached_adapter(served: ServedAdapter) -> Adapter | None:
    """Return the adapter on its model; None for the bare backbone."""
    state = None if served.row is None else find_state(served.model.model)
    return None if state is None else state.adapters[str(served.row)]


@dataclass(eq=False)
class BatchGenerator:
    """Generates texts in batches of `generate`; each row uses its own adapter.

    Attributes:
        own: the model.
        positions: the most positions of a batch of prompts.
        between: lets the engine compute batches of other models.
        counts: counts of events.
    """

    own: ClassModel
    positions: int
    between: Callable[[], None]
    counts: Counter[str]
    waiting: deque[TextRequest] = field(default_factory=deque)

    def add(self, request: TextRequest) -> None:
        """Add a request."""
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether requests wait."""
        return bool(self.waiting)

    def step(self) -> None:
        """Generate the texts of a batch."""
        for request in (each for each in self.waiting if each.expire()):
            request.leave()
        self.waiting = deque(each for each in self.waiting if not each.generation.done)
        if not self.waiting:
            return
        batch = self._take()
        for request in batch:
            request.begin()
        try:
            self._generate_halves(batch)
        finally:
            for request in batch:
                request.leave()

    def _take(self) -> list[TextRequest]:
        """Remove the oldest request, and those that fit it, from the queue."""
        key = _batch_key(self.waiting[0])
        fitting = [each for each in self.waiting if _batch_key(each) == key]
        lengths = [len(each.prompt.row["input_ids"]) + each.served.virtual for each in fitting]
        sizes = [RequestSize(1, length, length) for length in lengths]
        chosen = [
            fitting[n]
            for n in choose_batch(sizes, BatchLimits.of_tokens(self.positions), _PADDING)[:_ROWS]
        ]
        gone = set(map(id, chosen))
        self.waiting = deque(each for each in self.waiting if id(each) not in gone)
        return chosen

    def _generate_halves(self, batch: Sequence[TextRequest]) -> None:
        """Generate a batch; if it fails, retry the unfinished texts in halves."""
        try:
            self._generate(batch)
            return
        except Exception as error:
            if len(batch) == 1:
                fail_alone(batch[0], error)
                return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.counts["halved"] += 1
        rest = [each for each in batch if not each.generation.done]
        for part in (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
            if part:
                self._generate_halves(part)

    def _score_prompts(self, batch: Sequence[TextRequest]) -> None:
        """Score the tokens of prompts, and choose the next token of prompts that end there."""
        model: Any = self.own.model
        with self.own.encoding:
            inputs = pad([each.prompt.row for each in batch], self.own.tokenizer, "right")
        moved = on_device(inputs, model, model.device)
        names = [each.served.row for each in batch]

        def first() -> dict[str, Tensor]:
            return {name: each[:1] for name, each in (moved | {"labels": ids}).items()}

        ids = moved["input_ids"]
        with without_gradients():
            with self._routed(names[:1]):
                head = head_apart(model, ids.numel(), first)
            with self._routed(names):
                below = model(**moved).logits if head is None else states_below(model, head, moved)
            for states, own, request in zip(below, ids, batch, strict=True):
                self._score_prompt(request, own[: len(request.prompt.ids)], states, head)

    def _score_prompt(
        self, request: TextRequest, ids: Tensor, states: Tensor, head: nn.Linear | None
    ) -> None:
        """Score a prompt from its logits (places, vocabulary), or from the inputs of the head."""
        options, last = request.next.options, len(ids) - 1
        parts = [slice(0, last)] if head is None else token_chunks(last, head)
        scored: list[ScoredToken] = []
        for part in parts:
            logits = states[:last][part] if head is None else head(states[:last][part])
            scored += score_tokens(logits, ids[1:][part], options.prompt_logprobs or 0)
        if not all(math.isfinite(each.logprob) for each in scored):
            request.generation.finish(numbers_not_finite(request.served))
            return
        request.accept_prompt(scored)
        if request.limit == 1:
            scores = states[last:] if head is None else head(states[last:])
            change = own_processors(self.own.model, len(ids), 1)
            (token,) = choose_tokens(change(ids[None], scores.float()), [request.next])
            self.counts["generated_tokens"] += 1
            request.accept(token)

    def _generate(self, batch: Sequence[TextRequest]) -> None:
        if batch[0].scores_prompt:
            if unscored := [each for each in batch if not each.generation.prompt]:
                self._score_prompts(unscored)
            batch = [each for each in batch if not each.generation.done]
            if not batch:
                return
        model: Any = self.own.model
        side = "left" if batch[0].prompt.continues else "right"
        with self.own.encoding:
            inputs = pad([each.prompt.row for each in batch], self.own.tokenizer, side)
        steps = _Steps(batch, self.between, self.counts)
        padding = self.own.tokenizer.pad_token_id
        with without_gradients(), self._routed([each.served.row for each in batch]):
            model.generate(
                **on_device(inputs, model, model.device),
                max_new_tokens=max(each.limit for each in batch),
                pad_token_id=0 if padding is None else padding,
                logits_processor=[steps.choose],
                stopping_criteria=[steps.ended],
                do_sample=False,
                num_beams=1,
                use_cache=True,
                **batch[0].prompt.start,
            )

    def _routed(self, names: Sequence[str | None]) -> AbstractContextManager[Any]:
        return route(self.own.model, names) if find_state(self.own.model) else nullcontext()


def _batch_key(request: TextRequest) -> Hashable:
    """Return the key shared by texts of one batch: some adapters are alone in theirs."""
    adapter = attached_adapter(request.served)
    alone = adapter is not None and changes_shared_state(adapter)
    start = request.prompt.start.items()
    return id(request.served) if alone else None, request.scores_prompt, *start


@dataclass(eq=False)
class _Steps:
    """The callbacks of `generate` at each step: they choose tokens and end texts.

    A batch that is computed again after a failure repeats the tokens that its texts already have.
    """

    batch: Sequence[TextRequest]
    between: Callable[[], None]
    counts: Counter[str]
    place: int = 0

    def choose(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that are finite for the chosen tokens alone."""
        new = [n for n, r in enumerate(self.batch) if self._is_new(r)]
        tokens = scores.argmax(dim=-1)
        for n, request in enumerate(self.batch):
            if self.place < len(request.generated):
                tokens[n] = request.generated[self.place]
        if new:
            chosen = choose_tokens(scores[new], [self.batch[n].next for n in new])
            self.counts["generated_tokens"] += len(new)
            for n, token in zip(new, chosen, strict=True):
                self.batch[n].accept(token)
                tokens[n] = 0 if token is None else token.id
        self.place += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def _is_new(self, request: TextRequest) -> bool:
        return not request.generation.done and self.place >= len(request.generated)

    def ended(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Return the rows that have ended, after the engine had its turn."""
        self.between()
        for request in self.batch:
            if request.expire():
                request.leave()
        return torch.tensor([r.generation.done for r in self.batch], device=ids.device)
