"""Steps of a language model with the logits of all tokens, and of some at a time.

    python benchmarks/head_loss.py --measure     # about 5 minutes on 2 cores
    python benchmarks/head_loss.py --table

LoRA on a random model of the shape of GPT-2 (124 M parameters, a vocabulary of 50,257), 8 rows of
128 tokens. Of each row all tokens are learned, or the last quarter, as of answers behind prompts.
Each run is a process of its own, in turns: the median of its steps, and the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import records

ROWS, TOKENS, STEPS, TURNS = 8, 128, 6, 2
WHOLE, CHUNKS = "all", "some"
LEARNED = {"all tokens": 1.0, "a quarter": 0.25}
DTYPES = ("fp32", "bf16")


def step_times(how: str, dtype: str, learned: float) -> dict[str, float]:
    """Run some steps in this process, and return their median and the peak of its memory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import adapterhub as ah
    from adapterhub.recipe.recipe import RunOptions
    from adapterhub.speed.head_loss import choose_head_loss
    from adapterhub.tasks import parse_task

    torch.manual_seed(0)
    config = GPT2Config(loss_type="ForCausalLM")
    model = GPT2LMHeadModel(config).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    adapter = ah.attach(model, "lora")
    adapter.train_mode()
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS))
    labels = ids.clone()
    labels[:, : round(TOKENS * (1 - learned))] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    options = RunOptions(batch_size=ROWS, max_length=TOKENS)
    row = {name: tensor[:1] for name, tensor in batch.items()}
    below = None
    if how == CHUNKS:
        below = choose_head_loss(adapter, parse_task("causal-lm"), options, lambda: row)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-4)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(**batch).loss if below is None else below(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"seconds": statistics.median(seconds[1:]), "gigabytes": peak, "loss": loss.item()}


def measure() -> None:
    """Run all cells in turns, and write the record."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for _ in range(TURNS):
        for dtype in DTYPES:
            for name in LEARNED:
                for how in (WHOLE, CHUNKS):
                    words = [sys.executable, __file__, "--run", how, dtype, name]
                    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                    cell = json.loads(done.stdout.splitlines()[-1])
                    cells.setdefault(f"{dtype}, {name}, {how}", []).append(cell)
                    print(dtype, name, how, cell, flush=True)
    records.write("head-loss", {"cells": cells})


def table() -> str:
    """Return the Markdown table."""
    cells = records.read("head-loss")["cells"]
    lines = ["| learned | dtype | all logits, s | some at a time, s | ratio | memory, GB |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name in LEARNED:
        for dtype in DTYPES:
            runs = [cells[f"{dtype}, {name}, {how}"] for how in (WHOLE, CHUNKS)]
            whole, some = (statistics.median(r["seconds"] for r in each) for each in runs)
            peaks = [statistics.median(r["gigabytes"] for r in each) for each in runs]
            lines.append(
                f"| {name} | {dtype} | {whole:.2f} | {some:.2f} | {some / whole:.2f} | "
                f"{peaks[0]:.2f} to {peaks[1]:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the table."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        how, dtype, name = options.run
        print(json.dumps(step_times(how, dtype, LEARNED[name])))
    if options.measure:
        measure()
    if options.table:
        print(table())


if __name__ == "__main__":
    main()
