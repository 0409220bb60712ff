"""What an adapter costs at inference: the time of a forward pass, and of loading its files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import detach
from adapterhub.adapters.attached import disabled
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import route
from adapterhub.errors import AdapterhubError
from adapterhub.merging.merge import blockers

PASSES = 7
_PROBE = "bench-load"  # the name of the adapter that is loaded to time it


def measure_overhead(
    adapter: Adapter, batch: dict[str, torch.Tensor], folder: Path
) -> dict[str, Any]:
    """Time forward passes in turns, and loading; return fields of `Costs`.

    Args:
        adapter: the active adapter.
        batch: the inputs of a pass.
        folder: the saved adapter.
    """
    relative = pass_ratios(adapter, batch, PASSES)
    return {
        **relative,
        "merges": not blockers(adapter),
        "load_seconds": loading_seconds(adapter, folder),
    }


def pass_ratios(adapter: Adapter, batch: dict[str, torch.Tensor], passes: int) -> dict[str, float]:
    """Time forward passes in turns: attached and routed, each relative to the bare backbone.

    Args:
        adapter: the active adapter.
        batch: the inputs of a pass.
        passes: in each way; the first one does not count.
    """
    model = adapter.model
    rows = [adapter.name if number % 2 else None for number in range(len(batch["input_ids"]))]
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "bare": lambda: disabled(model),
        "attached": nullcontext,
        "routed": lambda: route(model, rows),
    }

    def run() -> None:
        model(**batch)
        wait_for(model.device)

    seconds = _time(run, ways, passes)
    bare = seconds.get("bare")
    return {n: s / bare for n, s in seconds.items() if bare and n != "bare"}


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(
    run: Callable[[], Any],
    ways: dict[str, Callable[[], AbstractContextManager[Any]]],
    passes: int,
) -> dict[str, float]:
    """Return the median time of a pass in each way, of those that are possible."""
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(passes):
            for name, way in ways.items():
                try:
                    with way():
                        start = time.perf_counter()
                        run()
                        times.setdefault(name, []).append(time.perf_counter() - start)
                except AdapterhubError:  # such as a route of a method that changes the backbone
                    continue
    return {name: statistics.median(each[1:] or each) for name, each in times.items()}


def loading_seconds(adapter: Adapter, folder: Path) -> float | None:
    """Return the seconds of loading an adapter once more; the identity is then known."""
    model, seconds = adapter.model, None
    for _ in range(2):
        start = time.perf_counter()
        try:
            load_folder(model, folder, name=_PROBE, on=adapter.foundations())
        except AdapterhubError:
            return None
        seconds = time.perf_counter() - start
        detach(model, _PROBE)
    return seconds
