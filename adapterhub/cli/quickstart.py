"""`adapterhub quickstart`: train, evaluate and predict on docstrings of Python's library."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from adapterhub.cli._answers import Shape
from adapterhub.cli._format import bytes_text, say_text, seconds_text
from adapterhub.cli._options import quiet_option

TEXTS = (
    "Open a connection to the given host and send the request headers.",
    "Acquire the lock, blocking until another thread releases it.",
    "Return the token that starts at this position of the source code.",
)
RECIPE = {
    "backbone": "sentence-transformers/all-MiniLM-L6-v2",
    "data": {"train": "builtin:docstrings"},
    "train": {"tensorboard": False, "epochs": 3, "batch_size": 16},  # a demonstration: quick
}


@click.command("quickstart")
@click.option("--output", default="runs/quickstart", show_default=True, help="Folder for the runs.")
@quiet_option
def command(output: str, quiet: bool) -> None:
    """Train a LoRA that classifies docstrings of Python's library, and use it.

    The baseline is a trained head on the same frozen backbone. Takes about two minutes on two
    CPU cores.
    """
    output = _unused(output)
    say_text("1. Baseline: a head on the frozen backbone")
    baseline = _train("head", output, quiet)
    say_text("2. LoRA: low-rank updates of the query and value projections")
    lora = _train("lora", output, quiet)
    _compare({"head": baseline, "lora": lora})
    say_text(f"\n3. A new process loads {lora.folder} and predicts:")
    predict = [sys.executable, "-m", "adapterhub", "predict", str(lora.folder)]
    subprocess.run([*predict, *TEXTS], check=True)
    command_line = f'adapterhub predict {lora.folder} "your own text"'
    say_text(f"\nTry it: {command_line}")
    if sys.stdin.isatty():
        from adapterhub.cli._live import answer_lines
        from adapterhub.inference.open import open_adapter

        answer_lines(open_adapter(lora.folder), (), None, Shape(as_json=False, every=False))


def _unused(output: str) -> str:
    """Return `output`, with a number appended if an earlier quickstart used it."""
    names = itertools.chain([output], (f"{output}-{n}" for n in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def _train(method: str, output: str, quiet: bool) -> Any:
    from adapterhub.loop.report import reporter_for
    from adapterhub.recipe.output_folder import resumed_by
    from adapterhub.recipe.recipe import read
    from adapterhub.training.run import run

    folder = Path(output) / method
    recipe = read(
        flags=RECIPE | {"method": method, "output": str(folder), "name": f"docstrings-{method}"}
    )
    # A quickstart always begins anew; its runs are ordinary ones.
    with resumed_by(f"adapterhub train --resume --output {folder}"):
        return run(recipe, reporter_for(folder, recipe.train, quiet=quiet))


def _compare(outcomes: dict[str, Any]) -> None:
    from adapterhub.backbones.find import find_backbone

    folder, _ = find_backbone(RECIPE["backbone"])  # type: ignore[arg-type]
    backbone_bytes = (folder / "model.safetensors").stat().st_size
    say_text(f"\n{'':22}{'head':>14}{'lora':>14}")
    rows: dict[str, Callable[[Any], str]] = {
        "accuracy": lambda o: f"{o.metrics['accuracy']:.3f}",
        "macro F1": lambda o: f"{o.metrics['macro_f1']:.3f}",
        "trained parameters": lambda o: f"{o.parameters + o.head_parameters:,}",
        "adapter file": lambda o: bytes_text(o.adapter_bytes),
        "of the backbone's file": lambda o: f"{o.adapter_bytes / backbone_bytes:.2%}",
        "time": lambda o: seconds_text(o.result.seconds),
        "peak memory": lambda o: bytes_text(o.result.peak_memory),
    }
    for name, show in rows.items():
        say_text(f"{name:22}" + "".join(f"{show(o):>14}" for o in outcomes.values()))
