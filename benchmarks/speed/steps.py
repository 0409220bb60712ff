"""Time training steps of ours and of the library `adapters`, in turns.

    python benchmarks/speed/steps.py --adapters PYTHON [--output FILE]

PYTHON is the interpreter of an environment with `adapters`, which needs another transformers. Both
train a random BERT of the size of all-MiniLM-L6-v2; time does not depend on the values. Ours is
measured in fp32, and with the dtype and attention implementation that `adapterhub train` would
choose here. Each figure is the median over rounds of the median step of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah
from adapterhub.backbones.layer_timing import EAGER, SDPA, Kernels, LayerShape, time_kernels

METHODS = ("pfeiffer", "mam", "prefix", "lora")
CANDIDATES = [Kernels(d, a) for d in ("fp32", "bf16") for a in (SDPA, EAGER)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Measure and write the record, or, as a child process, time ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--adapters", metavar="PYTHON")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ours", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(time_ours(options, *options.ours))
        return
    text = json.dumps(record(options), indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Run all processes in turns, and return the milliseconds and the ratios."""
    times = time_kernels(LayerShape(options.rows, options.tokens, 384, 1536, 12), CANDIDATES)
    best = min(times, key=times.__getitem__)
    results: dict[str, dict[str, list[float]]] = {name: {} for name in METHODS}
    for _ in range(options.rounds):
        for method in METHODS:
            for name, command in commands(options, method, best).items():
                results[method].setdefault(name, []).append(run(command))
    medians = {m: {n: statistics.median(v) for n, v in r.items()} for m, r in results.items()}
    return {
        "milliseconds": results,
        "ratios": {m: {n: v / r["adapters"] for n, v in r.items()} for m, r in medians.items()},
        "chosen": best,
        "config": {"rows": options.rows, "tokens": options.tokens, "steps": options.steps},
        "versions": {"torch": torch.__version__, "adapterhub": ah.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def commands(options: argparse.Namespace, method: str, best: Kernels) -> dict[str, list[str]]:
    """Return the commands that time a method."""
    sizes = [str(n) for n in (options.rows, options.tokens, options.steps)]
    peer = str(Path(__file__).parent / "adapters_steps.py")
    flags = [f"--{n}={v}" for n, v in zip(("rows", "tokens", "steps"), sizes, strict=True)]
    ours = [sys.executable, __file__, *flags, "--ours", method]
    return {
        "adapters": [options.adapters, peer, method, *sizes],
        "ours fp32": [*ours, "fp32", SDPA],
        "ours chosen": [*ours, *best],
    }


def run(command: list[str]) -> float:
    """Run a process and return the number that it prints last."""
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(result.stdout.splitlines()[-1])


def time_ours(options: argparse.Namespace, method: str, dtype: str, attention: str) -> float:
    """Train a few steps and return the median milliseconds of one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=2, attn_implementation=attention,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config, dtype=DTYPES[dtype])
    adapter = ah.attach(model, method)
    adapter.train_mode(False)
    ids = torch.randint(1000, 20000, (options.rows, options.tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-5)
    times = []
    for _ in range(options.steps + 2):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])


if __name__ == "__main__":
    main()
