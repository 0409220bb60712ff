"""From a recipe to a run that is ready to start: data, backbone, attached adapter, encoded rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import attach
from adapterhub.backbones.load import load_backbone
from adapterhub.errors import ConfigError
from adapterhub.methods._spec import parse_methods
from adapterhub.tasks import Encoded, Setting, Task, dump_task
from adapterhub.training.processes import own_device
from adapterhub.training.recipe import Recipe
from adapterhub.training.run_data import RunData, read_data
from adapterhub.training.schedules import DEFAULT
from adapterhub.training.stages import waiting_for_plateaus


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start; nothing is written yet."""

    recipe: Recipe
    data: RunData
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter
    train: Encoded
    evaluation: Encoded | None  # None: without evaluation


def prepare(recipe: Recipe) -> PreparedRun:
    """Read the data, load the backbone, attach the adapter and encode; write nothing."""
    methods = parse_methods(recipe.method)  # type: ignore[arg-type]
    data = read_data(recipe)
    set_seed(recipe.seed)
    model, tokenizer = load_backbone(
        recipe.backbone,
        task=data.task.head,
        labels=data.labels,
        revision=recipe.revision,
        dtype=recipe.dtype,
        quantize=recipe.quantize,
        new_tokens=recipe.new_tokens,
    )
    make_ready(model)
    adapter = attach(model, methods, name=recipe.name)
    _check_packing(data.task, adapter)
    _check_stages(data, adapter)
    adapter.metadata.task = data.task.name
    default = next((method.schedule for method in methods if method.schedule), DEFAULT)
    options = replace(recipe.train, schedule=recipe.train.schedule or default)  # type: ignore[arg-type]
    limit = min(options.max_length, max_positions(model))
    setting = Setting(tokenizer, limit, adapter.labels, recipe.seed, max_positions(model))
    train, evaluation = (
        data.task.encode(examples, setting, labelled=True) if examples else None
        for examples in (data.train, data.evaluation)
    )
    assert train is not None
    recipe = replace(recipe, train=options, data=data.options, task=dump_task(data.task))
    return PreparedRun(recipe, data, model, tokenizer, adapter, train, evaluation)


def _check_packing(task: Task, adapter: Adapter) -> None:
    virtual = {p.method.name for p in adapter.placed if p.site.kind == "embed"}
    if task.packs and virtual:
        raise ConfigError(
            f"{', '.join(virtual)} prepends virtual tokens to each row, where only the first of "
            "its packed texts can attend to them",
            hint="pack=false",
        )


def _check_stages(data: RunData, adapter: Adapter) -> None:
    if not data.evaluation and (waiting := waiting_for_plateaus(adapter)):
        raise ConfigError(
            f"{', '.join(waiting)} begins a stage when evaluations no longer improve, and there is "
            "no evaluation",
            hint="--eval FILE, or stages by epochs",
        )


def make_ready(model: PreTrainedModel) -> None:
    """Move a model to the device of this process, and disable its cache.

    Training and evaluation do not use the cache, and with it transformers does not detect packed
    texts.
    """
    if not getattr(model, "hf_device_map", None):  # quantized weights stay on their device
        model.to(own_device())  # type: ignore[arg-type]
    model.config.use_cache = False


def max_positions(model: PreTrainedModel) -> int:
    """Return the longest input that the model has positions for, in tokens."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30
