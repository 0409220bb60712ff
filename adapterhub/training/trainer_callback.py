"""A callback for transformers' Trainer that saves adapters beside its checkpoints.

<output_dir>/checkpoint-N/adapters/NAME     with each checkpoint
<output_dir>/adapters/NAME                  after training: with load_best_model_at_end, the best

Each folder is what `adapter.save` writes. To resume, and to load the best checkpoint, Trainer calls
`load_state_dict` of the model, which puts all tensors of the adapters back
(`adapterhub.adapters.model_methods`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import TrainerCallback as TransformersCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adapterhub.adapters.adapter import STOPS, Adapter
from adapterhub.adapters.route import adapters
from adapterhub.backbones.weights import is_sharded
from adapterhub.errors import TrainingError, warn_user

FOLDER = "adapters"


class TrainerCallback(TransformersCallback):
    """Saves the attached adapters with each checkpoint of a Trainer, and after training.

    `Trainer(model, ..., callbacks=[TrainerCallback()])`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a model without adapters before it trains; record the Trainer's tokenizer.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: what else it passes; the model and the tokenizer or processor.

        Raises:
            TrainingError: no adapter is attached.
        """
        attached = adapters(_unwrapped(kwargs["model"])).values()
        if not attached:
            raise TrainingError(
                "no adapter is attached to the model of this Trainer",
                hint='adapterhub.attach(model, "lora"), then Trainer(model, ...)',
            )
        given = kwargs.get("processing_class")
        tokenizer = getattr(given, "tokenizer", given)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            for adapter in attached:
                _record(adapter, tokenizer)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the adapters into the checkpoint that was just written.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: what else it passes; the model.
        """
        checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if checkpoint.is_dir():
            _save(kwargs["model"], checkpoint, state)
        elif state.is_world_process_zero:  # a search of hyperparameters has folders of its own
            warn_user(f"no adapters are saved with a checkpoint: {checkpoint} is not there")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the trained adapters.

        Args:
            args: the arguments of the Trainer.
            state: its state.
            control: not used.
            kwargs: what else it passes; the model.
        """
        _save(kwargs["model"], Path(str(args.output_dir)), state)


def _record(adapter: Adapter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Record the tokens behind the Trainer's texts, and its chat template, unless a run has."""
    if not adapter.metadata.training and (stops := adapter.stops_of(tokenizer)):
        adapter.metadata.training[STOPS] = [*stops]
    template = tokenizer.chat_template
    if adapter.metadata.chat_template is None and isinstance(template, str):
        adapter.metadata.chat_template = template


def _save(model: Any, folder: Path, state: TrainerState) -> None:
    """Save each adapter in the first process; of a sharded model, all processes take part."""
    model = _unwrapped(model)
    if state.is_world_process_zero or any(map(is_sharded, model.parameters())):
        for name, adapter in adapters(model).items():
            adapter.save(folder / FOLDER / name, overwrite=True)


def _unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            return model
        model = inner
    return model
