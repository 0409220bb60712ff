"""Measure a routed batch, a different LoRA for each row, against the plain model and `peft`.

    python benchmarks/speed/routing.py [--output routing.json]

The backbone is random, of the size of all-MiniLM-L6-v2 (6 layers, width 384): time does not depend
on the values. The ranks of the adapters differ (4 to 16). Each figure is the median of one forward
pass without gradients over the runs, in milliseconds, with the quartiles. The variants alternate in
one process, so that drift of the machine affects all of them equally; `peft` has the same adapters
and gets them as `adapter_names=`. By default the clock is the processor's, which other processes
disturb less; with several threads use `--clock wall`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import peft
import torch
from in_turns import CLOCKS, MINILM, add_options, write_record
from transformers import AutoConfig, AutoModelForSequenceClassification

import adapterhub as ah

RANKS = range(4, 17)
SIZES = {"lora": "rank", "pfeiffer": "size", "parallel": "size", "houlsby": "size",
         "prefix": "length"}  # fmt: skip
Variants = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="lora", help="of our adapters; peft's are LoRA")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--resident", type=int, default=1000, help="adapters in the last variant")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_record(options, measure(options))


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time all variants, in two rounds: the second with many more adapters attached."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **MINILM)
    plain: Any = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.randint(1000, 20000, (options.rows, options.tokens))
    ours, names = copy.deepcopy(plain), attach_all(options.method, options.rows)
    for each in names:
        attach(ours, options.method, each, names[each])
    variants = {"plain": lambda: plain(ids), **our_variants(ours, list(names), ids)}
    if options.method == "lora":
        variants |= peft_variants(copy.deepcopy(plain), options.rows, ids)
    times = timed(variants, options)
    for n in range(len(names), options.resident):
        attach(ours, options.method, f"more {n}", None)
    last = f"{options.rows} distinct"
    resident = {"plain": variants["plain"], f"{last}, {options.resident} resident": variants[last]}
    more = timed(resident, options)
    scale = statistics.median(times["plain"]) / statistics.median(more.pop("plain"))
    times |= {name: [scale * t for t in values] for name, values in more.items()}
    base = statistics.median(times["plain"])
    return {name: summary(values, base) for name, values in times.items()}


def attach_all(method: str, rows: int) -> dict[str, int | None]:
    """Return the names of the adapters with their ranks, None for a method without sizes."""
    sized = method in SIZES
    return {f"adapter {n}": RANKS[n % len(RANKS)] if sized else None for n in range(rows)}


def attach(model: Any, method: str, name: str, size: int | None) -> None:
    """Attach an adapter with random values."""
    adapter = ah.attach(model, method, name=name, **({SIZES[method]: size} if size else {}))
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.02)


def our_variants(model: Any, names: list[str], ids: torch.Tensor) -> Variants:
    """Return forward passes with one active adapter, and with routes of 4 and of all adapters."""

    def one() -> None:
        ah.activate(model, names[0])
        model(ids)

    def routed(distinct: int) -> None:
        with ah.route(model, [names[row % distinct] for row in range(len(ids))]):
            model(ids)

    return {
        "one active": one,
        "4 distinct": lambda: routed(4),
        f"{len(ids)} distinct": lambda: routed(len(ids)),
    }


def peft_variants(model: Any, rows: int, ids: torch.Tensor) -> Variants:
    """Return the same passes with peft."""
    names = [f"adapter{n}" for n in range(rows)]
    wrapped: Any = None
    for n, name in enumerate(names):
        config = peft.LoraConfig(r=RANKS[n % len(RANKS)], target_modules=["query", "value"])
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
    wrapped.eval()
    wrapped.set_adapter(names[0])

    def mixed(distinct: int) -> None:
        wrapped(ids, adapter_names=[names[row % distinct] for row in range(rows)])

    return {
        "peft, one active": lambda: wrapped(ids),
        "peft, 4 distinct": lambda: mixed(4),
        f"peft, {rows} distinct": lambda: mixed(rows),
    }


def timed(variants: Variants, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each run of each variant; they alternate."""
    clock, times = CLOCKS[options.clock], {name: list[float]() for name in variants}
    with torch.no_grad():
        for variant in (*variants.values(), *variants.values()):
            variant()
        for _ in range(options.runs):
            for name, variant in variants.items():
                start = clock()
                variant()
                times[name].append(clock() - start)
    return times


def summary(values: list[float], base: float) -> dict[str, float]:
    """Return the median and quartiles in milliseconds, and the median as a multiple of `base`."""
    low, middle, high = statistics.quantiles(values, n=4)
    ms = {"median": middle, "low": low, "high": high}
    return {k: round(1000 * v, 2) for k, v in ms.items()} | {"of plain": round(middle / base, 3)}


if __name__ == "__main__":
    main()
