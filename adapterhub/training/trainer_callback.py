"""A callback for transformers' Trainer that saves adapters alongside its checkpoints.

<output_dir>/checkpoint-N/adapters/NAME     with each checkpoint
<output_dir>/adapters/NAME                  after training: with load_best_model_at_end, the best

Methods that take part in training steps (AdaLoRA) do so here too: their penalty is part of the
gradients, and an evaluation before the method is ready cannot be the best one.

Each folder has the format written by `adapter.save`. To resume, and to load the best checkpoint,
Trainer calls the model's `load_state_dict`, which restores all tensors of the adapters
(`adapterhub.adapters.model_methods`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import TrainerCallback as TransformersCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adapterhub.adapters.adapter import STOPS, Adapter
from adapterhub.adapters.route import adapters
from adapterhub.anatomy.backbone import is_sharded, is_transformers
from adapterhub.errors import TrainingError, warn_user
from adapterhub.loop.trainee import check_whole, is_ready, penalty, stepped, stepping

FOLDER = "adapters"


class TrainerCallback(TransformersCallback):
    """Saves the attached adapters with each checkpoint of a Trainer, and after training.

    `Trainer(model, ..., callbacks=[TrainerCallback()])`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the model has adapters before it trains; record the Trainer's tokenizer.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: other arguments; the model and the tokenizer or processor.

        Raises:
            OutputError: an adapter cannot be saved.
            TrainingError: no adapter is attached, or a method takes part in the steps of a sharded
                model.
        """
        model = _unwrapped(kwargs["model"])
        attached = adapters(model).values()
        if not attached:
            raise TrainingError(
                "no adapter is attached to the model of this Trainer",
                hint='adapterhub.attach(model, "lora"), then Trainer(model, ...)',
            )
        if any(map(is_sharded, model.parameters())):
            check_whole(", ".join(m.name for each in attached for m, _ in stepping(each)))
        processing = kwargs.get("processing_class")
        tokenizer = getattr(processing, "tokenizer", processing)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            for adapter in attached:
                _record(adapter, tokenizer)
        for adapter in attached:
            adapter.check_savable()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the gradients of penalties, and drop evaluations before methods were ready.

        Args:
            args: not used.
            state: the state of the Trainer.
            control: not used.
            kwargs: other arguments; the model and the optimizer.
        """
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        for adapter in _stepping(kwargs["model"]):
            if (added := penalty(adapter)) is not None:
                (added if scaler is None else scaler.scale(added)).backward()
            if not is_ready(adapter, state.global_step / state.max_steps):
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update methods after a step of the optimizer, unless it was skipped.

        Args:
            args: not used.
            state: the state of the Trainer.
            control: not used.
            kwargs: other arguments; the model and the optimizer.
        """
        if not getattr(kwargs["optimizer"], "step_was_skipped", False):
            for adapter in _stepping(kwargs["model"]):
                stepped(adapter, (state.global_step + 1) / state.max_steps)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the adapters into the checkpoint that was just written.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: other arguments; the model.
        """
        checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if checkpoint.is_dir():
            _save(kwargs["model"], checkpoint, state)
        elif state.is_world_process_zero:  # a hyperparameter search has separate folders
            warn_user(f"no adapters are saved with a checkpoint: {checkpoint} is not there")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the trained adapters.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: other arguments; the model.
        """
        _save(kwargs["model"], Path(str(args.output_dir)), state)


def _stepping(model: Any) -> list[Adapter]:
    """Return the adapters being trained whose methods take part in the steps."""
    return [
        each
        for each in adapters(_unwrapped(model)).values()
        if stepping(each) and any(p.requires_grad for p in each.parameters())
    ]


def _record(adapter: Adapter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Record the stop tokens of the Trainer's texts, and its chat template, unless a run has."""
    if not adapter.metadata.training and (stops := adapter.stops_of(tokenizer)):
        adapter.metadata.training[STOPS] = [*stops]
    template = tokenizer.chat_template
    if adapter.metadata.chat_template is None and isinstance(template, str):
        adapter.metadata.chat_template = template


def _save(model: Any, folder: Path, state: TrainerState) -> None:
    """Save each adapter in the first process; for a sharded model, all processes take part."""
    model = _unwrapped(model)
    if state.is_world_process_zero or any(map(is_sharded, model.parameters())):
        for name, adapter in adapters(model).items():
            adapter.save(folder / FOLDER / name, overwrite=True)


def _unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while not is_transformers(model):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            return model
        model = inner
    return model
