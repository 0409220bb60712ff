"""The recipe: everything that determines a training run, in one dataclass and one YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterhub.config.options import from_dict, option, to_dict
from adapterhub.config.overrides import merge_options, parse_overrides
from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.training.options import TrainOptions

SPECS = ("method", "task")
DATA_SOURCES = ("train", "eval", "train_target", "eval_target")  # paths in `data`, of one machine


@dataclass(frozen=True)
class Recipe:
    """A training run. The same recipe, data and versions give the same adapter."""

    backbone: str = option("", "a Hub id or a folder")
    revision: str | None = option(None, "branch, tag or commit of a Hub backbone")
    dtype: str | None = option(
        None,
        "precision of the frozen backbone: fp32, bf16, fp16 (none: fp32, or bf16 if quantized)",
    )
    quantize: str | None = option(None, "quantize the frozen backbone: nf4, fp4, int8, int8-weight")
    new_tokens: tuple[str, ...] = option((), "tokens to add to the backbone's tokenizer")
    method: object = option(
        "lora", "a method spec: lora, lora(rank=16), {lora: {rank: 16}}, or a list"
    )
    task: object = option(
        "classification", "a task spec: tagging, seq2seq(metric=rouge), {seq2seq: {metric: rouge}}"
    )
    name: str = option("default", "the adapter's name")
    output: str = option("", "folder for the run: the adapter, the recipe, metrics, checkpoints")
    seed: int = option(0, "seed of initialization, sampling and batch order")
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)

    def to_yaml(self) -> str:
        """Return the recipe as YAML, for `read`."""
        return dump_yaml(to_dict(self))


def read(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe. Flags override the file, and `overrides` override both.

    Args:
        path: a YAML file, or None.
        overrides: words such as `train.epochs=1`.
        flags: options as a nested mapping.

    Raises:
        ConfigError: unknown options (with the nearest names), values of a wrong type, or a required
            option is missing.
    """
    data: dict[str, Any] = load_yaml(path) if path else {}
    for layer in (flags or {}, parse_overrides(overrides)):
        # A spec replaces the earlier one entirely: merging two mappings would give two methods.
        data = merge_options(
            {k: v for k, v in data.items() if k not in SPECS or k not in layer}, layer
        )
    recipe = from_dict(Recipe, data)
    required = {
        "backbone": recipe.backbone,
        "data.train": recipe.data.train,
        "output": recipe.output,
    }
    if missing := [name for name, value in required.items() if not value]:
        raise ConfigError(
            "the recipe is incomplete",
            offenders=[f"{name} is missing" for name in missing],
            hint="adapterhub train --backbone ID --train FILE --eval FILE --output DIR",
        )
    return recipe
