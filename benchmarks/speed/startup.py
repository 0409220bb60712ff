"""Measure how long commands take to start, against importing the libraries that they stand on.

    python benchmarks/speed/startup.py BACKBONE [--rounds 5] [--threads 1] [--output startup.json]

BACKBONE is a folder or a Hub id, such as sentence-transformers/all-MiniLM-L6-v2. Each variant is a
process of its own, from its start to its exit, and the variants alternate, so that drift affects
all of them equally:

    python               an empty program
    libraries            `import torch, transformers`: most of transformers is imported on first use
    model classes        the same with the base classes of models and tokenizers, as any user of a
                         model needs
    import adapterhub    the package alone
    COMMAND              the commands that need no model
    train                one step on 16 rows, an evaluation on 16 rows, and all files of the run
    predict              one text, by the adapter that `train` wrote

Each figure is the median over the rounds in seconds, with the smallest and largest one: of wall
time, and of processor time, which other processes affect less. `over` has the differences of the
medians that the goals are stated in. Forward passes and the backward pass of the one step are part
of `train` and `predict`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIGHT = (
    "--help", "methods", "methods lora", "tasks", "tasks tagging", "options lora",
    "recipe lora tagging", "list", "show demo", "train --help",
)  # fmt: skip
MODEL_CLASSES = "import torch; from transformers import AutoTokenizer, PreTrainedModel"
TEXTS = (("a joy to watch", "good"), ("dull and far too long", "bad"))


def main() -> None:
    """Measure and print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("backbone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(variants(options.backbone, Path(folder)), options, Path(folder))
    text = json.dumps(record(times, options), indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def variants(backbone: str, folder: Path) -> dict[str, list[str]]:
    """Return the words of each command line behind `python`, by name."""
    write_rows(folder / "train.csv", 8)
    write_rows(folder / "eval.csv", 8)
    command = ["-m", "adapterhub"]
    train = [*command, "train", "--backbone", backbone, "--method", "lora", "--steps", "1"]
    train += ["--task", "classification", "--train", str(folder / "train.csv")]
    train += ["--eval", str(folder / "eval.csv"), "--output", str(folder / "run"), "--name", "demo"]
    return {
        "python": ["-c", "pass"],
        "libraries": ["-c", "import torch, transformers"],
        "model classes": ["-c", MODEL_CLASSES],
        "import adapterhub": ["-c", "import adapterhub"],
        "train": train,
        "predict": [*command, "predict", str(folder / "run"), TEXTS[0][0]],
        **{name: [*command, *name.split()] for name in LIGHT},
    }


def write_rows(path: Path, copies: int) -> None:
    """Write a table of short texts with two labels."""
    rows = [f"{text} {i},{label}" for i in range(copies) for text, label in TEXTS]
    path.write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")


def measure(
    commands: dict[str, list[str]], options: argparse.Namespace, folder: Path
) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor seconds of each round, by variant."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONWARNINGS": "ignore",
        "ADAPTERHUB_REGISTRY": str(folder / "registry"),
    }  # fmt: skip
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(options.rounds + 1):
        for name, words in commands.items():
            if name == "train":
                shutil.rmtree(folder / "run", ignore_errors=True)
            seconds = timed([sys.executable, *words], environment)
            if number:  # the first round fills the caches of files and of bytecode
                times[name].append(seconds)
            elif name == "train":
                publish = ["-m", "adapterhub", "publish", str(folder / "run")]
                subprocess.run(
                    [sys.executable, *publish], env=environment, capture_output=True, check=True
                )
    return times


def timed(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run a command; return its wall and processor seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{output.decode(errors='replace')}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def record(
    times: dict[str, list[tuple[float, float]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the medians with their spread, the differences, and the conditions."""
    seconds = {
        name: {kind: spread([pair[i] for pair in pairs]) for i, kind in enumerate(("wall", "cpu"))}
        for name, pairs in times.items()
    }
    return {
        "seconds": seconds,
        "over": {
            f"{name} over {base}": {
                kind: round(seconds[name][kind][0] - seconds[base][kind][0], 3)
                for kind in ("wall", "cpu")
            }
            for name, base in (
                ("import adapterhub", "python"),
                *((name, base) for name in ("train", "predict") for base in BASES),
            )
        },
        "rounds": options.rounds,
        "threads": options.threads,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
    }


BASES = ("libraries", "model classes")


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, smallest and largest value."""
    return (
        round(statistics.median(values), 3),
        round(min(values), 3),
        round(max(values), 3),
    )


if __name__ == "__main__":
    main()
