"""Prometheus metrics of a server, in a separate collector registry.

Labels never contain values that a client chooses freely. Paths are the paths of endpoints. Only a
limited number of adapters, the first ones requested, have separate labels; the rest are `other`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from adapterhub.serving.engine import ComputedBatch, ServingEngine
    from adapterhub.serving.generation.request import GeneratedText

OTHER = "other"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75)
_TOKEN_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LABELS = ("path", "task", "adapter")


class ServerMetrics:
    """Metrics of a server.

    Args:
        engine: the engine that computes the results.
        adapters: the number of adapters with separate labels.
    """

    def __init__(self, engine: ServingEngine, adapters: int = 100) -> None:
        self.registry = CollectorRegistry()
        self._most, self._known = adapters, set[str]()
        self._by_labels: dict[tuple[str, ...], Any] = {}
        self._requests = self._counter("requests", "Requests that were answered.", *_LABELS)
        self._errors = self._counter("errors", "Requests that failed.", *_LABELS, "status")
        self._inputs = self._counter("inputs", "Inputs of answered requests.", *_LABELS)
        self._seconds = self._histogram("request_seconds", "Time to an answer.", _SECONDS, *_LABELS)
        self._rows = self._histogram("batch_rows", "Rows that were computed at once.", _ROWS)
        self._padding = self._histogram("batch_padding", "Share of padding in a batch.", _SHARES)
        self._forward = self._histogram("forward_seconds", "Time to compute a batch.", _SECONDS)
        self._first = self._histogram(
            "first_token_seconds", "Time to the first token of a text.", _SECONDS
        )
        self._rate = self._histogram(
            "tokens_per_second", "Tokens of a text in a second.", _TOKEN_RATES
        )
        self._generated = self._counter("generated_tokens", "Tokens of texts that were written.")
        self.registry.register(_EngineCollector(engine, adapters))
        ProcessCollector(registry=self.registry)
        engine.on_batch = self.observe_batch

    def adapter_label(self, reference: str) -> str:
        """Return the label of an adapter: its reference, or `other`."""
        if reference not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(reference)
        return reference

    def observe_request(
        self, path: str, task: str, reference: str, status: int, seconds: float, inputs: int
    ) -> None:
        """Count an answered request."""
        labels = (path, task, self.adapter_label(reference) if reference else "")
        children = self._by_labels.get(labels)
        if children is None:
            metrics = (self._requests, self._inputs, self._seconds)
            children = self._by_labels[labels] = tuple(each.labels(*labels) for each in metrics)
        children[0].inc()
        if inputs:
            children[1].inc(inputs)
        children[2].observe(seconds)
        if status >= 400:
            self._errors.labels(*labels, str(status)).inc()

    def observe_batch(self, batch: ComputedBatch) -> None:
        """Record the metrics of a batch; called in the compute thread."""
        self._rows.observe(batch.rows)
        self._padding.observe(1 - batch.tokens / max(batch.positions, 1))
        self._forward.observe(batch.seconds)

    def observe_text(self, text: GeneratedText) -> None:
        """Record the time to the first token and the token count of a generated text."""
        self._generated.inc(text.completion_tokens)
        self._first.observe(text.first_token_seconds)
        if text.seconds > 0:
            self._rate.observe(text.completion_tokens / text.seconds)

    def answered(self, reference: str) -> tuple[int, int, int, float]:
        """Return requests, failures, inputs and seconds of an adapter with a separate label."""
        label = self.adapter_label(reference)
        totals = dict.fromkeys(("requests_total", "errors_total", "inputs_total"), 0.0)
        totals["request_seconds_sum"] = 0.0
        for metric in (self._requests, self._errors, self._inputs, self._seconds):
            for sample in (each for family in metric.collect() for each in family.samples):
                name = sample.name.removeprefix("adapterhub_")
                if name in totals and sample.labels["adapter"] == label:
                    totals[name] += sample.value
        requests, errors, inputs, seconds = totals.values()
        return int(requests), int(errors), int(inputs), seconds

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"adapterhub_{name}", description, labels, registry=self.registry)

    def _histogram(
        self, name: str, description: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"adapterhub_{name}", description, labels, registry=self.registry, buckets=buckets
        )


class _EngineCollector(Collector):
    """Collector that reads the engine's counters at each scrape."""

    def __init__(self, engine: ServingEngine, most: int) -> None:
        self.engine, self.most = engine, most

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine."""
        engine, adapters = self.engine, self.engine.adapters
        uses = engine.models()
        gauges = {
            "queue_requests": ("Requests that wait.", engine.queued_requests),
            "queue_tokens": ("Tokens of requests that wait.", engine.queued_tokens),
            "adapters_in_memory": ("Adapters in memory.", len(uses)),
            "adapter_bytes": ("Bytes of adapters in memory.", sum(each.bytes for each in uses)),
            "texts_running": ("Texts that are being written.", engine.running_texts),
            "cache_tokens_used": ("Tokens whose keys are kept.", engine.cache_use()[0]),
            "cache_tokens": ("Tokens whose keys can be kept.", engine.cache_use()[1]),
            "up": ("Whether requests are computed.", int(engine.is_alive)),
        }
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(f"adapterhub_{name}", description, value=value)
        versions = InfoMetricFamily("adapterhub_adapter", "Versions of adapters in memory.")
        for served in list(adapters.in_memory())[: self.most]:
            name, _, version = served.reference.rpartition("@")
            labels = {"adapter": name or version, "version": version if name else ""}
            versions.add_metric((), {**labels, "digest": served.digest[:12], "task": served.task})
        yield versions
        counts: dict[str, tuple[str, float]] = {
            "adapter_loads": ("Adapters loaded.", adapters.counts["loads"]),
            "adapter_load_seconds": ("Time to load adapters.", adapters.load_seconds),
            "adapter_evictions": ("Adapters that left memory.", adapters.counts["evictions"]),
            "adapter_refreshes": ("References that moved.", adapters.counts["refreshes"]),
            "adapter_failed_refreshes": (
                "New versions that could not be loaded.",
                adapters.counts["failed_refreshes"],
            ),
            "batches": ("Batches computed.", engine.counts["batches"]),
            "batches_halved": ("Batches that did not fit into memory.", engine.counts["halved"]),
            "tokens": ("Tokens computed.", engine.counts["tokens"]),
            "expired": ("Requests whose deadline passed.", engine.counts["expired"]),
            "refused": ("Requests that the queue had no room for.", engine.counts["refused"]),
            "cancelled": ("Requests whose client left.", engine.counts["cancelled"]),
        }
        for name, (description, count) in counts.items():
            yield CounterMetricFamily(f"adapterhub_{name}", description, value=count)
