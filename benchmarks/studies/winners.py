"""Train the method that a study recommends for each task, and publish it.

    cd FOLDER_WITH_THE_DATA
    python REPOSITORY/benchmarks/studies/winners.py REPOSITORY/benchmarks/studies/glue \
        --registry REPOSITORY/registry --output RUNS [--tasks sst2,rte] [--epochs 3]

A study has short runs, so that many fit into its time; the winner is trained for some epochs, with
the rate that was tuned for it. The rows that select the checkpoint are held out from the training
rows. A task on which no method was shown to be better than an untrained baseline has no winner.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from adapterhub.bench.baselines import read_constants
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.results import TaskResult, study_results
from adapterhub.bench.study import RECORDS, STUDY, read_study
from adapterhub.cli._study import train_commands
from adapterhub.methods.common.base import parse_methods

DESCRIPTIONS = {
    "sst2": "Sentiment of a sentence, trained on SST-2 of GLUE.",
    "cola": "Whether a sentence is acceptable English, trained on CoLA of GLUE.",
    "mrpc": "Whether one sentence paraphrases another, trained on MRPC of GLUE.",
    "rte": "Whether one sentence follows from another, trained on RTE of GLUE.",
    "stsb": "How similar two sentences are, from 0 to 5, trained on STS-B of GLUE.",
}

# What the classes of the files mean; predictions are these words.
LABELS = {
    "sst2": "0=negative,1=positive",
    "cola": "0=unacceptable,1=acceptable",
    "mrpc": "0=not_equivalent,1=equivalent",
}


def main() -> None:
    """Train and publish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--registry", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", help="by commas; all by default")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    for task, name, words in winners(options.study, options.output, options.epochs):
        if options.tasks is None or task in options.tasks.split(","):
            print(f"{task}: {name}", flush=True)
            run(words)
            run(published(task, name, options))


def winners(folder: Path, output: Path, epochs: int) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each task, the name of its winner, and the words of `adapterhub train`.

    Args:
        folder: the folder of the study.
        output: where the runs go.
        epochs: of each run.
    """
    study = read_study(folder / STUDY)
    results = study_results(study, RecordFolder(folder / RECORDS).all(), read_constants(folder))
    commands = train_commands(study, results, output)
    for task in results:
        command = commands.get((task.task, task.rows))
        if command is not None and task.advice.method and not task.advice.unproven:
            spec = study.labels()[str(task.advice.method)]
            (method, *_) = parse_methods(spec)  # type: ignore[arg-type]
            yield task.task, method.name, longer(command, task, output, epochs)


def longer(command: str, task: TaskResult, output: Path, epochs: int) -> list[str]:
    """Return the words of a study's command, with epochs in place of its steps.

    Args:
        command: the command that the study ends with.
        task: what it found.
        output: where the runs go.
        epochs: of the run.
    """
    words = shlex.split(command)[2:]
    for flag, value in (("--steps", None), ("--output", str(output / task.task))):
        if flag not in words:
            continue
        place = words.index(flag)
        words[place : place + 2] = [] if value is None else [flag, value]
    labels = ["--labels", LABELS[task.task]] if task.task in LABELS else []
    return ["train", *words, *labels, "--epochs", str(epochs), "--quiet"]


def published(task: str, method: str, options: argparse.Namespace) -> list[str]:
    """Return the words that publish a run.

    Args:
        task: the task.
        method: its method.
        options: those of the command line.
    """
    named = ["--name", f"{task}-{method}", "--description", DESCRIPTIONS.get(task, task)]
    return ["publish", str(options.output / task), *named, "--registry", str(options.registry)]


def run(words: list[str]) -> None:
    """Run an adapterhub command, and end if it fails."""
    if code := subprocess.run([sys.executable, "-m", "adapterhub", *words], check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
