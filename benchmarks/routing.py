"""Measure a routed batch (a different LoRA per row) against one adapter and one batch per adapter.

    python benchmarks/routing.py [--output benchmarks/results/routing.json]
    python benchmarks/routing.py --table

The backbone is random, of the size of all-MiniLM-L6-v2 (6 layers, width 384): time does not depend
on the values. Each figure is the median time of one forward pass over the runs, in milliseconds. On
a CPU it is processor time, which is less affected by other processes than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import records
import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="lora")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    torch.set_num_threads(options.threads)
    record = {
        "config": {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(options).items()
            if k != "table"
        },
        "milliseconds": measure(options),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def table() -> str:
    """Return the Markdown table of the record."""
    times = (records.read("routing") or {"milliseconds": {}})["milliseconds"]
    rows = [(name, f"{ms:.0f} ms", f"{ms / times['bare']:.2f}") for name, ms in times.items()]
    return records.markdown(("forward pass", "time", "of bare"), rows)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time each variant; they alternate, so that drift affects all of them equally."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("bert", **MINILM)
    )
    model.eval().to(options.device)
    ids = torch.randint(1000, 20000, (options.rows, options.tokens), device=options.device)
    bare = lambda: model(ids)  # noqa: E731
    times: dict[str, list[float]] = {"bare": []}
    for _ in range(options.runs):
        times["bare"].append(timed(bare, options.device))
    names = [f"adapter {i}" for i in range(options.adapters)]
    for name in names:
        adapter = ah.attach(model, options.method, name=name)
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    mixed = [names[i % len(names)] for i in range(options.rows)]

    def one() -> None:
        ah.activate(model, names[0])
        model(ids)

    def routed(rows: list[str]) -> None:
        with ah.route(model, rows):
            model(ids)

    def apart() -> None:
        for i, name in enumerate(names):
            ah.activate(model, name)
            model(ids[i :: len(names)])

    variants = {
        "one adapter": one,
        "routed": lambda: routed(mixed),
        "routed, rows sorted": lambda: routed(sorted(mixed)),
        "a batch for each adapter": apart,
    }
    for variant in (*variants.values(), *variants.values()):
        timed(variant, options.device)
    for _ in range(options.runs):
        for name, variant in variants.items():
            times.setdefault(name, []).append(timed(variant, options.device))
    return {name: round(1000 * statistics.median(values), 2) for name, values in times.items()}


def timed(variant: Any, device: str) -> float:
    """Return the seconds of one run."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    with torch.no_grad():
        start = clock()
        variant()
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - start


if __name__ == "__main__":
    main()
