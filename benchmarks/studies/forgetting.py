"""Fine-tune one task after another, and test the first one again.

    python benchmarks/studies/forgetting.py DATA --output forgetting.json [--seeds 3] [--steps 150]
    python benchmarks/studies/claims.py forgetting.json

DATA has GLUE's files. A backbone trains on SST-2, is tested, trains on MRPC, and is tested on SST-2
again, with the head that SST-2 had. Each task has a head of its own, on the mean of the last
states. The approaches:

    full                 all parameters, one task after the other
    freeze               the top two layers, one task after the other
    lora                 one adapter for both tasks, one after the other
    lora, rate / 10      the same, the second task with a tenth of the learning rate
    lora, one per task   two adapters on the frozen backbone; that of the first task is active again

The learning rates are the methods' defaults. The record has which test rows were right, before and
after, for each seed: claims.py tests the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.files.atomic import replace_file
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import read_draft
from adapterhub.training.run_data import read_data

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
HEAD_RATE = 5e-3
TASKS = {
    "sst2": {"text": "sentence", "label": "label", "rows": 8000},
    "mrpc": {"text": "#1 String", "pair": "#2 String", "label": "Quality"},
}
FIRST, SECOND = TASKS


@dataclass(frozen=True)
class Approach:
    """How two tasks are learnt: the method, and what the second task does with the first one's.

    Attributes:
        method: its spec.
        per_task: whether each task has an adapter of its own.
        second: the factor on the learning rate of the second task.
    """

    method: str
    per_task: bool = False
    second: float = 1.0


APPROACHES = {
    "full": Approach("full"),
    "freeze": Approach("freeze"),
    "lora": Approach("lora"),
    "lora, rate / 10": Approach("lora", second=0.1),
    "lora, one per task": Approach("lora", per_task=True),
}


@dataclass(frozen=True)
class Rows:
    """The rows of a task: texts, and the numbers of their labels."""

    texts: list[tuple[str, ...]]
    labels: list[int]

    def batches(self, size: int, draw: random.Random) -> Iterator[Rows]:
        """Yield batches without end, in an order of their own in each epoch."""
        while True:
            order = draw.sample(range(len(self.labels)), len(self.labels))
            for start in range(0, len(order) - size + 1, size):
                yield self.pick(order[start : start + size])

    def pick(self, indices: Sequence[int]) -> Rows:
        """Return some of the rows."""
        return Rows([self.texts[i] for i in indices], [self.labels[i] for i in indices])


@dataclass
class Classifier:
    """A backbone with its tokenizer, and a head for each task."""

    model: Any
    tokenizer: Any
    heads: dict[str, nn.Linear]

    def logits(self, task: str, rows: Rows) -> Tensor:
        """Return the logits of some rows, by the head of their task."""
        columns = [list(side) for side in zip(*rows.texts, strict=True)]
        batch = self.tokenizer(
            *columns, padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        states = self.model.base_model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].to(states.dtype)
        pooled: Tensor = self.heads[task]((states * mask).sum(1) / mask.sum(1))
        return pooled

    def right(self, task: str, rows: Rows, size: int = 64) -> str:
        """Return a digit for each row: 1 if it is classified rightly, else 0."""
        self.model.eval()
        digits = []
        with torch.inference_mode():
            for start in range(0, len(rows.labels), size):
                part = rows.pick(range(start, min(start + size, len(rows.labels))))
                given = self.logits(task, part).argmax(-1).tolist()
                digits += [str(int(a == b)) for a, b in zip(given, part.labels, strict=True)]
        return "".join(digits)


def new_classifier(backbone: str) -> Classifier:
    """Load the backbone, and make a head for each task."""
    model, tokenizer = ah.load_backbone(backbone)
    width = model.config.hidden_size
    return Classifier(model, tokenizer, {task: nn.Linear(width, 2) for task in TASKS})


def run_approach(
    approach: Approach, data: dict[str, dict[str, Rows]], backbone: str, seed: int, steps: int
) -> dict[str, str]:
    """Learn both tasks; return which test rows of the first one were right, before and after.

    Args:
        approach: how.
        data: the rows by task and split.
        backbone: its id or folder.
        seed: of initial values and the order of rows.
        steps: of each task.
    """
    torch.manual_seed(seed)
    classifier = new_classifier(backbone)
    ah.attach(classifier.model, approach.method, name=FIRST)
    train(classifier, FIRST, data[FIRST]["train"], approach, seed, steps)
    before = classifier.right(FIRST, data[FIRST]["test"])
    if approach.per_task:
        ah.attach(classifier.model, approach.method, name=SECOND)
    train(classifier, SECOND, data[SECOND]["train"], approach, seed, steps)
    second = classifier.right(SECOND, data[SECOND]["test"])
    if approach.per_task:
        ah.activate(classifier.model, FIRST)
    after = classifier.right(FIRST, data[FIRST]["test"])
    return {"before": before, "after": after, "second": second}


def train(
    classifier: Classifier, task: str, rows: Rows, approach: Approach, seed: int, steps: int
) -> None:
    """Train what has a gradient, and the head of the task.

    Args:
        classifier: the model.
        task: whose head trains.
        rows: its training rows.
        approach: the method, and the factor of the second task.
        seed: of the order of rows.
        steps: of the optimizer.
    """
    (method,) = parse_methods(approach.method)
    factor = approach.second if task == SECOND else 1.0
    own = [p for p in classifier.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": own, "lr": factor * method.learning_rate},
            {"params": classifier.heads[task].parameters(), "lr": HEAD_RATE},
        ]
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    batches = rows.batches(16, random.Random(seed))
    for _ in range(steps):
        batch = next(batches)
        classifier.model.train()
        loss = nn.functional.cross_entropy(
            classifier.logits(task, batch), torch.tensor(batch.labels)
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def read_task(folder: Path, task: str) -> dict[str, Rows]:
    """Read the training and the test rows of a task."""
    options = {**TASKS[task], "train": str(folder / task / "train.tsv")}
    recipe = {"data": {**options, "eval": str(folder / task / "dev.tsv")}, "seed": 0}
    found = read_data(read_draft(None, (), recipe))
    names = sorted(found.labels)
    return {
        split: Rows(
            [(e.text, e.pair) if e.pair else (e.text,) for e in examples],
            [names.index(e.label) for e in examples],
        )
        for split, examples in (("train", found.train), ("test", found.evaluation))
    }


def study(
    data: dict[str, dict[str, Rows]], names: Sequence[str], backbone: str, seeds: int, steps: int
) -> dict[str, Any]:
    """Run some approaches with several seeds, and return the record.

    Args:
        data: the rows by task and split.
        names: the approaches.
        backbone: its id or folder.
        seeds: how many.
        steps: of each task.
    """
    approaches: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    for seed in range(1, seeds + 1):
        for name in names:
            found = run_approach(APPROACHES[name], data, backbone, seed, steps)
            approaches[name].append(found)
            shares = {k: f"{v.count('1') / len(v):.3f}" for k, v in found.items()}
            print(f"seed {seed}, {name}: {shares}", flush=True)
    return {
        "first": FIRST,
        "second": SECOND,
        "backbone": backbone,
        "steps": steps,
        "seeds": seeds,
        "device": f"CPU ({platform.machine()}), {torch.get_num_threads()} threads",
        "versions": {
            "adapterhub": ah.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "approaches": approaches,
    }


def main() -> None:
    """Run the study, and write its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--backbone", default=BACKBONE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", choices=APPROACHES, default=list(APPROACHES))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    data = {task: read_task(options.data, task) for task in TASKS}
    found = study(data, options.only, options.backbone, options.seeds, options.steps)
    replace_file(options.output, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
