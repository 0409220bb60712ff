"""Tables of docs/performance.md: from the records of this folder.

python benchmarks/speed/summary.py --table            what peers take
python benchmarks/speed/summary.py serving --table    what a server takes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "results/speed"
COLUMNS = ("work", "adapterhub", "the peer", "the peer takes")
TASKS = {
    "sst2": "SST-2, 8,000 rows, one epoch, LoRA: the whole command",
    "mrpc": "MRPC, 3,668 pairs, one epoch, LoRA: the whole command",
}
PEERS = {
    "trainer": "peft with Trainer",
    "loop fp32": "peft in a loop by hand, fp32",
    "loop bf16": "peft in a loop by hand, bf16 autocast",
}
SERVED_COLUMNS = ("what answers", "a second", "processor ms each", "p50, p99 ms", "of no adapter")
Row = tuple[str, str, str, str]


def table(name: str = "peers") -> str:
    """Return a Markdown table of the records: "peers" or "serving"."""
    if name == "serving":
        return _markdown(SERVED_COLUMNS, [*served(), *texts()])
    return _markdown(COLUMNS, [*training(), *steps(), *routing(), *lifecycle()])


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def read(name: str) -> dict[str, Any]:
    """Read a record; {} if there is none."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def training() -> Iterator[Row]:
    """Yield the rows of `training.py`."""
    for task, measured in read("training").get("tasks", {}).items():
        medians = measured["medians"]
        us = medians["adapterhub"]
        for name, peer in PEERS.items():
            if name in medians:
                them = medians[name]
                low, middle, high = them["ratio"]
                spread = f" ({low} to {high})" if low != high else ""
                yield TASKS[task], run(us), f"{peer}: {run(them)}", f"{middle} x{spread}"


def run(measured: dict[str, float]) -> str:
    """Format what a run took and reached."""
    memory, accuracy = measured["peak_memory"] / 1e9, measured["accuracy"]
    return f"{measured['seconds']:.1f} s, {memory:.2f} GB, accuracy {accuracy:.3f}"


def steps() -> Iterator[Row]:
    """Yield the rows of `steps.py`."""
    record = read("steps")
    for method, ratios in record.get("ratios", {}).items():
        config = record["config"]
        work = f"a step of {method}, {config['rows']} x {config['tokens']} tokens"
        times = {name: sorted(t)[len(t) // 2] for name, t in record["milliseconds"][method].items()}
        ours = f"{times['ours chosen']:.0f} ms; in fp32 {times['ours fp32']:.0f}"
        ratio = f"{1 / ratios['ours chosen']:.1f} x; {1 / ratios['ours fp32']:.1f}"
        yield work, ours, f"adapters: {times['adapters']:.0f} ms", ratio


def routing() -> Iterator[Row]:
    """Yield the rows of `routing.py`: multiples of the plain forward pass."""
    times = read("routing").get("milliseconds", {})
    for name, measured in times.items():
        if name == "plain" or name.startswith("peft"):
            continue
        ours, theirs = measured["of plain"], times.get(f"peft, {name}", {}).get("of plain")
        work = f"64 rows of 16 tokens, {name}; the plain forward is 1"
        yield (
            work,
            f"{ours:.2f}",
            f"peft: {theirs:.2f}" if theirs else "",
            f"{theirs / ours:.2f} x" if theirs else "",
        )


def lifecycle() -> Iterator[Row]:
    """Yield the rows of `lifecycle.py`, with the most adapters attached."""
    records = read("lifecycle").get("milliseconds", {})
    for attached, times in list(records.items())[-1:]:
        for name in ("swap", "load", "attach"):
            ours, theirs = times[name]["median"], times[f"{name}, peft"]["median"]
            work = f"{name} an adapter, {attached}"
            yield work, f"{ours:.2f} ms", f"peft: {theirs:.1f} ms", f"{theirs / ours:.1f} x"


def served() -> Iterator[Sequence[str]]:
    """Yield the rows of `server.py`: requests over HTTP."""
    rates = read("server").get("cases", {}).get("rates", {})
    first = rates["no adapter"]["per second"] if rates else 1.0
    for name, each in rates.items():
        times = f"{each['p50 ms']:.0f}, {each['p99 ms']:.0f}" if "p50 ms" in each else "-"
        share = f"{each['per second'] / first:.2f}"
        processor = f"{each['processor ms each']:.1f}"
        yield f"requests: {name}", f"{each['per second']:.0f}", processor, times, share


def texts() -> Iterator[Sequence[str]]:
    """Yield the rows of `generation.py`: tokens of texts."""
    tokens = read("generation").get("tokens", {})
    first = tokens["no adapter"]["per second"] if tokens else 1.0
    for name, each in tokens.items():
        share = f"{each['per second'] / first:.2f}"
        processor = f"{each['processor ms each']:.1f}"
        yield f"tokens: {name}", f"{each['per second']:.0f}", processor, "-", share


if __name__ == "__main__":
    print(table(*[word for word in sys.argv[1:] if not word.startswith("-")]))
