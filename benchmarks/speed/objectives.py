"""Train on preferences and on a teacher: `adapterhub train` against trl's trainers with peft.

    make real-models; make trl
    python benchmarks/speed/objectives.py GSM8K --trl .venv-trl/bin/python [--output FILE]
    python benchmarks/speed/objectives.py --table

GSM8K is the folder of its files; short rows are taken. A prompt is a question, the chosen response
its answer, and the rejected one the answer of the next question. Objectives: `simpo` (CPOTrainer),
`kto` (KTOTrainer) and `distillation` (GKDTrainer; the teacher is the backbone, a second copy of it
in trl).

Each contestant is a new process, in turns, on SmolLM2-135M-Instruct in fp32: rank 16 on all
projections, batches of 4 rows of at most 256 tokens, the same rate. The seconds of a step are those
between runs of few and of many steps, so that imports and tokenization do not count; the peak is
that of the longer run. The loss is the mean over the first epoch of a run that changes nothing
(rate 1e-12), which does not depend on the order of rows for `simpo` and `distillation`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ROWS, FEW, MANY = 16, 1, 5
LONGEST = 250  # characters of a question and of an answer, so that nothing is cut
RANK, BATCH, RATE, LENGTH = 16, 4, 1e-4, 256
OURS, CONTESTANTS = "adapterhub", ("adapterhub", "trl")
OBJECTIVES = ("simpo", "kto", "distillation")
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/speed/objectives.json"


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gsm8k", type=Path, nargs="?")
    parser.add_argument("--trl", help="the interpreter of an environment with trl")
    parser.add_argument("--table", action="store_true", help="print that of the record")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", default=",".join(OBJECTIVES), help="objectives, by commas")
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    if options.gsm8k is None or options.trl is None:
        parser.error("GSM8K and --trl are needed")
    if not options.model.is_dir():
        raise SystemExit(f"{options.model} is not a folder; for SmolLM2: make real-models")
    if unknown := set(options.only.split(",")) - {*OBJECTIVES}:
        parser.error(f"--only {unknown.pop()}: not one of {', '.join(OBJECTIVES)}")
    from training import machine  # beside this script, and not where tables are made

    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(options.gsm8k / "train.jsonl", Path(folder) / "pairs.jsonl")
        for objective in options.only.split(","):
            results[objective] = {name: [] for name in CONTESTANTS}
            for turn in range(options.turns):
                for name, runs in results[objective].items():
                    runs.append(measure(name, objective, options, Path(folder)))
                    print(objective, turn, name, runs[-1], file=sys.stderr, flush=True)
    record = {"objectives": results, "rows": ROWS, "machine": machine()}
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def table() -> str:
    """Return the Markdown table of the record."""
    lines = ["| objective | | seconds a step | peak memory | loss at the start |",
             "|---|---|---|---|---|"]  # fmt: skip
    for objective, results in json.loads(RECORD.read_text("utf-8"))["objectives"].items():
        for name, runs in results.items():
            seconds = ", ".join(f"{run['seconds']:.2f}" for run in runs)
            peaks = ", ".join(f"{run['peak_memory'] / 1e9:.1f}" for run in runs)
            lines.append(f"| {objective} | {name} | {seconds} | {peaks} GB "
                         f"| {runs[0]['loss'] + 0.0:.4f} |")  # fmt: skip
    return "\n".join(lines)


def write_pairs(source: Path, target: Path) -> None:
    """Write questions with their answers and those of the next questions; the same as chats."""
    every = map(json.loads, source.read_text("utf-8").splitlines())
    short = (row for row in every if max(map(len, row.values())) <= LONGEST)
    rows = list(islice(short, ROWS + 1))
    pairs, chats = [], []
    for row, other in pairwise(rows):
        question, answer = row["question"], row["answer"]
        pairs.append({"prompt": question, "chosen": answer, "rejected": other["answer"]})
        turns = [("user", question), ("assistant", answer)]
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    for file, lines in ((target, pairs), (target.with_name("chats.jsonl"), chats)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def measure(name: str, objective: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a contestant three times; return its seconds a step, peak memory and loss."""
    rows = "chats" if objective == "distillation" else "pairs"
    job = {
        "objective": objective, "model": str(options.model), "train": str(folder / f"{rows}.jsonl"),
        "rank": RANK, "batch": BATCH, "length": LENGTH,
    }  # fmt: skip
    few, _, _ = run(name, job | {"steps": FEW, "rate": RATE}, options.trl, folder)
    many, peak, _ = run(name, job | {"steps": MANY, "rate": RATE}, options.trl, folder)
    # A row of `kto` is a response, two of each pair.
    epoch = ROWS // BATCH * (2 if objective == "kto" else 1)
    _, _, losses = run(name, job | {"steps": epoch, "rate": 1e-12}, options.trl, folder)
    loss = sum(losses) / len(losses)
    seconds = (many - few) / (MANY - FEW)
    return {"seconds": round(seconds, 3), "peak_memory": peak, "loss": round(loss, 5)}


def run(name: str, job: dict[str, Any], trl: str, folder: Path) -> tuple[float, int, list[float]]:
    """Run a contestant once; return its seconds, peak memory and losses."""
    from training import timed  # beside this script

    with tempfile.TemporaryDirectory(dir=folder) as output:
        job |= {"output": f"{output}/run"}
        peer = [trl, str(Path(__file__).with_name("objectives_trl.py")), json.dumps(job)]
        seconds, memory, _ = timed(ours(job) if name == OURS else peer)
        return seconds, memory, losses_of(Path(job["output"]))


def losses_of(output: Path) -> list[float]:
    """Return the losses of the steps of a run, of either library."""
    theirs = output / "losses.json"
    if theirs.exists():
        return list(json.loads(theirs.read_text("utf-8")))
    lines = (output / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["event"] == "train"]


def ours(job: dict[str, Any]) -> list[str]:
    """Return our command."""
    objective = {
        "simpo": ["--task", "preference(loss_type=simpo, beta=2.0, gamma=0.5)"],
        "kto": ["--task", "preference(loss_type=kto, beta=0.1)"],
        "distillation": ["--teacher", job["model"], "teacher.divergence=forward_kl"],
    }[job["objective"]]  # fmt: skip
    return [
        *(sys.executable, "-m", "adapterhub", "train", "--backbone", job["model"], "--quiet"),
        *("--method", f"lora(rank={job['rank']}, alpha={2 * job['rank']}, "
          "sites=['attn.*', 'ffn.*'])", "--train", job["train"], "--eval", "none", *objective),
        *("--output", job["output"], "dtype=fp32", f"train.max_steps={job['steps']}"),
        *(f"train.batch_size={job['batch']}", f"train.learning_rate={job['rate']}"),
        *(f"train.max_length={job['length']}", "train.warmup=0", "train.log_every=1"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
