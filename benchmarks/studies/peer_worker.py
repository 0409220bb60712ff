"""Train single runs of a study with another library, in that library's own environment.

    PYTHON benchmarks/studies/peer_worker.py peft|adapters|transformers

`peers.py` starts this. It imports torch, transformers, and peft or adapters; nothing of adapterhub.
Lines of JSON are read from stdin and written to stdout. The first line that it writes says which
versions it has; then each line that it reads is a job:

    {"do": "count", ...}   how many parameters a method trains
    {"do": "train", ...}   a run; at each evaluation it writes {"logits": ...} and reads
                           {"score": ...}, so that `peers.py` scores all libraries with one code

and the last line that it writes for a job is {"result": ...}. Training is what a user of the
library writes: `Trainer` (for adapters `AdapterTrainer`) with `bf16=True`, its defaults but for
what the job gives, and the best checkpoint loaded at the end. Evaluations are in order of length,
so that little is padded. The head is that of the library:

    peft, transformers   AutoModelForSequenceClassification: for BERT a linear layer on the pooler,
                         which peft leaves frozen
    adapters             AutoAdapterModel.add_classification_head: two layers on the first token
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SETTINGS = {"version": 2, "dtype": "bf16 autocast", "eval_batch_size": 64}
NAME = "task"  # of the adapter and of its head


class NotFiniteError(Exception):
    """A loss or an output is not finite."""


class Channel:
    """Lines of JSON to and from the parent; what libraries print goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Write a line."""
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    def receive(self) -> Any:
        """Read a line; None at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


class Library:
    """Full fine-tuning with transformers alone; a subclass adds a method of its library."""

    trainer: type[Trainer] = Trainer
    head = "AutoModelForSequenceClassification"

    @property
    def version(self) -> str:
        """The version of the library."""
        return str(transformers.__version__)

    def model(self, job: dict[str, Any]) -> Any:
        """Load the backbone with a head, and add the method."""
        return AutoModelForSequenceClassification.from_pretrained(
            job["folder"], num_labels=max(job["classes"], 1)
        )

    def head_names(self, model: Any) -> set[str]:
        """Return the children of the model that are its head."""
        return {name for name, _ in model.named_children()} - {model.base_model_prefix}

    def save(self, model: Any, folder: str) -> None:
        """Save what was trained."""
        model.save_pretrained(folder)


class Peft(Library):
    """peft, with transformers' Trainer."""

    @property
    def version(self) -> str:
        """The version of the library."""
        import peft

        return str(peft.__version__)

    def model(self, job: dict[str, Any]) -> Any:
        """Load the backbone with a head, and add the method."""
        import peft

        config = getattr(peft, job["config"]["class"])
        options = {"task_type": peft.TaskType.SEQ_CLS, **job["config"]["options"]}
        return peft.get_peft_model(super().model(job), config(**options))

    def head_names(self, model: Any) -> set[str]:
        """Return the children of the model that are its head."""
        return super().head_names(model.get_base_model())


class Adapters(Library):
    """adapters, with its AdapterTrainer."""

    head = "AutoAdapterModel.add_classification_head"

    def __init__(self) -> None:
        from adapters import AdapterTrainer

        self.trainer = AdapterTrainer

    @property
    def version(self) -> str:
        """The version of the library."""
        import adapters

        return str(adapters.__version__)

    def model(self, job: dict[str, Any]) -> Any:
        """Load the backbone, and add the method and a head."""
        from adapters import AutoAdapterModel

        model = AutoAdapterModel.from_pretrained(job["folder"])
        model.add_classification_head(NAME, num_labels=max(job["classes"], 1))
        model.add_adapter(NAME, config=self.config(job["config"]))
        model.train_adapter(NAME)
        return model

    def config(self, described: dict[str, Any]) -> Any:
        """Build a configuration, of which some options may be configurations themselves."""
        import adapters

        options = {
            name: self.config(value) if isinstance(value, dict) else value
            for name, value in described["options"].items()
        }
        return getattr(adapters, described["class"])(**options)

    def save(self, model: Any, folder: str) -> None:
        """Save the adapter with its head."""
        model.save_adapter(folder, NAME)


LIBRARIES = {"transformers": Library, "peft": Peft, "adapters": Adapters}


def main() -> None:
    """Answer jobs until there are no more."""
    channel, name = Channel(), sys.argv[1]
    library = LIBRARIES[name]()
    TrainingArguments(tempfile.gettempdir(), report_to=[])  # needs accelerate
    channel.send(hello(name, library))
    while job := channel.receive():
        answer = {"count": count, "train": train}[job.pop("do")]
        channel.send({"result": answer(job, library, channel)})


