"""Train LoRA end to end: `adapterhub train` against peft, whole processes, in turns.

    python benchmarks/speed/training.py GLUE [--tasks sst2,mrpc] [--seeds 0,1,2] [--output FILE]

GLUE is a folder with GLUE's files. Contestants, each a new process per seed:

- adapterhub: `adapterhub train` with its defaults;
- trainer: peft and transformers' Trainer, as in peft's examples (benchmarks/speed/peers.py);
- loop fp32, loop bf16: peft in a loop written by hand, without and with bf16 autocast.

All train rank 8 on the query and value projections, batches of 32, the same rows, epochs, learning
rate and schedule; the wall time includes imports, tokenization, evaluation and saving. The record
has each run's time, peak memory and accuracy, the median ratios, and the share of the machine's
roofline: the operations of the frozen products (2 per weight and token forward, 2 for the gradient
of the input) by the rate of such products, measured in the same run.

On a GPU, leave out the loops, which are written for a CPU: `--only adapterhub,trainer`. Its record
then names the device; the roofline is that of the CPU, and means nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS = 6 * (4 * 384**2 + 2 * 384 * 1536)  # of the frozen projections
BATCH = 32
OURS, TRAINER, LOOP_FP32, LOOP_BF16 = "adapterhub", "trainer", "loop fp32", "loop bf16"
TASKS: dict[str, dict[str, Any]] = {
    "sst2": {"texts": ["sentence"], "label": "label", "rows": 8000, "epochs": 1},
    "mrpc": {"texts": ["#1 String", "#2 String"], "label": "Quality", "rows": None, "epochs": 1},
}


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("glue", type=Path)
    parser.add_argument("--tasks", default="sst2,mrpc")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", help="contestants, by commas")
    parser.add_argument("--backbone", default=BACKBONE)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    contestants = (options.only or f"{OURS},{TRAINER},{LOOP_FP32},{LOOP_BF16}").split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    record = {
        "tasks": {
            name: measure(options.glue, name, seeds, contestants, options.backbone)
            for name in options.tasks.split(",")
        },
        "versions": versions(),
        "machine": machine(),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def machine() -> str:
    """Name what the contestants run on: a GPU if torch finds one, but for the loops by hand."""
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def measure(
    glue: Path, task: str, seeds: list[int], contestants: list[str], backbone: str
) -> dict[str, Any]:
    """Run all contestants in turns, once per seed."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(glue / task, TASKS[task], Path(folder), backbone)
        for seed in seeds:
            rates.append({"fp32": rate(torch.float32), "bf16": rate(torch.bfloat16)})
            for name in contestants:
                runs[name].append(run(name, job | {"seed": seed}, Path(folder)))
                print(task, seed, name, runs[name][-1], file=sys.stderr, flush=True)
    return {"runs": runs, "gflops": rates, **summary(runs, rates)}


