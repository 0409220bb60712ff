"""What a backbone forgets of general text when it is fine-tuned, and what detaching gives back.

    python benchmarks/studies/general_text.py train GLUE --output FOLDER [--seeds 3] [--steps 150]
    python benchmarks/studies/general_text.py table benchmarks/studies/general-text

GLUE has GLUE's files. The general text is news, the sentences of MRPC, and the task is SST-2. The
backbone has no language-model head: one is trained on half of the news with the backbone frozen,
and is not trained again. It then reads the other half before a method trains on the task, after it,
and after the adapter is detached. A run is a line of FOLDER/records.jsonl; one that is there is not
run again. The learning rates are the methods' defaults.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from forgetting import BACKBONE, Approach, Classifier, read_task, train
from run_records import RunRecords, study_parser
from torch import nn

import adapterhub as ah
from adapterhub.data.examples import read_texts
from adapterhub.data.options import DataOptions
from adapterhub.tasks import Encoded, Setting
from adapterhub.tasks.masked_lm import MaskedLM

METHODS = ("full", "freeze", "lora", "pfeiffer", "prefix", "mam", "oft")
TASK = "sst2"
HELD = 200  # texts
PROBE = ("train.max_steps=300", "train.batch_size=16", "train.max_length=64", "train.report=false")


def write_news(glue: Path, folder: Path) -> tuple[Path, Path]:
    """Write the sentences of MRPC, each on a line, and return two files of disjoint halves.

    Args:
        glue: the folder with the data.
        folder: where the files go.
    """
    lines = (glue / "mrpc" / "train.tsv").read_text(encoding="utf-8-sig").splitlines()[1:]
    halves = (lines[::2], lines[1::2])
    files = (folder / "news.txt", folder / "held.txt")
    for file, half in zip(files, halves, strict=True):
        file.write_text("".join(line.split("\t")[3] + "\n" for line in half), encoding="utf-8")
    return files


def train_probe(news: Path, folder: Path) -> Path:
    """Train a language-model head on the frozen backbone; return the checkpoint with both.

    Args:
        news: the text.
        folder: where the run and the checkpoint go.
    """
    probe, whole = folder / "probe", folder / "backbone"
    if not whole.is_dir():
        files = [f"data.train={news}", "data.eval=none", f"output={probe}"]
        options = ["task=masked-lm", "method=head", f"backbone={BACKBONE}", *files, *PROBE]
        for command in (["train", *options], ["merge", str(probe), "--output", str(whole)]):
            subprocess.run([sys.executable, "-m", "adapterhub", *command], check=True)
    return whole


def run_method(
    method: str, backbone: Path, data: Mapping[str, Any], held: Path, seed: int, steps: int
) -> dict[str, Any]:
    """Train a method on the task, and return the loss on general text at three times.

    Args:
        method: its spec.
        backbone: the checkpoint with the language-model head.
        data: the rows of the task.
        held: the general text.
        seed: of initial values and of the order of rows.
        steps: of the task.
    """
    torch.manual_seed(seed)
    model, tokenizer = ah.load_backbone(str(backbone), task="masked-lm")
    texts = read_texts(str(held), DataOptions())[:HELD]
    encoded = MaskedLM().encode(texts, Setting(tokenizer, 64), labelled=True)
    before = _loss(model, encoded)
    adapter = ah.attach(model, method, name=TASK)
    classifier = Classifier(model, tokenizer, {TASK: nn.Linear(model.config.hidden_size, 2)})
    train(classifier, TASK, data["train"], Approach(method), seed, steps)
    right = classifier.right(TASK, data["test"])
    after = _loss(model, encoded)
    adapter.detach()
    losses = {"before": before, "after": after, "detached": _loss(model, encoded)}
    return {"method": method, "seed": seed, "steps": steps, "right": right, "loss": losses}


def _loss(model: Any, held: Encoded) -> float:
    return held.task.evaluate(model.eval(), held, 32)["loss"]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the loss of general text before, after and detached, as a Markdown table."""
    head = "| method | accuracy | loss before | after | rise | detached, equal to the bit |"
    lines = [head, "|---|---|---|---|---|---|"]
    for method in dict.fromkeys(each["method"] for each in records):
        mine = [each for each in records if each["method"] == method]
        losses = [each["loss"] for each in mine]
        same = sum(loss["detached"] == loss["before"] for loss in losses)
        cells = [
            method,
            _mean([100 * each["right"].count("1") / len(each["right"]) for each in mine], 1),
            _mean([loss["before"] for loss in losses], 3),
            _mean([loss["after"] for loss in losses], 3),
            _mean([loss["after"] - loss["before"] for loss in losses], 3),
            f"{same} of {len(mine)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main() -> None:
    """Train what is missing, or print the table."""
    parser, training = study_parser(__doc__)
    training.add_argument("--only", nargs="+", default=METHODS)
    options = parser.parse_args()
    records = RunRecords(options.folder)
    if options.command == "train":
        train_missing(records, options)
    else:
        print(table(records.read()) if options.command == "table" else records.pack())


def train_missing(records: RunRecords, options: argparse.Namespace) -> None:
    """Train what has no record yet.

    Args:
        records: those there are.
        options: of the command line.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    news, held = write_news(options.glue, options.folder)
    backbone, data = train_probe(news, options.folder), read_task(options.glue, TASK)
    done = {(each["method"], each["seed"]) for each in records.read()}
    for seed in range(1, options.seeds + 1):
        for method in options.only:
            if (method, seed) not in done:
                record = run_method(method, backbone, data, held, seed, options.steps)
                print(method, seed, record["loss"], flush=True)
                records.add(record)


if __name__ == "__main__":
    main()
