"""What a hub counts of its requests, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class HubMetrics:
    """Counts requests by endpoint and status, and the time that they take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._within: Counter[float] = Counter()
        self._seconds = 0.0

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        with self._lock:
            self._requests[method, path, status] += 1
            self._seconds += seconds
            for bound in _BOUNDS:
                if seconds <= bound:
                    self._within[bound] += 1

    def text(self, gauges: dict[str, int]) -> str:
        """Return all that was counted, and some numbers of the hub."""
        with self._lock:
            requests, within = sorted(self._requests.items()), dict(self._within)
            seconds, total = self._seconds, sum(self._requests.values())
        lines = ["# TYPE adapterhub_hub_requests_total counter"]
        lines += [
            f'adapterhub_hub_requests_total{{method="{m}",path="{p}",status="{s}"}} {n}'
            for (m, p, s), n in requests
        ]
        lines.append("# TYPE adapterhub_hub_request_seconds histogram")
        lines += [
            f'adapterhub_hub_request_seconds_bucket{{le="{bound}"}} {within.get(bound, 0)}'
            for bound in _BOUNDS
        ]
        lines += [
            f'adapterhub_hub_request_seconds_bucket{{le="+Inf"}} {total}',
            f"adapterhub_hub_request_seconds_sum {seconds:.6f}",
            f"adapterhub_hub_request_seconds_count {total}",
        ]
        for name, value in gauges.items():
            lines += [f"# TYPE adapterhub_hub_{name} gauge", f"adapterhub_hub_{name} {value}"]
        return "\n".join(lines) + "\n"
