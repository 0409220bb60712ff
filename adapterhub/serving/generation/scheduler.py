"""Texts of an engine by model, generated in packed steps or in batches of `generate`."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from adapterhub.adapters.route import unpackable
from adapterhub.serving.generation.batched import (
    BatchGenerator,
    TextGenerator,
    TextRequest,
    attached_adapter,
)
from adapterhub.serving.generation.continuous import ContinuousGenerator, continuous_generator
from adapterhub.serving.generation.paged import PAGE
from adapterhub.serving.shared_backbone import ClassModel, ServedAdapter

# The most tokens of a step, and the most tokens in the cache: on a CPU, and elsewhere.
BATCH_TOKENS, CACHE_TOKENS = (192, 2048), (1 << 14, 1 << 16)


class TextGenerators:
    """The texts that an engine generates.

    Args:
        batch_tokens: the most positions of a batch of prompts, and the most tokens of a packed
            step; None: as many as the device computes efficiently at once.
        cache_tokens: the most tokens of a model whose keys and values are kept; None: as above.
        between: lets the engine compute batches of other models.
        counts: counts of events.
    """

    def __init__(
        self,
        batch_tokens: int | None,
        cache_tokens: int | None,
        between: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        elsewhere = torch.cuda.is_available()
        self.positions = batch_tokens or BATCH_TOKENS[elsewhere]
        self.cache_tokens = cache_tokens or CACHE_TOKENS[elsewhere]
        self.between, self.counts = between, counts
        self.waiting: deque[TextRequest] = deque()  # any thread adds, the compute thread removes
        self.unfinished: set[TextRequest] = set()
        self.batches: dict[ClassModel, BatchGenerator] = {}
        self.continuous: dict[ClassModel, ContinuousGenerator | str] = {}  # or its problem
        self.computing: list[ClassModel] = []  # the models with a step in progress
        self._decoders: dict[ClassModel, Any] = {}

    @property
    def busy(self) -> bool:
        """Whether there are texts to generate."""
        return bool(self.waiting) or any(each.busy for _, each in self._all())

    def _all(self) -> Iterator[tuple[ClassModel, TextGenerator]]:
        yield from list(self.batches.items())
        for own, generator in list(self.continuous.items()):
            if isinstance(generator, ContinuousGenerator):
                yield own, generator

    def cache_use(self) -> tuple[int, int]:
        """Return the number of tokens in the caches of all models, and their capacity."""
        steps = [each.steps for _, each in self._all() if isinstance(each, ContinuousGenerator)]
        return sum(each.used_pages * PAGE for each in steps), sum(each.capacity for each in steps)

    def step(self) -> None:
        """Compute the next tokens of the texts of all models that are not computing now."""
        self._distribute()
        for own, generator in self._all():
            if generator.busy and own not in self.computing:
                self.computing.append(own)
                try:
                    generator.step()
                finally:
                    self.computing.remove(own)

    def _distribute(self) -> None:
        """Assign the waiting requests to the generators of their models."""
        kept: list[TextRequest] = []
        while self.waiting:
            request = self.waiting.popleft()
            own = request.served.model
            assert isinstance(own, ClassModel)
            if request.expire():
                request.leave()
            elif own in self.computing:  # its adapters cannot be tried during its step
                kept.append(request)
            else:
                self._give(own, request)
        self.waiting.extendleft(reversed(kept))

    def _give(self, own: ClassModel, request: TextRequest) -> None:
        try:
            self._generator(own, request).add(request)
        except Exception as error:
            request.generation.finish(error)
            request.leave()

    def _generator(self, own: ClassModel, request: TextRequest) -> TextGenerator:
        adapter = attached_adapter(request.served)
        if request.scores_prompt or (adapter is not None and unpackable(adapter)):
            return self._batches_of(own)
        if own not in self.continuous:
            self.continuous[own] = continuous_generator(
                own, self.cache_tokens, self.positions, self.counts
            )
        packed = self.continuous[own]
        if isinstance(packed, ContinuousGenerator) and not packed.packed.problem(adapter):
            return packed
        return self._batches_of(own)

    def _batches_of(self, own: ClassModel) -> BatchGenerator:
        if own not in self.batches:
            self.batches[own] = BatchGenerator(own, self.positions, self.between, self.counts)
        return self.batches[own]

    def forget(self, served: ServedAdapter) -> None:
        """Forget an adapter that was detached, and its separate model if it had one."""
        own = served.model
        if not isinstance(own, ClassModel):
            return
        packed = self.continuous.get(own)
        if isinstance(packed, ContinuousGenerator):
            packed.forget(served)
        if served.alone:
            self.batches.pop(own, None)
            self.continuous.pop(own, None)
            self._decoders.pop(own, None)

    def decoder(self, own: ClassModel) -> Any:
        """Return a tokenizer for decoding that no thread encodes with."""
        if own not in self._decoders:
            with own.encoding:
                self._decoders[own] = copy.deepcopy(own.tokenizer)
        return self._decoders[own]

    def close(self) -> None:
        """Drop all models."""
        self.batches, self.continuous, self._decoders = {}, {}, {}

    def fail(self, error: Exception) -> None:
        """End all texts with an error."""
        for request in list(self.unfinished):
            request.generation.finish(error)
