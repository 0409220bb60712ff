"""Train a LoRA on chats end to end: `adapterhub train` against trl's SFTTrainer with peft.

    make real-models; make trl
    python benchmarks/speed/chats.py GSM8K --trl .venv-trl/bin/python [--seeds 0] [--output FILE]
    python benchmarks/speed/chats.py --table

GSM8K is the folder of its files: 400 questions with answers to train on, 100 to evaluate on. Each
contestant is a new process for each seed, in turns, on SmolLM2-135M-Instruct: rank 16 on all
projections, batches of 8, one epoch, the same tokens, rate, warm-up and schedule, the loss of the
answers alone. Wall time includes imports, tokenization, training, an evaluation on the held-out
rows and saving. The loss that is reported is measured afterwards, of both alike: by `adapterhub
eval`, in fp32. trl runs in fp32 and with the backbone in bf16; adapterhub chooses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = {"train": 400, "test": 100}
RANK, BATCH, RATE, LENGTH = 16, 8, 2e-4, 512
OURS, CONTESTANTS = "adapterhub", ("adapterhub", "trl bf16", "trl fp32")
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/speed/chats.json"


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gsm8k", type=Path, nargs="?")
    parser.add_argument("--trl", help="the interpreter of an environment with trl")
    parser.add_argument("--table", action="store_true", help="print that of the record")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, by commas")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    if options.gsm8k is None or options.trl is None:
        parser.error("GSM8K and --trl are needed")
    from training import machine  # beside this script, and not where tables are made

    model = ROOT / "build/models/smollm2"
    if not model.is_dir():
        raise SystemExit("SmolLM2 is not in build/models: make real-models")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        for split, count in ROWS.items():
            write_chats(options.gsm8k / f"{split}.jsonl", count, Path(folder) / f"{split}.jsonl")
        for seed in options.seeds.split(","):
            for name, results in runs.items():
                results.append(run(name, int(seed), model, Path(folder), options.trl))
                print(seed, name, results[-1], file=sys.stderr, flush=True)
    text = json.dumps({"runs": runs, "machine": machine()}, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def table() -> str:
    """Return the Markdown table of the record."""
    runs = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    ours = runs[OURS][0]
    lines = ["| | seconds | peak memory | held-out loss | seconds, adapterhub is 1 |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, results in runs.items():
        for one in results:
            times = one["seconds"] / ours["seconds"]
            lines.append(f"| {name} | {one['seconds']:.0f} | {one['peak_memory'] / 1e9:.1f} GB "
                         f"| {one['loss']:.3f} | {times:.2f} |")  # fmt: skip
    return "\n".join(lines)


def write_chats(source: Path, count: int, target: Path) -> None:
    """Write questions and answers as chats."""
    lines = source.read_text(encoding="utf-8").splitlines()[:count]
    chats = []
    for row in map(json.loads, lines):
        turns = [("user", row["question"]), ("assistant", row["answer"])]
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    target.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")


def run(name: str, seed: int, model: Path, folder: Path, trl: str) -> dict[str, Any]:
    """Run a contestant; return its seconds, peak memory and held-out loss."""
    from training import timed  # beside this script

    output = folder / f"{name.replace(' ', '-')}-{seed}"
    job = {
        "model": str(model), "train": str(folder / "train.jsonl"), "output": str(output),
        "test": str(folder / "test.jsonl"), "seed": seed, "rank": RANK, "batch": BATCH,
        "rate": RATE, "length": LENGTH, "dtype": name.partition(" ")[2],
    }  # fmt: skip
    peer = [trl, str(Path(__file__).with_name("chats_trl.py")), json.dumps(job)]
    seconds, memory, _ = timed(ours(job) if name == OURS else peer)
    loss = loss_of(output, job)
    return {"seconds": round(seconds, 1), "peak_memory": memory, "loss": round(loss, 4)}


def loss_of(output: Path, job: dict[str, Any]) -> float:
    """Return the loss of the held-out answers, of an adapter of either library."""
    command, adapter = [sys.executable, "-m", "adapterhub"], str(output)
    if (output / "adapter_config.json").exists():
        adapter = f"{output}-imported"
        imported = ["import", str(output), "--backbone", job["model"], "--output", adapter]
        subprocess.run([*command, *imported], check=True, stdout=subprocess.DEVNULL)
    measured = ["eval", adapter, "--backbone", job["model"], "--data", job["test"], "--json"]
    measured += ["--task", "causal-lm(data=chat)"] if adapter != str(output) else []
    found = subprocess.run([*command, *measured], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(found.stdout)["loss"])


def ours(job: dict[str, Any]) -> list[str]:
    """Return our command."""
    return [
        *(sys.executable, "-m", "adapterhub", "train", "--backbone", job["model"], "--quiet"),
        *("--method", f"lora(rank={job['rank']}, alpha={2 * job['rank']}, "
          "sites=['attn.*', 'ffn.*'])", "--train", job["train"], "--eval", job["test"]),
        *("--output", job["output"], f"seed={job['seed']}", "train.epochs=1"),
        *(f"train.batch_size={job['batch']}", f"train.learning_rate={job['rate']}"),
        *(f"train.max_length={job['length']}", "train.warmup=0.06"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