def hello(name: str, library: Library) -> dict[str, Any]:
    """Describe this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "library": name,
        "version": library.version,
        "settings": {**SETTINGS, "trainer": library.trainer.__name__, "head": library.head},
        "device": f"{device}, {kind}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "versions": {
            name: library.version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def count(job: dict[str, Any], library: Library, channel: Channel) -> dict[str, Any]:
    """Count the parameters that train."""
    return parameters(library.model(job), library)


def parameters(model: Any, library: Library) -> dict[str, int]:
    """Count the trained parameters of the method and of the head."""
    heads = library.head_names(model)
    counts = {"trained": 0, "head": 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts["head" if heads & set(name.split(".")) else "trained"] += parameter.numel()
    return counts


def train(job: dict[str, Any], library: Library, channel: Channel) -> dict[str, Any]:
    """Train, and return what the best checkpoint predicts; a run that fails says why."""
    reset_peak_memory()
    start = time.perf_counter()
    try:
        found = run(job, library, channel)
    except NotFiniteError as error:
        return {"status": "diverged", "error": str(error)}
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    costs = {"seconds": time.perf_counter() - start, "peak_memory": peak_memory()}
    return {"status": "done", **found, "costs": {**found["costs"], **costs}}


def run(job: dict[str, Any], library: Library, channel: Channel) -> dict[str, Any]:
    """Train one run."""
    set_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    parts = {name: encoded(part, tokenizer, job) for name, part in job["rows"].items()}
    training = parts.pop("train")
    orders = {name: by_length(part) for name, part in parts.items()}
    parts = {name: [part[i] for i in orders[name]] for name, part in parts.items()}
    model = library.model(job)
    collator = DataCollatorWithPadding(tokenizer)
    with tempfile.TemporaryDirectory(dir=job["work"]) as folder:
        clock = Clock(job["evaluate_every"])
        trainer = library.trainer(
            model=model,
            args=arguments(job, folder),
            train_dataset=training,
            eval_dataset=parts["select"],
            data_collator=collator,
            compute_metrics=lambda output: {"score": score(output, orders["select"], channel)},
            callbacks=[clock],
        )
        trainer.train()
        trainer.compute_metrics = None
        logits = {
            name: outputs(trainer.predict(part).predictions, orders[name])
            for name, part in parts.items()
        }
        saved = Path(folder) / "saved"
        library.save(model, str(saved))
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.suffix != ".md")
    return {
        "logits": logits,
        "evaluations": clock.evaluations,
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "costs": {
            **parameters(model, library),
            "file_bytes": size,
            "train_seconds": clock.seconds,
        },
    }


def arguments(job: dict[str, Any], folder: str) -> TrainingArguments:
    """Return the options of the Trainer: its defaults, but for those of the job."""
    return TrainingArguments(
        folder,
        seed=job["seed"],
        learning_rate=job["rate"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch_size"],
        per_device_eval_batch_size=SETTINGS["eval_batch_size"],
        eval_strategy="steps",
        eval_steps=job["evaluate_every"],
        save_strategy="steps",
        save_steps=job["evaluate_every"],
        save_only_model=True,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=not job["lower_is_better"],
        logging_steps=10,
        logging_nan_inf_filter=False,
        label_names=["labels"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        **job["options"],
    )


def encoded(part: dict[str, Any], tokenizer: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokenize texts or pairs; rows without labels have none."""
    columns = dict(tokenizer(*part["texts"], truncation=True, max_length=job["length"]))
    if "labels" in part:
        columns["labels"] = part["labels"]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def by_length(part: list[dict[str, Any]]) -> list[int]:
    """Return the order of rows by the length of their input."""
    return sorted(range(len(part)), key=lambda i: len(part[i]["input_ids"]))


def score(output: Any, order: list[int], channel: Channel) -> float:
    """Have the parent score an evaluation."""
    channel.send({"logits": outputs(output.predictions, order)})
    return float(channel.receive()["score"])


def outputs(predictions: Any, order: list[int]) -> list[list[float]]:
    """Return the logits of a model's outputs, of which some models have several.

    Args:
        predictions: the outputs, in the order in which rows were evaluated.
        order: the place of each of them among the rows.

    Raises:
        NotFiniteError: a logit is not finite.
    """
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    rows: list[list[float]] = logits.reshape(len(logits), -1).tolist()
    if not all(math.isfinite(value) for row in rows for value in row):
        raise NotFiniteError("the outputs of the model are not finite")
    return [row for _, row in sorted(zip(order, rows, strict=True))]


class Clock(TrainerCallback):
    """Evaluates after the last step as well, measures training alone, and stops a lost run."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.began = self.mark = self.elsewhere = self.seconds = 0.0
        self.loss: float | None = None
        self.evaluations: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock, and have the last step evaluated."""
        self.mark = time.perf_counter()
        self.seconds = self.mark - self.began - self.elsewhere
        if state.global_step == args.max_steps:
            control.should_evaluate = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the evaluation and the saving."""
        self.elsewhere += time.perf_counter() - self.mark

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        """Refuse a loss that is not finite."""
        if "loss" in logs:
            self.loss = float(logs["loss"])
            if not math.isfinite(self.loss):
                raise NotFiniteError(f"the loss is {self.loss} at step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember the evaluation."""
        seconds = time.perf_counter() - self.began
        step = {"step": state.global_step, "seconds": seconds, "loss": self.loss}
        self.evaluations.append(step)


def reset_peak_memory() -> None:
    """Let the peak memory begin with what this process takes now, where Linux allows it."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory() -> int:
    """Return the peak memory in bytes, 0 where it is not known."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