def prepare(source: Path, task: dict[str, Any], folder: Path, backbone: str) -> dict[str, Any]:
    """Write the rows that all contestants train on."""
    job: dict[str, Any] = {k: task[k] for k in ("texts", "label", "epochs")}
    job["backbone"] = found_backbone(backbone)
    for part, name in (("train", "train.tsv"), ("eval", "dev.tsv")):
        with open(source / name, encoding="utf-8-sig", newline="") as file:
            header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if part == "train" and task["rows"]:
            rows = random.Random(0).sample(rows, task["rows"])
        path = folder / name
        lines = ["\t".join(row) for row in (header, *rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        job[part] = str(path)
    return job


def found_backbone(name: str) -> str:
    """Return the folder of the backbone, which peers load by its path."""
    from adapterhub.backbones.find import find_backbone

    return str(find_backbone(name)[0])


def run(name: str, job: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run one contestant in a process of its own."""
    path = folder / "job.json"
    path.write_text(json.dumps(job | {"autocast": name == LOOP_BF16}), encoding="utf-8")
    output = folder / f"ours-{job['seed']}"
    peer = "trainer" if name == TRAINER else "loop"
    peers = [str(Path(__file__).parent / "peers.py"), peer, str(path)]
    command = ours(job, output) if name == OURS else [sys.executable, *peers]
    seconds, memory, printed = timed(command)
    result = read_ours(output) if name == OURS else json.loads(printed.splitlines()[-1])
    return {"seconds": round(seconds, 2), "peak_memory": memory, **result}


def timed(command: list[str]) -> tuple[float, int, str]:
    """Run a command; return its seconds, its peak memory in bytes, and its output."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, peak(usage), printed


def peak(usage: resource.struct_rusage) -> int:
    """Return the peak memory of a process, in bytes."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ours(job: dict[str, Any], output: Path) -> list[str]:
    """Return our command: the defaults, with the peers' number of epochs."""
    columns = ["--text", job["texts"][0], "--label", job["label"]]
    columns += ["--pair", job["texts"][1]] if len(job["texts"]) > 1 else []
    files = ["--train", job["train"], "--eval", job["eval"], "--output", str(output)]
    rest = [f"seed={job['seed']}", f"train.epochs={job['epochs']}", "--quiet"]
    command = [sys.executable, "-m", "adapterhub", "train", "--backbone", job["backbone"]]
    return [*command, *columns, *files, *rest]


def read_ours(output: Path) -> dict[str, Any]:
    """Return the accuracy of a run of ours, and the tokens and the time of its training steps."""
    text = (output / "timings.jsonl").read_text(encoding="utf-8")
    lines = [each for each in map(json.loads, text.splitlines()) if each["event"] == "train"]
    previous, seconds, tokens = 0, 0.0, 0.0
    for line in lines:
        took = BATCH * (line["step"] - previous) / line["examples_per_second"]
        previous, seconds, tokens = (
            line["step"],
            seconds + took,
            tokens + took * line["tokens_per_second"],
        )
    manifest = json.loads((output / "adapter/adapter.json").read_text(encoding="utf-8"))
    return {
        "accuracy": manifest["metrics"]["accuracy"],
        "training_seconds": round(seconds, 2),
        "tokens": round(tokens),
        "dtype": manifest["backbone"]["dtype"],
    }


def rate(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Measure the rate of products of the backbone's size, in GFLOP/s."""
    x, weight = torch.randn(512, 384, dtype=dtype), torch.randn(1536, 384, dtype=dtype)
    operations = 2 * x.shape[0] * weight.numel()
    for _ in range(10):
        torch.nn.functional.linear(x, weight)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            torch.nn.functional.linear(x, weight)
        count += 10
    return round(count * operations / (time.perf_counter() - start) / 1e9, 1)


def summary(
    runs: dict[str, list[dict[str, float]]], rates: list[dict[str, float]]
) -> dict[str, Any]:
    """Return medians, ratios to us with their range, and our share of the roofline."""
    result: dict[str, Any] = {
        name: {
            "seconds": statistics.median(run["seconds"] for run in each),
            "peak_memory": statistics.median(run["peak_memory"] for run in each),
            "accuracy": round(statistics.mean(run["accuracy"] for run in each), 4),
        }
        for name, each in runs.items()
    }
    us = runs.get(OURS)
    if us is None:
        return {"medians": result}
    for name, each in runs.items():
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(us, each, strict=True)]
        result[name]["ratio"] = [round(f(ratios), 2) for f in (min, statistics.median, max)]
    shares = [
        4e-9 * WEIGHTS * run["tokens"] / run["training_seconds"] / rates[i][run["dtype"]]
        for i, run in enumerate(us)
    ]
    return {"medians": result, "roofline": round(statistics.median(shares), 3)}


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    import peft
    import transformers

    import adapterhub

    modules = {"adapterhub": adapterhub, "peft": peft, "transformers": transformers, "torch": torch}
    return {name: module.__version__ for name, module in modules.items()}


if __name__ == "__main__":
    main()
