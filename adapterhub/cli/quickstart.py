"""`adapterhub quickstart`: train, evaluate and predict on docstrings, or on chats."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._answers import Shape
from adapterhub.cli._format import bytes_text, say_text, seconds_text
from adapterhub.cli._options import quiet_option
from adapterhub.config.user_folders import is_there

if TYPE_CHECKING:
    from adapterhub.inference.open import Predictor

TEXTS = (
    "Open a connection to the given host and send the request headers.",
    "Acquire the lock, blocking until another thread releases it.",
    "Return the token that starts at this position of the source code.",
)
RECIPE: dict[str, Any] = {
    "backbone": "sentence-transformers/all-MiniLM-L6-v2",
    "data": {"train": "builtin:docstrings"},
    "train": {"tensorboard": False, "epochs": 3, "batch_size": 16},  # short, for a demonstration
}
CHAT_RECIPE: dict[str, Any] = {
    "method": "lora(sites=['attn.*', 'ffn.*'])",
    "task": "causal-lm(generate=true, new_tokens=40)",
    "train": {"tensorboard": False, "epochs": 3, "batch_size": 8, "max_length": 256},
}
TICKET = "Hello, the kettle that I ordered is still not here, and I need it today!"
SHOWN = 3  # held-out tickets shown with both answers


@click.command("quickstart")
@click.option("--chat", is_flag=True, help="Teach a small language model a form of answers.")
@click.option("--output", default="runs/quickstart", show_default=True, help="Folder for the runs.")
@quiet_option
def command(chat: bool, output: str, quiet: bool) -> None:
    """Train a LoRA that classifies docstrings of Python's library, and use it.

    The baseline is a trained head on the same frozen backbone. Takes about two minutes on two
    CPU cores.

    With --chat, the LoRA teaches a language model to answer tickets of a shop by one line of JSON;
    the baseline is the same model with the form in its prompt. Takes about four minutes.
    """
    output = _unused(output)
    if chat:
        _teach_tickets(Path(output), quiet)
    else:
        _classify_docstrings(output, quiet)


def _classify_docstrings(output: str, quiet: bool) -> None:
    say_text("1. Baseline: a head on the frozen backbone")
    baseline = _train(_docstrings("head", output), quiet)
    say_text("2. LoRA: low-rank updates of the query and value projections")
    lora = _train(_docstrings("lora", output), quiet)
    _compare({"head": baseline, "lora": lora})
    say_text(f"\n3. A new process loads {lora.folder} and predicts:")
    _predict(lora.folder, TEXTS)
    _answer_lines(lora.folder)


def _teach_tickets(output: Path, quiet: bool) -> None:
    """Train a language model on chats; compare its answers before and after on other tickets."""
    from adapterhub.adapters.route import disabled
    from adapterhub.data.tickets import instructed, load_tickets
    from adapterhub.inference.open import open_adapter

    train, held_out = load_tickets()
    output.mkdir(parents=True)
    files = {"train": train, "held-out": held_out, "told": [*map(instructed, held_out)]}
    paths = {name: output / f"{name}.jsonl" for name in files}
    for name, chats in files.items():
        lines = [json.dumps(chat) + "\n" for chat in chats]
        paths[name].write_text("".join(lines), encoding="utf-8")
    say_text(f"1. LoRA on {len(train)} tickets with their fields: {paths['train']}")
    data = {"train": str(paths["train"]), "eval": str(paths["held-out"])}
    lora = _train(CHAT_RECIPE | {"data": data, "output": str(output / "lora")}, quiet)
    say_text(f"\n2. {len(held_out)} tickets about other products, in other sentences")
    opened = open_adapter(lora.folder)
    after = _answers(opened, paths["held-out"])
    with disabled(opened.model):
        before = _answers(opened, paths["told"])
    prompted, learned = (
        "the backbone, with the form in its prompt",
        "with the adapter, which is not",
    )
    for name, (score, _) in {prompted: before, learned: after}.items():
        say_text(f"{name:38}exact match {score}")
    for number in range(0, len(held_out), len(held_out) // SHOWN)[:SHOWN]:
        say_text(f"\nticket  {held_out[number]['messages'][0]['content']}")
        say_text(f"before  {before[1][number]}\nafter   {after[1][number]}")
    share = lora.adapter_bytes / _weight_bytes(opened.backbone)
    say_text(f"\nadapter file {bytes_text(lora.adapter_bytes)}, {share:.1%} of the backbone's")
    say_text(f"\n3. A new process loads {lora.folder} and answers:")
    _predict(lora.folder, [TICKET])
    _answer_lines(lora.folder)


def _answers(opened: Predictor, file: Path) -> tuple[str, list[str]]:
    """Return the exact match on a file of chats, with its interval, and the answers."""
    from adapterhub.files.shown_table import score_text

    examples = opened.task.read(str(file), opened.data, "eval")
    predictions: list[Any] = []
    metrics = opened.evaluate(examples, record=predictions)
    error = opened.errors(metrics, examples, predictions).get("exact_match")
    answers = [" ".join(prediction.text.split()) for prediction in predictions]
    return score_text(f"{metrics['exact_match']:.3f}", error), answers


def _predict(folder: Path, texts: Sequence[str]) -> None:
    """Predict in a new process, and print the next steps."""
    predict = [sys.executable, "-m", "adapterhub", "predict", str(folder)]
    subprocess.run([*predict, *texts], check=True)
    command_line = f'adapterhub predict {folder} "your own text"'
    say_text(f"\nTry it: {command_line}")


def _unused(output: str) -> str:
    """Return `output`, with a number appended if an earlier quickstart used it."""
    names = itertools.chain([output], (f"{output}-{n}" for n in itertools.count(2)))
    return next(name for name in names if not is_there(name))


def _answer_lines(folder: Path) -> None:
    """Answer lines typed on a terminal."""
    if sys.stdin.isatty():
        from adapterhub.cli._live import answer_lines
        from adapterhub.inference.open import open_adapter

        answer_lines(open_adapter(folder), (), None, Shape(as_json=False, every=False))


def _docstrings(method: str, output: str) -> dict[str, Any]:
    """Return the recipe of a method on docstrings."""
    folder = Path(output) / method
    return RECIPE | {"method": method, "output": str(folder), "name": f"docstrings-{method}"}


def _train(settings: dict[str, Any], quiet: bool) -> Any:
    from adapterhub.loop.report import reporter_for
    from adapterhub.recipe.output_folder import resumed_by
    from adapterhub.recipe.recipe import read
    from adapterhub.training.run import run

    recipe, folder = read(flags=settings), Path(settings["output"])
    # A quickstart always starts from scratch; its runs are ordinary ones.
    with resumed_by(f"adapterhub train --resume --output {folder}"):
        return run(recipe, reporter_for(folder, recipe.train, quiet=quiet))


def _compare(outcomes: dict[str, Any]) -> None:
    backbone_bytes = _weight_bytes(RECIPE["backbone"])
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


def _weight_bytes(backbone: str) -> int:
    """Return the size of the files of a backbone's weights."""
    from adapterhub.backbones.find import find_backbone

    folder, _ = find_backbone(backbone)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
