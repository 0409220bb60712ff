"""Where a run gets its backbone and its encoded rows: loaded for it alone, or shared with others.

A run on a shared backbone ends with the same bytes as alone: its adapter is detached when it ends,
which restores the backbone, and its head is drawn with the numbers that loading would draw.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from adapterhub.adapters.attach import detach
from adapterhub.adapters.attached import adapters
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.newly_initialized import initialize_again, newly_initialized
from adapterhub.data.examples import data_hash
from adapterhub.loop.processes import join_processes, own_device
from adapterhub.recipe.recipe import Recipe
from adapterhub.speed.activation_store import KeptActivations, memory_limit
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, dump_task
from adapterhub.training.kernels import KernelChoice, can_compute, without_bf16
from adapterhub.training.lengths import FittedRows, fit_rows
from adapterhub.training.run_data import RunData

KEPT_ROWS = 4  # encoded data sets


@dataclass(frozen=True)
class Loaded:
    """A backbone that is ready to train, with its processor, and the kernels that it computes with.

    Torch's generator is where the loading left it. `activations` are outputs of its frozen layers,
    which the runs on it share.
    """

    model: PreTrainedModel
    processor: Any
    kernels: KernelChoice
    activations: KeptActivations = field(default_factory=KeptActivations, compare=False)


class BackboneLoader:
    """Loads the backbone of each run, and encodes its rows."""

    def backbone(self, recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
        """Load a backbone with the head of a task; the seed of the recipe draws the head."""
        loaded = _load(recipe, data, kernels)
        if kernels.is_new_dtype(recipe.dtype) and not can_compute(loaded.model):
            loaded = _load(recipe, data, without_bf16(recipe))
        return loaded

    def rows(
        self, data: RunData, setting: Setting, chosen: int | None, trained: int | None
    ) -> FittedRows:
        """Encode the examples of a run, as `fit_rows` does."""
        return fit_rows(data, setting, chosen, trained)

    def release(self, model: PreTrainedModel) -> None:
        """Take back the backbone of a run that has ended."""


@dataclass
class _Kept:
    """A loaded backbone, and whether its head can be drawn anew without loading."""

    loaded: Loaded
    draws: bool


@dataclass
class SharedLoader(BackboneLoader):
    """Loads a backbone once for several runs, and encodes equal rows once.

    Use one for all runs: `run(recipe, reporter, loader=loader)`. A backbone that still has adapters
    is loaded again.
    """

    kept: dict[Hashable, _Kept] = field(default_factory=dict)
    encoded: dict[Hashable, FittedRows] = field(default_factory=dict)

    def backbone(self, recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
        """Return a backbone that another run has loaded, with a new head, or load it."""
        if recipe.new_tokens:  # they are removed from the tokenizer with the run's adapter
            return super().backbone(recipe, data, kernels)
        key = _backbone_key(recipe, data, kernels)
        kept = self.kept.get(key)
        if kept is not None and kept.draws and not adapters(kept.loaded.model):
            set_seed(recipe.seed)
            initialize_again(kept.loaded.model)
            return kept.loaded
        self._make_room(key)
        loaded = super().backbone(recipe, data, kernels)
        self.kept[key] = _Kept(loaded, _draws_the_same(loaded.model, recipe.seed))
        return loaded

    def rows(
        self, data: RunData, setting: Setting, chosen: int | None, trained: int | None
    ) -> FittedRows:
        """Return rows that another run has encoded, or encode them: the seed changes none."""
        seedless = replace(setting, seed=0, processor=None)
        task = str(dump_task(data.task))
        hashes = data_hash(data.train), data_hash(data.evaluation)
        key = (id(setting.processor), *hashes, task, str(seedless), chosen, trained)
        if key not in self.encoded:
            self.encoded[key] = super().rows(data, setting, chosen, trained)
            for oldest in list(self.encoded)[:-KEPT_ROWS]:
                del self.encoded[oldest]
        rows = self.encoded[key]
        train, evaluation = (_reseeded(each, setting) for each in (rows.train, rows.evaluation))
        return replace(rows, train=train, evaluation=evaluation)

    def release(self, model: PreTrainedModel) -> None:
        """Detach the adapter of a run that has ended: the backbone is as it was loaded."""
        if adapters(model):
            detach(model)

    def _make_room(self, key: Hashable) -> None:
        """Forget backbones, unless another one fits into memory beside them."""
        self.kept.pop(key, None)
        size = sum(_size(kept.loaded.model) for kept in self.kept.values())
        if own_device().type != "cpu" or len(self.kept) > 1 or 2 * size > memory_limit():
            self.kept.clear()
            self.encoded.clear()


def _backbone_key(recipe: Recipe, data: RunData, kernels: KernelChoice) -> Hashable:
    task = data.task.head, tuple(data.labels), data.task.pooling
    chosen = recipe.quantize, kernels.dtype, kernels.attention
    return recipe.backbone, recipe.revision, repr(recipe.family), *chosen, *task


def _load(recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
    set_seed(recipe.seed)
    if recipe.train.tensor_parallel:
        join_processes()
    with doing(f"loading {recipe.backbone}"):
        model, processor = load_backbone(
            recipe.backbone,
            task=data.task.head,
            labels=data.labels,
            revision=recipe.revision,
            dtype=kernels.dtype,
            quantize=recipe.quantize,
            attention=kernels.attention,
            new_tokens=recipe.new_tokens,
            pooling=data.task.pooling,
            family=recipe.family,
            tensor_parallel=recipe.train.tensor_parallel,
        )
    make_ready(model, move=not (recipe.train.shard or recipe.train.tensor_parallel))
    return Loaded(model, processor, kernels)


def make_ready(model: PreTrainedModel, *, move: bool = True) -> None:
    """Move a model to the device of this process, unless it is sharded there; disable its cache.

    Training and evaluation do not use the cache, and with it transformers does not detect packed
    texts.
    """
    # Quantized weights stay on their device.
    if move and not getattr(model, "hf_device_map", None):
        model.to(own_device())  # type: ignore[arg-type]
    model.config.use_cache = False


def _draws_the_same(model: PreTrainedModel, seed: int) -> bool:
    """Return whether drawing the head of a model that was just loaded changes nothing."""
    after, before = torch.get_rng_state(), _new_tensors(model)
    set_seed(seed)
    initialize_again(model)
    drawn = _new_tensors(model)
    same = all(torch.equal(before[name], drawn[name]) for name in before)
    same = same and torch.equal(after, torch.get_rng_state())
    with torch.no_grad():
        for name, tensor in before.items():
            model.state_dict()[name].copy_(tensor)
    torch.set_rng_state(after)
    return same


def _new_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    new = newly_initialized(model)
    return {name: t.clone() for name, t in model.state_dict().items() if name in new}


def _reseeded(encoded: Encoded, setting: Setting) -> Encoded:
    return replace(encoded, setting=replace(encoded.setting, seed=setting.seed))


def _size(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())
