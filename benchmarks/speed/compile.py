"""Time training steps with the layers compiled (`train.compile`) and as they are, in turns.

    python benchmarks/speed/compile.py [--threads 2 --clock wall] [--output compile.json]

LoRA (r = 8 on q and v) on a random BERT of the size of all-MiniLM-L6-v2, for each dtype and
attention implementation, and each number of tokens in a row:

    plain, compiled    the median milliseconds of a step, with the quartiles
    ratio              compiled / plain
    compilation        seconds on the wall until the layers are compiled: the first time, and again
                       with what the compiler kept on disk
    pays after         so many steps, from which on a first run is faster; null: never

One model is compiled, for all lengths; the other is not. `graphs` counts the compilations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from in_turns import CLOCKS, MINILM, add_options, write_record
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed.compiled_layers import compiled_layers

KERNELS = ("bf16 eager", "fp32 sdpa")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 3  # steps


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[13, 64])
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for kernels in options.kernels:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            results[kernels] = measure(kernels, options)
    write_record(options, results)


def measure(kernels: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compile one of two models, train both in turns, and compile again."""
    plain, compiled = build(*kernels.split()), build(*kernels.split())
    batches = {tokens: batch(options.rows, tokens) for tokens in options.tokens}
    trial = Trial(with_and_without_padding(batches[options.tokens[0]]))
    result: dict[str, Any] = {"compilation": {}}
    for name in ("first", "again"):
        torch._dynamo.reset()
        counters.clear()
        notes: list[str] = []
        on = RunOptions(compile=True)
        layers = compiled_layers(compiled, on, lambda: trial, notes.append)
        with Speedups([layers] if layers else [], notes.append) as speedups:
            start = time.perf_counter()
            speedups.enter(Engine(AdapterTrainee(compiled), on))
            result["compilation"][name] = round(time.perf_counter() - start, 1)
            if name == "first":
                for tokens, inputs in batches.items():
                    times = in_turns(plain, compiled, inputs, options)
                    result[f"{tokens} tokens"] = times | pays(times, result["compilation"][name])
        result["graphs"] = counters["stats"]["unique_graphs"]
        result["note"] = notes[0]
    return result


def build(dtype: str, attention: str) -> Adapter:
    """Return a LoRA adapter on a random classifier, ready to train."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **MINILM, num_labels=2, attn_implementation=attention)
    model = AutoModelForSequenceClassification.from_config(config, dtype=DTYPES[dtype])
    adapter = ah.attach(model, "lora")
    adapter.train_mode(False)
    return adapter


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return a batch whose first row is padded."""
    ids = torch.randint(1000, 20000, (rows, tokens))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def in_turns(
    plain: Adapter, compiled: Adapter, inputs: dict[str, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the milliseconds of steps of both, and their ratio.

    Args:
        plain: an adapter on a model as it is.
        compiled: one on a model whose layers are compiled.
        inputs: the batch.
        options: the number of runs, and the clock.
    """
    steps = {"plain": trainer(plain, inputs), "compiled": trainer(compiled, inputs)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = CLOCKS[options.clock]
    for _ in range(options.runs + WARM_UP):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(1000 * (clock() - start))
    found: dict[str, Any] = {name: summary(each[WARM_UP:]) for name, each in times.items()}
    return found | {"ratio": round(found["compiled"]["median"] / found["plain"]["median"], 3)}


def trainer(adapter: Adapter, inputs: dict[str, Tensor]) -> Callable[[], None]:
    """Return a function that takes one optimizer step."""
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-5)

    def step() -> None:
        adapter.model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}


def pays(times: dict[str, Any], seconds: float) -> dict[str, int | None]:
    """Return after how many steps compilation has paid."""
    saved = times["plain"]["median"] - times["compiled"]["median"]
    return {"pays after": round(1000 * seconds / saved) if saved > 0 else None}


if __name__ == "__main__":
    main()
