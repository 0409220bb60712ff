"""Measure how many adapters one process can hold, and what each further one costs.

    python benchmarks/many_adapters.py [--most 1000]
    python benchmarks/many_adapters.py --table

The backbone is random, of the size of all-MiniLM-L6-v2. LoRA adapters of rank 8 are attached one
after the other; at each power of ten it prints the memory of the process per adapter, the time to
attach the next one, to activate another one, of a forward pass with one active, and of a batch
whose rows go through eight of them. Times are processor time, the median of the runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import records
import torch
from routing import MINILM
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

import adapterhub as ah

ROWS, TOKENS, ROUTES, RUNS = 8, 64, 8, 9


def milliseconds(call: Callable[[int], object]) -> float:
    """Return the median processor time of a call, which gets the number of its run."""
    times = []
    for run in range(RUNS):
        start = time.process_time()
        call(run)
        times.append((time.process_time() - start) * 1e3)
    return round(statistics.median(times), 2)


def state(model: PreTrainedModel, count: int) -> dict[str, float]:
    """Return the times with so many adapters attached: `number 0`, `number 1`, ..."""
    ids = torch.randint(5, 30_000, (ROWS, TOKENS))
    names = [f"number {n * (count - 1) // ROUTES}" for n in range(ROWS)]

    def forward(_: int) -> None:
        with torch.inference_mode():
            model(input_ids=ids)

    def routed(_: int) -> None:
        with torch.inference_mode(), ah.route(model, names):
            model(input_ids=ids)

    def bare(_: int) -> None:
        with torch.inference_mode(), ah.disabled(model):
            model(input_ids=ids)

    for call in (forward, routed, bare):
        call(0)
    return {
        "activate": milliseconds(lambda run: ah.activate(model, f"number {run % count}")),
        "bare": milliseconds(bare),
        "forward": milliseconds(forward),
        "routed": milliseconds(routed),
    }


def measure(most: int) -> list[dict[str, float]]:
    """Attach adapters up to a number, and return what was measured at each power of ten."""
    config = AutoConfig.for_model("bert", **MINILM, num_labels=2)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    process, found, attached = psutil.Process(), list[dict[str, float]](), 0
    before = process.memory_info().rss
    for count in [10**n for n in range(10) if 10**n <= most]:
        start = time.process_time()
        for number in range(attached, count):
            ah.attach(model, "lora", name=f"number {number}")
        took = (time.process_time() - start) * 1e3 / (count - attached)
        attached = count
        held = (process.memory_info().rss - before) / count / 1e3
        found.append({"adapters": count, "kB": round(held, 1), "attach": round(took, 2)})
        found[-1] |= state(model, count)
        print(found[-1], flush=True)
    return found


def table() -> str:
    """Return the Markdown table of the record."""
    columns = (
        "adapters",
        "memory of each",
        "attach one",
        "activate one",
        "forward",
        "eight routes",
    )
    rows = [
        (f"{row['adapters']:,}", f"{row['kB']:,.0f} kB", *(
            f"{row[name]:,.1f} ms" for name in ("attach", "activate", "forward", "routed")
        ))
        for row in (records.read("many_adapters") or {"measured": []})["measured"]
    ]  # fmt: skip
    return records.markdown(columns, rows)


def main() -> None:
    """Measure and write the record, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "rows": ROWS,
        "tokens": TOKENS,
        "load": os.getloadavg()[0],
        "device": f"CPU ({platform.machine()}), 1 thread",
        "measured": measure(options.most),
    }
    records.write("many_adapters", record)


if __name__ == "__main__":
    main()
