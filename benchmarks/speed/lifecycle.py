"""Measure what is done to adapters between batches: swap, load and attach, against `peft`.

    python benchmarks/speed/lifecycle.py [--output lifecycle.json]

The backbone is random, of the size of all-MiniLM-L6-v2 (6 layers, width 384). Each operation is
timed with 2 and with 64 adapters attached (LoRA on queries and values), ours and `peft`'s in one
process, in turn: the median over the runs and the quartiles, in milliseconds.

    swap     make another attached adapter the active one: `ah.activate`, `set_adapter`
    load     attach a saved adapter: `ah.load`, which checks the backbone; `load_adapter`
    attach   attach a new adapter: `ah.attach`, `add_adapter`

What load and attach add is removed again, outside of the time. The first load on a model reads all
of its values, and is timed on its own.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from in_turns import CLOCKS, MINILM, add_options, write_record
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah

ATTACHED = (2, 64)  # a swap needs two
# By name: what is timed, and what undoes it.
Operations = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_record(options, measure(options))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all operations with each number of adapters attached."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **MINILM)
    plain: Any = AutoModelForSequenceClassification.from_config(config).eval()
    clock, results = CLOCKS[options.clock], {}
    with tempfile.TemporaryDirectory() as folder:
        for attached in ATTACHED:
            operations, first = our_operations(copy.deepcopy(plain), attached, folder, clock)
            operations |= peft_operations(copy.deepcopy(plain), attached, folder)
            results[f"{attached} attached"] = {
                "first load on a model": {"median": round(1000 * first, 2)}
            } | timed(operations, options.runs, clock)
    return results


def our_operations(
    model: Any, attached: int, folder: str, clock: Callable[[], float]
) -> tuple[Operations, float]:
    """Return our operations, and the seconds of the first load on this model."""
    names, bare = [f"adapter {n}" for n in range(attached)], copy.deepcopy(model)
    for name in names:
        adapter = ah.attach(model, "lora", name=name)
    saved = Path(folder) / f"ours-{attached}"
    adapter.save(saved)
    start = clock()
    ah.load(bare, saved)
    first = clock() - start
    turn = turns(names)
    operations: Operations = {
        "swap": (lambda: ah.activate(model, next(turn)), lambda: None),
        "load": (
            lambda: ah.load(model, saved, name="another"),
            lambda: ah.detach(model, "another"),
        ),
        "attach": (
            lambda: ah.attach(model, "lora", name="another"),
            lambda: ah.detach(model, "another"),
        ),
    }
    return operations, first


def peft_operations(model: Any, attached: int, folder: str) -> Operations:
    """Return peft's operations."""
    names = [f"adapter{n}" for n in range(attached)]
    config = peft.LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
    wrapped: Any = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    saved = Path(folder) / f"peft-{attached}"
    wrapped.save_pretrained(saved, selected_adapters=[names[-1]])
    source, turn = saved / names[-1], turns(names)
    remove = lambda: wrapped.delete_adapter("another")  # noqa: E731
    return {
        "swap, peft": (lambda: wrapped.set_adapter(next(turn)), lambda: None),
        "load, peft": (lambda: wrapped.load_adapter(source, "another"), remove),
        "attach, peft": (lambda: wrapped.add_adapter("another", config), remove),
    }


def turns(names: list[str]) -> Any:
    """Yield names in turn, without end."""
    while True:
        yield from names


def timed(
    operations: Operations, runs: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Time operations in turn; each is done twice before."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for run in range(runs + 2):
        for name, (operation, undo) in operations.items():
            start = clock()
            operation()
            seconds = clock() - start
            undo()
            if run >= 2:
                times[name].append(seconds)
    return {name: summary(values) for name, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Return the median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {
        name: round(1000 * value, 3)
        for name, value in {"median": middle, "low": low, "high": high}.items()
    }


if __name__ == "__main__":
    main()
