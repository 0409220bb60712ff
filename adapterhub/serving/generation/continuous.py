"""Packed steps: each step computes the next token of texts of any adapters.

A step is one row with tokens of all texts: prompts or parts of long ones, and one token of each
text in progress. Each token goes through the adapter of its text. A model or adapter that cannot be
computed this way uses batches of `generate` instead. This is tried once for each model and each
configuration of methods.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.route import (
    PackedAdapter,
    PackedRoutes,
    TokenRun,
    disabled,
    packed_adapter,
    route,
    unpackable,
)
from adapterhub.backbones.compare import same
from adapterhub.errors import ServingError, warn_user
from adapterhub.serving.generation.batched import TextRequest, fail_alone
from adapterhub.serving.generation.paged import PagedRow, PagedSteps, own_processors, paged_problem
from adapterhub.serving.generation.sampling import ChosenToken, choose_tokens
from adapterhub.serving.shared_backbone import ClassModel, ServedAdapter
from adapterhub.tasks.common.batches import without_gradients
from adapterhub.web.errors import TooLargeError

_TRIED = (5, 9)  # the lengths of the texts that a model and its adapters are tried on
_TRIED_STEPS = 2
MOST_ROWS = 256  # most texts of a step
MOST_BATCH_TOKENS = 2048  # most tokens of a step: the mask has a row for each


class PackedModel:
    """A model in packed steps, and the results of trying adapters on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.routes = PackedRoutes(model)
        self.adapters: dict[str, PackedAdapter] = {}
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.problems: dict[str, str] = {}  # by configuration of methods; "" if packed steps work
        self.trial: PagedSteps | None = None

    def problem(self, adapter: Adapter | None) -> str:
        """Return why an adapter's texts cannot be generated in packed steps; "" if they can."""
        methods = "" if adapter is None else repr(adapter.methods)
        if adapter is not None and (reason := unpackable(adapter)):
            return reason
        if adapter is not None:
            self._know(adapter)
        if methods not in self.problems:
            try:
                self.problems[methods] = self._tried(adapter)
            except Exception as error:
                self.problems[methods] = f"{type(error).__name__}: {error}"
                self.trial = None
        return self.problems[methods]

    def _know(self, adapter: Adapter) -> None:
        entry = self.adapters.get(adapter.name)
        if entry is None or entry.adapter is not adapter:
            self.adapters[adapter.name] = packed_adapter(adapter)
            self.routes.prefixes[adapter.name] = self.adapters[adapter.name].prefix

    def forget(self, name: str) -> None:
        """Forget an adapter that was detached."""
        self.adapters.pop(name, None)
        self.routes.prefixes.pop(name, None)

    def virtual(self, name: str | None) -> int:
        """Return the number of virtual tokens that an adapter adds in front of its texts."""
        return 0 if name is None else self.adapters[name].virtual

    def logits(self, inputs: dict[str, Any], runs: Sequence[TokenRun]) -> Tensor:
        """Compute a packed row; return the logits after each of its runs, (runs, vocabulary)."""
        last = inputs["logits_indices"]
        kept = {"logits_to_keep": last} if self.keeps_logits else {}
        with without_gradients(), self.routes.open(runs):
            self._place_virtual_tokens(inputs, runs)
            logits: Tensor = self.model(**inputs, **kept).logits[0]
        return logits if self.keeps_logits else logits[last]

    def _place_virtual_tokens(self, inputs: dict[str, Any], runs: Sequence[TokenRun]) -> None:
        """Exclude prefixes from the positions, and replace virtual ids with prompt embeddings."""
        start = 0
        for run in runs:
            own = self.adapters.get(run.adapter or "")
            if own is not None and own.virtual:
                at = slice(start, start + run.tokens)
                positions = inputs["position_ids"][:, at]
                inputs["position_ids"][:, at] = (positions - own.prefix).clamp_min(0)
                self._place_prompt(inputs, own, run, start)
            start += run.tokens

    def _place_prompt(
        self, inputs: dict[str, Any], own: PackedAdapter, run: TokenRun, start: int
    ) -> None:
        if own.prompt is None or run.first >= own.virtual:
            return
        if "inputs_embeds" not in inputs:
            embedded = self.model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = embedded.clone()
        embeds = inputs["inputs_embeds"]
        first = max(run.first, own.prefix)
        end = min(run.first + run.tokens, own.virtual)
        if first < end:
            at = slice(start + first - run.first, start + end - run.first)
            prompt = own.prompt[first - own.prefix : end - own.prefix]
            embeds[0, at] = prompt.to(embeds.device, embeds.dtype)

    # Trial: packed steps against single passes

    def _tried(self, adapter: Adapter | None) -> str:
        """Return the problem of packed steps, found by comparison with passes of one text each."""
        name = None if adapter is None else adapter.name
        vocabulary = self.model.config.get_text_config().vocab_size
        lengths = [length + _TRIED_STEPS for length in _TRIED]
        texts = [[(3 + 7 * i) % vocabulary for i in range(length)] for length in lengths]
        names = [f"{length} tokens" for length in lengths]
        expected = [self._alone(text, name) for text in texts]
        packed = self._packed(texts, name)
        compared = same(
            dict(zip(names, expected, strict=True)),
            dict(zip(names, packed, strict=True)),
            self.model.dtype,
        )
        problems = "; ".join(compared.problems)
        return f"packed steps compute other logits: {problems}" if problems else ""

    def _alone(self, text: Sequence[int], name: str | None) -> Tensor:
        ids = torch.tensor([text], device=self.model.device)
        context = disabled(self.model) if name is None else route(self.model, [name])
        with without_gradients(), context:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
        return logits[-1 - _TRIED_STEPS : -1]

    def _packed(self, texts: Sequence[Sequence[int]], name: str | None) -> list[Tensor]:
        self.trial = self.trial or PagedSteps(self.model, 256, 128, 8)
        virtual = self.virtual(name)
        for number, text in enumerate(texts):
            ids = [0] * virtual + list(text[:-_TRIED_STEPS])
            self.trial.add(str(number), ids, salt=f"{name} {number}")
        by_text: list[list[Tensor]] = [[] for _ in texts]
        try:
            for step in range(_TRIED_STEPS):
                rows = self.trial.schedule()
                runs = [TokenRun(name, row.tokens, row.first) for row in rows]
                logits = self.logits(self.trial.inputs(), runs).float()
                for row, own in zip(rows, logits, strict=True):
                    by_text[int(row.name)].append(own)
                chosen = [texts[int(row.name)][step - _TRIED_STEPS] for row in rows]
                self.trial.advance(rows, chosen)
        finally:
            for number in range(len(texts)):
                self.trial.drop(str(number), share=False)
        return [torch.stack(each) for each in by_text]


