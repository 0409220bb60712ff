"""What trained weights show that random ones cannot: SmolLM2 and Flan-T5.

    make real-models
    python benchmarks/trained_weights.py CLAIM --texts gsm8k/test.jsonl [--pairs multi30k/]
    python benchmarks/trained_weights.py CLAIM --table

Claims, each with its record in benchmarks/results/:

    quantization   the perplexity of texts that no run sees, in six precisions (torchao for two)
    merges         60 steps on tickets on nf4 weights, merged into bf16, and quantized again: exact
                   match on 50 held-out tickets, and the answers that are the adapter's
    methods        60 steps on tickets with the default options of each method: exact match on
                   held-out tickets, and what is forgotten: KL(backbone || adapted) per token
    rates          loss on held-out rows after 30 steps at five learning rates around the default of
                   then; SmolLM2 is in bf16
    usual          loss on held-out rows of the method that `train` chooses for language models, at
                   four learning rates, on tickets and on GSM8K, with two seeds; in bf16 (the
                   second seed comes last, so that a measurement that is stopped has whole rows)

What the record of a claim has is not measured again, except for merges.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import records
import torch

import adapterhub as ah
from adapterhub.data.tickets import load_tickets
from adapterhub.inference.open import open_backbone
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks.common.infer_task import OF_LANGUAGE_MODELS
from adapterhub.training.run import run

ROOT = Path(__file__).parents[1]
PRECISIONS = {"fp32": {"dtype": "fp32"}, "bf16": {"dtype": "bf16"},
              "int8": {"quantize": "int8"}, "int8-weight": {"quantize": "int8-weight"},
              "fp8-weight": {"quantize": "fp8-weight"}, "nf4": {"quantize": "nf4"}}  # fmt: skip
METHODS = ("lora", "lora(sites=['attn.*', 'ffn.*'])", OF_LANGUAGE_MODELS, "dora", "pfeiffer",
           "mam", "ia3", "prefix", "prompt", "full")  # fmt: skip
SWEPT = ("prefix", "lora", "prompt", "pfeiffer", "ia3", "full")
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
TEXTS, MERGED_ROWS, STEPS, QUICK_STEPS = 100, 50, 60, 30
USUAL_RATES, SEEDS = (1e-4, 2e-4, 4e-4, 1e-3), (0, 1)
QUESTIONS = {"train": 400, "test": 60}  # rows of GSM8K


def main() -> None:
    """Measure a claim and write its record, or print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", choices=sorted(CLAIMS))
    parser.add_argument("--texts", type=Path, help="GSM8K's test.jsonl")
    parser.add_argument("--pairs", type=Path, help="the folder of Multi30k")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.claim))
        return
    name, (measure, _) = f"trained-weights-{options.claim}", CLAIMS[options.claim]
    rows = []
    for row in measure(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
        records.write(name, {"rows": rows, "threads": torch.get_num_threads()})


def table(claim: str) -> str:
    """Return the Markdown table of a claim's record."""
    return CLAIMS[claim][1](recorded(claim))


def recorded(claim: str) -> list[dict[str, Any]]:
    """Return the rows that were measured of a claim."""
    record = records.read(f"trained-weights-{claim}") or {"rows": []}
    return list(record["rows"])


def folder_of(name: str) -> str:
    """Return the folder of a real model.

    Raises:
        SystemExit: it was not made.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    import real_models

    if (folder := real_models.folder_of(name)) is None:
        raise SystemExit(f"{name} is not in build/models: make real-models")
    return str(folder)


def texts(options: argparse.Namespace) -> list[str]:
    """Return questions with their answers."""
    lines = options.texts.read_text(encoding="utf-8").splitlines()[:TEXTS]
    return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]


# Quantization


def quantization(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the loss of the texts in each precision."""
    known = {row["precision"]: row for row in recorded("quantization")}
    for name, how in PRECISIONS.items():
        if name in known:
            yield known[name]
            continue
        model, tokenizer = ah.load_backbone(folder_of("smollm2"), task="causal-lm", **how)
        total = count = 0.0
        for text in texts(options):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                loss = model(input_ids=ids, labels=ids).loss.item()
            total, count = total + loss * (ids.shape[1] - 1), count + ids.shape[1] - 1
        size = sum(each.nbytes for p in model.parameters() for each in stored(p))
        yield {"precision": name, "loss": total / count, "bytes": size}


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of one: torchao's kinds have several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from stored(getattr(tensor, name))


def quantization_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the precisions."""
    first = rows[0]["loss"]
    lines = ["| weights | perplexity | rise | size, MB |", "|---|---|---|---|"]
    for row in rows:
        perplexity, rise = math.exp(row["loss"]), math.exp(row["loss"] - first) - 1
        size = row["bytes"] / 1e6
        lines.append(f"| {row['precision']} | {perplexity:.2f} | {rise:.1%} | {size:,.0f} |")
    return "\n".join(lines)


# Merges


def merges(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield how the adapter answers on nf4 weights, and the models it was merged into."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        method = "lora(sites=['attn.*', 'ffn.*'])"
        outcome = on_tickets(method, folder, STEPS, generate=True, dtype="bf16", quantize="nf4")
        merged = {"merged into bf16": "--base-dtype=bf16", "quantized again": "--requantize"}
        opened = {"adapter on nf4": ah.open(outcome.folder)}
        for what, flag in merged.items():
            output = str(folder / what.replace(" ", "-"))
            command = [sys.executable, "-m", "adapterhub", "merge", str(outcome.folder)]
            subprocess.run([*command, "--output", output, flag], check=True)
            opened[what] = open_backbone(output, opened["adapter on nf4"].task)
        first = None
        for what, model in opened.items():
            rows = model.task.read(str(folder / "eval.jsonl"), model.data, "eval")[:MERGED_ROWS]
            answers = [each.text for each in model.predict_examples(rows)]
            first = first or answers
            yield {
                "model": what, "exact_match": model.evaluate(rows)["exact_match"],
                "equal": sum(a == b for a, b in zip(first, answers, strict=True)),
            }  # fmt: skip


def merges_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the merges."""
    lines = ["| model | exact match | answers that are the adapter's |", "|---|---|---|"]
    lines += [
        f"| {r['model']} | {r['exact_match']:.2f} | {r['equal']} of {MERGED_ROWS} |" for r in rows
    ]
    return "\n".join(lines)


# Methods


def methods(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each method learned of the tickets, and how far it went from the backbone."""
    asked, measured = texts(options)[:40], recorded("methods")
    for method in METHODS:
        if rows := [row for row in measured if row["method"] == method]:
            yield from rows
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = on_tickets(method, Path(folder), STEPS, generate=True)
            opened = ah.open(outcome.folder)
            yield {
                "method": method, "exact_match": outcome.metrics["exact_match"],
                "loss": outcome.metrics["loss"], "trained": outcome.parameters,
                "kl": divergence(opened, asked),
            }  # fmt: skip


def on_tickets(
    method: str, folder: Path, steps: int, *, generate: bool = False, rate: float | None = None,
    **how: Any,
) -> Any:  # fmt: skip
    """Train SmolLM2 on tickets."""
    files = {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"}
    for file, chats in zip(files.values(), load_tickets(), strict=True):
        file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    task = "causal-lm(generate=true, new_tokens=40)" if generate else "causal-lm"
    return train("smollm2", method, task, files, folder / "run", steps, rate, **how)


def train(
    model: str, method: str, task: str, files: dict[str, Path], output: Path, steps: int,
    rate: float | None, dtype: str = "fp32", quantize: str | None = None, seed: int = 0,
    batch_size: int = 8,
) -> Any:  # fmt: skip
    """Train so many steps; evaluate at the end."""
    settings = {
        "max_steps": steps, "batch_size": batch_size, "eval_every": 1_000_000,
        "learning_rate": rate, "tensorboard": False, "report": False,
    }  # fmt: skip
    flags = {
        "backbone": folder_of(model), "method": method, "task": task, "output": str(output),
        "dtype": dtype, "quantize": quantize, "seed": seed,
        "data": {name: str(file) for name, file in files.items()},
        "train": {name: value for name, value in settings.items() if value is not None},
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    return run(read(flags=given), Reporter())


def divergence(opened: Any, asked: list[str]) -> float:
    """Return the mean over the tokens of texts of KL(backbone || adapted), in nats."""
    total = count = 0.0
    for text in asked:
        inputs = opened.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            after = opened.model(**inputs).logits.log_softmax(-1)
            with ah.disabled(opened.model):
                before = opened.model(**inputs).logits.log_softmax(-1)
        tokens = (before.exp() * (before - after[:, -before.shape[1] :])).sum(-1)
        total, count = total + tokens.sum().item(), count + tokens.numel()
    return total / count


def methods_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the methods."""
    lines = ["| method | trained | exact match | loss | forgotten, nats a token |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| `{row['method']}` | {row['trained']:,} | {row['exact_match']:.2f} | {row['loss']:.3f} "
        f"| {row['kl']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


# Learning rates


def rates(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the loss on held-out rows of each method at five rates, on both models."""
    from adapterhub.methods import METHODS as known

    yield from (measured := recorded("rates"))
    done = {(row["model"], row["method"], row["factor"]) for row in measured}
    for model in ("smollm2", "flan-t5-small")[: 2 if options.pairs else 1]:
        for method in SWEPT:
            for factor in FACTORS:
                if (model, method, factor) in done:
                    continue
                rate = known[method]().learning_rate * factor
                with tempfile.TemporaryDirectory() as folder:
                    if model == "smollm2":
                        outcome = on_tickets(
                            method, Path(folder), QUICK_STEPS, rate=rate, dtype="bf16"
                        )
                    else:
                        outcome = on_pairs(options.pairs, method, Path(folder), rate)
                    loss = outcome.metrics["loss"]
                yield {
                    "model": model,
                    "method": method,
                    "rate": rate,
                    "factor": factor,
                    "loss": loss,
                }


def on_pairs(source: Path, method: str, folder: Path, rate: float) -> Any:
    """Train Flan-T5 on translations."""
    files = {}
    for name, split, count in (("train", "train", 8 * QUICK_STEPS), ("eval", "val", 100)):
        sides = []
        for language in ("en", "de"):
            with gzip.open(source / f"{split}.{language}.gz", "rt", encoding="utf-8") as file:
                sides.append(file.read().splitlines()[:count])
        rows = [json.dumps({"text": a, "label": b}) + "\n" for a, b in zip(*sides, strict=True)]
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(rows), encoding="utf-8")
    task = "seq2seq(template='translate English to German: {text}')"
    return train("flan-t5-small", method, task, files, folder / "run", QUICK_STEPS, rate)


def rates_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the rates: a line for each model and method."""
    head = ["model", "method", "rate", *(f"x {factor:g}" for factor in FACTORS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    cells: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["method"]), {})[row["factor"]] = row
    for (model, method), found in cells.items():
        best = min(row["loss"] for row in found.values())
        losses = [found[factor]["loss"] if factor in found else None for factor in FACTORS]
        shown = [f"**{x:.3f}**" if x == best else f"{x:.3f}" if x else "" for x in losses]
        rate = found[1.0]["rate"] if 1.0 in found else float("nan")
        lines.append(f"| {model} | `{method}` | {rate:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


# The rate of the usual method


def usual_rates(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the loss of the usual method on held-out rows, at each rate and with each seed."""
    yield from (measured := recorded("usual"))
    done = {(row["data"], row["rate"], row["seed"]) for row in measured}
    for seed in SEEDS:
        for data in ("tickets", "gsm8k"):
            for rate in USUAL_RATES:
                if (data, rate, seed) in done:
                    continue
                began = time.process_time()
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    how = {"rate": rate, "dtype": "bf16", "seed": seed}
                    if data == "tickets":
                        outcome = on_tickets(OF_LANGUAGE_MODELS, folder, QUICK_STEPS, **how)
                    else:
                        files = questions(options.texts.parent, folder)
                        outcome = train(
                            "smollm2", OF_LANGUAGE_MODELS, "causal-lm", files, folder / "run",
                            QUICK_STEPS, batch_size=4, **how,
                        )  # fmt: skip
                yield {
                    "data": data, "rate": rate, "seed": seed, "method": OF_LANGUAGE_MODELS,
                    "loss": outcome.metrics["loss"],
                    "processor_seconds": round(time.process_time() - began, 1),
                }  # fmt: skip


def questions(source: Path, folder: Path) -> dict[str, Path]:
    """Write the first rows of GSM8K, for training and for evaluation."""
    files = {}
    for split, count in QUESTIONS.items():
        lines = (source / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        name = "eval" if split == "test" else split
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def usual_rates_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the rates: the mean loss, and that of each seed if there are several."""
    lines = ["| learning rate | tickets | GSM8K |", "|---|---|---|"]
    losses: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        losses.setdefault((row["data"], row["rate"]), []).append(row["loss"])
    means = {key: fmean(each) for key, each in losses.items()}
    best = {data: min(v for (d, _), v in means.items() if d == data) for data, _ in means}
    for rate in sorted({rate for _, rate in losses}):
        cells = []
        for data in ("tickets", "gsm8k"):
            if (data, rate) not in means:
                cells.append("")
                continue
            mean = means[data, rate]
            shown = f"**{mean:.3f}**" if mean == best[data] else f"{mean:.3f}"
            seeds = ", ".join(f"{x:.3f}" for x in losses[data, rate])
            cells.append(f"{shown} ({seeds})" if len(losses[data, rate]) > 1 else shown)
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


Measure = Callable[[argparse.Namespace], Iterator[dict[str, Any]]]
CLAIMS: dict[str, tuple[Measure, Callable[[list[dict[str, Any]]], str]]] = {
    "quantization": (quantization, quantization_table),
    "merges": (merges, merges_table),
    "methods": (methods, methods_table),
    "rates": (rates, rates_table),
    "usual": (usual_rates, usual_rates_table),
}


if __name__ == "__main__":
    main()
