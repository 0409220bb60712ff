"""The peers of `training.py`: peft with transformers' Trainer, and with a loop written by hand.

    python benchmarks/speed/peers.py trainer|loop JOB.json

JOB.json names the backbone, the files, the columns and the seed; the last line of the output is
JSON: accuracy, and the seconds of training alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

BATCH, EVALUATION_BATCH, LENGTH = 32, 64, 128
RATE, WARMUP, DECAY = 1e-3, 0.06, 0.01
MEGA_BATCH = 50  # batches that are sorted by length together


def main() -> None:
    """Train as the first argument says, and print the result."""
    how, path = sys.argv[1:]
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    set_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["backbone"])
    train, evaluation = (rows(job, job[part], tokenizer) for part in ("train", "eval"))
    model = AutoModelForSequenceClassification.from_pretrained(job["backbone"], num_labels=2)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"]
    )
    model = get_peft_model(model, lora)
    run = {"trainer": with_trainer, "loop": by_hand}[how]
    result = run(model, tokenizer, train, evaluation, job)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
    print(json.dumps(result))


def rows(job: dict[str, Any], path: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Read and tokenize the rows of a file."""
    table = pandas.read_csv(path, sep="\t", quoting=3, encoding="utf-8-sig", dtype=str)
    texts = [table[column].fillna("").tolist() for column in job["texts"]]
    encoded = tokenizer(*texts, truncation=True, max_length=LENGTH)
    labels = table[job["label"]].astype(int).tolist()
    columns = {**encoded, "labels": labels}
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def with_trainer(
    model: Any, tokenizer: Any, train: list[Any], evaluation: list[Any], job: dict[str, Any]
) -> dict[str, float]:
    """Train as peft's examples do."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=job["epochs"],
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=EVALUATION_BATCH,
            learning_rate=RATE,
            warmup_steps=WARMUP,
            weight_decay=DECAY,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            seed=job["seed"],
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda p: {"accuracy": float((p[0].argmax(1) == p[1]).mean())},
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        scores = [
            each["eval_accuracy"] for each in trainer.state.log_history if "eval_accuracy" in each
        ]
    return {"accuracy": scores[-1], "training_seconds": seconds}


def by_hand(
    model: Any, tokenizer: Any, train: list[Any], evaluation: list[Any], job: dict[str, Any]
) -> dict[str, float]:
    """Train in a careful loop: sorted by length, frozen dropout off, bf16 autocast if asked for."""
    model.eval()  # LoRA has no dropout here; the frozen part trains without its own
    generator = torch.Generator().manual_seed(job["seed"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
    steps = job["epochs"] * -(-len(train) // BATCH)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * steps), steps)
    start = time.perf_counter()
    for _ in range(job["epochs"]):
        for indices in batches(train, generator):
            with torch.autocast("cpu", torch.bfloat16, enabled=job["autocast"]):
                loss = model(**collate([train[i] for i in indices], tokenizer)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - start
    return {"accuracy": accuracy(model, tokenizer, evaluation, job), "training_seconds": seconds}


def batches(train: list[Any], generator: torch.Generator) -> list[list[int]]:
    """Return shuffled batches of rows of similar length."""
    order = torch.randperm(len(train), generator=generator).tolist()
    size = BATCH * MEGA_BATCH
    runs = [order[i : i + size] for i in range(0, len(order), size)]
    by_length = [i for run in runs for i in sorted(run, key=lambda i: -len(train[i]["input_ids"]))]
    cut = [by_length[i : i + BATCH] for i in range(0, len(by_length), BATCH)]
    return [cut[i] for i in torch.randperm(len(cut), generator=generator).tolist()]


def collate(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest row."""
    names = [name for name in rows[0] if name != "labels"]
    fill = {"input_ids": tokenizer.pad_token_id}
    batch = {
        name: pad_sequence(
            [torch.tensor(row[name]) for row in rows], True, padding_value=fill.get(name, 0)
        )
        for name in names
    }
    return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


def accuracy(model: Any, tokenizer: Any, evaluation: list[Any], job: dict[str, Any]) -> float:
    """Evaluate in batches of rows of similar length."""
    ordered = sorted(evaluation, key=lambda row: len(row["input_ids"]))
    right = 0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=job["autocast"]):
        for i in range(0, len(ordered), EVALUATION_BATCH):
            batch = collate(ordered[i : i + EVALUATION_BATCH], tokenizer)
            right += int((model(**batch).logits.argmax(1) == batch["labels"]).sum())
    return right / len(ordered)


if __name__ == "__main__":
    main()