@dataclass(eq=False)
class ContinuousGenerator:
    """Generates the texts of one model in packed steps.

    Attributes:
        own: the model.
        packed: the model in packed steps.
        steps: the scheduler and the cache.
        counts: counts of events.
        running: the texts, by their names in `steps`.
    """

    own: ClassModel
    packed: PackedModel
    steps: PagedSteps
    counts: Counter[str]
    running: dict[str, TextRequest] = field(default_factory=dict)
    _processors: dict[str, Any] = field(default_factory=dict)
    _groups: dict[str | None, int] = field(default_factory=dict)
    _number: int = 0

    def add(self, request: TextRequest) -> None:
        """Add a request."""
        tokens = len(request.prompt.ids) + self.packed.virtual(request.served.row)
        room = self.steps.capacity - tokens
        if room < 1:
            request.generation.finish(
                TooLargeError(
                    f"a prompt of {tokens:,} tokens does not fit into the cache of generation",
                    expected=f"fewer than {self.steps.capacity:,}",
                    hint="a shorter prompt, or a larger cache_tokens",
                )
            )
            request.leave()
            return
        self._number += 1
        name = str(self._number)
        request.limit = min(request.limit, room)
        self.running[name] = request
        served = request.served
        group = self._groups.setdefault(served.row, len(self._groups))
        ids = [0] * self.packed.virtual(served.row) + request.prompt.ids
        self.steps.add(name, ids, salt=served.name if served.row else "", group=group)
        processors = own_processors(self.own.model, len(request.prompt.ids), request.limit)
        if processors:
            self._processors[name] = processors

    def forget(self, served: ServedAdapter) -> None:
        """Forget an adapter that was detached."""
        self._groups.pop(served.row, None)
        self.packed.forget(str(served.row))

    @property
    def busy(self) -> bool:
        """Whether texts are in progress."""
        return bool(self.running)

    def step(self) -> None:
        """Compute the next token of each text, or a part of its prompt."""
        self._drop_ended()
        if not self.running:
            return
        try:
            self._compute(self.steps.schedule())
        except Exception as error:  # of the scheduler or the cache: the text at fault is unknown
            for request in self.running.values():
                request.generation.finish(error)
        self._drop_ended()

    def _compute(self, rows: Sequence[PagedRow]) -> None:
        if not rows:
            raise ServingError("no text can be written, though none has ended")
        for row in rows:
            self.running[row.name].begin()
        chosen = self._chosen(rows)
        giving = [(row, token) for row, token in zip(rows, chosen, strict=True) if row.gives]
        self.counts["steps"] += 1
        self.counts["generated_tokens"] += len(giving)
        self.counts["step_tokens"] += sum(row.tokens for row in rows)
        self.steps.advance(rows, [0 if token is None else token.id for _, token in giving])
        for row, token in zip(rows, chosen, strict=True):
            if row.gives or token is None:
                self.running[row.name].accept(token)
                if token is None:
                    self._drop(row.name, share=False)

    def _drop_ended(self) -> None:
        for name, request in list(self.running.items()):
            if request.expire():
                self._drop(name)

    def _drop(self, name: str, *, share: bool = True) -> None:
        self.steps.drop(name, share=share)
        self._processors.pop(name, None)
        self.running.pop(name).leave()

    def _chosen(self, rows: Sequence[PagedRow]) -> list[ChosenToken | None]:
        """Return a token for each row; None for rows that cannot be computed."""
        runs = [TokenRun(self.running[r.name].served.row, r.tokens, r.first) for r in rows]
        try:
            logits = self.packed.logits(self.steps.inputs(), runs)
            chosen = self._tokens(rows, logits)
            if None not in chosen:
                return chosen
        except Exception:  # one of the rows may be at fault
            self.counts["failed_steps"] += 1
        return self._each_alone(rows, runs)

    def _each_alone(
        self, rows: Sequence[PagedRow], runs: Sequence[TokenRun]
    ) -> list[ChosenToken | None]:
        """Compute each row of a step alone: a faulty row may have affected all of them."""
        chosen: list[ChosenToken | None] = []
        for number, (row, run) in enumerate(zip(rows, runs, strict=True)):
            try:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                logits = self.packed.logits(self.steps.inputs_of(rows, number), [run])
                chosen += self._tokens([row], logits)
            except Exception as error:
                fail_alone(self.running[row.name], error)
                chosen.append(None)
        return chosen

    def _tokens(self, rows: Sequence[PagedRow], logits: Tensor) -> list[ChosenToken | None]:
        """Choose a token for each row; tokens within a prompt are not chosen."""
        requests = [self.running[row.name] for row in rows]
        if any(row.name in self._processors for row in rows):
            scores = zip(rows, requests, logits.float()[:, None], strict=True)
            logits = torch.cat([self._processed(*each) for each in scores])
        return choose_tokens(logits, [request.next for request in requests])

    def _processed(self, row: PagedRow, request: TextRequest, scores: Tensor) -> Tensor:
        """Return the scores of a text after the logits processors of `generate`."""
        if not row.gives or row.name not in self._processors:
            return scores
        ids = torch.tensor([[*request.prompt.ids, *request.generated]], device=scores.device)
        changed: Tensor = self._processors[row.name](ids, scores)
        return changed


def continuous_generator(
    own: ClassModel, tokens: int, batch_tokens: int, counts: Counter[str]
) -> ContinuousGenerator | str:
    """Return a generator of packed steps for a model, or the reason why it has none."""
    if problem := paged_problem(own.model):
        return problem
    packed = PackedModel(own.model)
    if problem := packed.problem(None):
        return problem
    size = min(batch_tokens, MOST_BATCH_TOKENS)
    try:
        steps = PagedSteps(own.model, tokens, size, min(size, MOST_ROWS))
    except (MemoryError, RuntimeError) as error:
        warn_user(f"texts are generated in batches; the cache does not fit in memory: {error}")
        return str(error)
    return ContinuousGenerator(own, packed, steps, counts)
