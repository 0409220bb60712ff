"""The results table of README: three GLUE tasks, five methods, defaults, by the command line.

    python benchmarks/glue.py DATA [--out runs/glue] [--only sst2,mrpc] [--methods lora,full]
    python benchmarks/glue.py --table

DATA is a folder with GLUE's own files: sst2/train.tsv, sst2/dev.tsv, and so on. Each run is the
command that a user would type. Its record goes to benchmarks/results/: command, scores, time,
sizes, versions, device. The table is made from the records, never typed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
METHODS = ("head", "lora", "pfeiffer", "mam", "full")
TASKS = {
    "sst2": ["--text", "sentence", "--label", "label", "data.rows=8000"],
    "mrpc": ["--text", "#1 String", "--pair", "#2 String", "--label", "Quality"],
    "stsb": [
        "--task",
        "regression",
        "--text",
        "sentence1",
        "--pair",
        "sentence2",
        "--label",
        "score",
    ],
}
COLUMNS = ("task", "method", "score on dev", "trained", "adapter", "time", "peak memory")
SCORES = {"sst2": ("accuracy",), "mrpc": ("accuracy", "macro_f1"), "stsb": ("pearson", "spearman")}


def command(task: str, method: str, data: str, out: str) -> list[str]:
    """What the user types."""
    files = ["--train", f"{data}/{task}/train.tsv", "--eval", f"{data}/{task}/dev.tsv"]
    where = ["--output", f"{out}/{task}-{method}"]
    return [
        "adapterhub",
        "train",
        "--backbone",
        BACKBONE,
        "--method",
        method,
        *files,
        *TASKS[task],
        *where,
    ]


def run(task: str, method: str, data: str, out: str) -> None:
    """One run and its record."""
    words = command(task, method, data, out)
    subprocess.run([sys.executable, "-m", *words, "--quiet"], check=True)
    folder = Path(out) / f"{task}-{method}"
    manifest = json.loads((folder / "adapter/adapter.json").read_text(encoding="utf-8"))
    timing = json.loads((folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    record = {
        "command": command(task, method, "GLUE", "runs"),
        "metrics": manifest["metrics"],
        "adapter_bytes": sum(f.stat().st_size for f in (folder / "adapter").iterdir()),
        "parameters": parameters(manifest),
        "seconds": timing["seconds"],
        "peak_memory": timing["peak_memory"],
        "data_sha256": manifest["training"]["data"]["sha256"],
        "backbone": manifest["backbone"],
        "versions": manifest["versions"] | {"python": platform.python_version()},
        "device": f"CPU ({platform.machine()}), {threads} thread(s)",
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=2, sort_keys=True)
    (RESULTS / f"{task}-{method}.json").write_text(text + "\n", encoding="utf-8")


def parameters(manifest: dict) -> dict[str, int]:
    """The numbers of trained parameters, of the head and of the rest."""
    sizes = {"head": 0, "method": 0}
    for name, tensor in manifest["tensors"].items():
        count = 1
        for dimension in tensor["shape"]:
            count *= dimension
        sizes["head" if name.startswith("head.") else "method"] += count
    return sizes


def table() -> str:
    """The Markdown table of all records."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for task in TASKS:
        for method in METHODS:
            path = RESULTS / f"{task}-{method}.json"
            if path.exists():
                lines.append(row(task, method, json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(lines)


def row(task: str, method: str, record: dict) -> str:
    """One line of the table."""
    cells = (
        task,
        method,
        ", ".join(f"{name} {record['metrics'][name]:.3f}" for name in SCORES[task]),
        f"{sum(record['parameters'].values()):,}",
        f"{record['adapter_bytes'] / 1e6:.2f} MB",
        f"{record['seconds'] / 60:.1f} min",
        f"{record['peak_memory'] / 1e9:.1f} GB",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is asked for, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", default="runs/glue")
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    if words.data:
        for task in words.only.split(","):
            for method in words.methods.split(","):
                run(task, method, words.data, words.out)
    print(table())


if __name__ == "__main__":
    main()
