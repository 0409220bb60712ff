"""Measure a training step of every method against full fine-tuning and the bare forward pass.

    python benchmarks/method_cost.py [--output benchmarks/results/method_cost.json]

Each method has its own copy of a random BERT, by default of the size of all-MiniLM-L6-v2 (6 layers,
width 384): time does not depend on the values. The variants alternate in one process, so that drift
affects all of them equally. A step is forward, backward, AdamW; methods with stages are measured
with all of their parameters training. Each figure is the median time of one step over the runs, in
milliseconds; on a CPU it is processor time, which other processes affect less than wall time. The
27 copies take about 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah
from adapterhub.methods import METHODS

FORWARD = "forward"


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = json.dumps(record(options, measure(options)), indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def record(options: argparse.Namespace, times: dict[str, float]) -> dict[str, Any]:
    """Return the times with the conditions; `about` is the sentence for the pages."""
    where = "a CPU core" if options.device == "cpu" else torch.cuda.get_device_name()
    return {
        "about": f"on a BERT with {options.layers} layers of width {options.width}, "
        f"{options.rows} rows of {options.tokens} tokens, fp32, {where}",
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "milliseconds": times,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return the median time of a forward pass and of a step of each method."""
    variants: dict[str, Callable[[], None]] = {FORWARD: forward_pass(options)}
    variants |= {name: training_step(name, options) for name in sorted(METHODS)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.runs + 2):
        for name, variant in variants.items():
            seconds = timed(variant, options.device)
            if number > 1:  # the first two runs allocate memory
                times[name].append(seconds)
    return {name: round(1000 * statistics.median(values), 3) for name, values in times.items()}


def classifier(options: argparse.Namespace) -> Any:
    """Build a random BERT with a head for three classes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=12, intermediate_size=4 * options.width, num_labels=3,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config).to(options.device)


def batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Make a batch without padding."""
    ids = torch.randint(1000, 20000, (options.rows, options.tokens), device=options.device)
    return {"input_ids": ids, "labels": torch.zeros(options.rows, dtype=torch.long).to(ids.device)}


def forward_pass(options: argparse.Namespace) -> Callable[[], None]:
    """Return a forward pass of the bare backbone, without gradients."""
    model, inputs = classifier(options).eval(), batch(options)

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    return forward


def training_step(name: str, options: argparse.Namespace) -> Callable[[], None]:
    """Return a training step of a method, with AdamW."""
    model, inputs = classifier(options), batch(options)
    adapter = ah.attach(model, METHODS[name].example())
    model.train()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    return step


def timed(variant: Callable[[], None], device: str) -> float:
    """Return the seconds of one run."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    variant()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
