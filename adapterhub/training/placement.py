"""How the processes of a run share the parameters of its model, as the recipe or launcher says.

It changes where a run computes, and neither its steps nor its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adapterhub.backbones.early_checks import DEQUANTIZE
from adapterhub.errors import ConfigError
from adapterhub.training.processes import launcher_shards, process_count
from adapterhub.training.recipe import Recipe


def placed(recipe: Recipe) -> Recipe:
    """Return a recipe that says whether parameters are sharded: `train.shard` is true or null.

    Raises:
        ConfigError: they cannot be, or the launcher is configured for something else.
    """
    launched, said = launcher_shards(), recipe.train.shard
    shard = launched if said is None else said
    if shard:
        _check(recipe)
    if recipe.train.tensor_parallel:
        _check_tensor_parallel(recipe, sharded=shard)
    return replace(recipe, train=replace(recipe.train, shard=shard or None))


def _check(recipe: Recipe) -> None:
    from adapterhub.backbones.quantized import sharded_codes  # imports torch

    if offenders := list(_unsharded(recipe, sharded_codes())):
        raise ConfigError(
            "these options cannot be used with sharded parameters (train.shard=true)",
            offenders=offenders,
        )
    if process_count() == 1:
        raise ConfigError(
            "train.shard=true divides the parameters over processes, and there is only one",
            hint="torchrun --nproc-per-node N -m adapterhub train ..., or train.shard=false",
        )


def _check_tensor_parallel(recipe: Recipe, *, sharded: bool) -> None:
    offenders = list(_unsharded(recipe, ())) + ["train.shard=true: FSDP2"] * sharded
    if recipe.new_tokens:
        offenders.append("new_tokens: they resize a divided embedding")
    if offenders:
        raise ConfigError(
            "these options cannot be used with train.tensor_parallel=true", offenders=offenders
        )
    if process_count() == 1:
        raise ConfigError(
            "train.tensor_parallel=true divides projections over processes, and there is only one",
            hint="torchrun --nproc-per-node N -m adapterhub train ..., or "
            "train.tensor_parallel=false",
        )


def _unsharded(recipe: Recipe, codes: Sequence[str]) -> Iterator[str]:
    """Yield the options that do not know sharded parameters, and what to use in their place.

    `codes` are the quantizations that can be sharded.
    """
    options = recipe.train
    if options.optimizer != "adamw":
        yield f"train.optimizer={options.optimizer}: 8-bit states; use adamw"
    if options.mixed_precision == "fp16":
        yield "train.mixed_precision=fp16: loss scaling; use bf16"
    if recipe.quantize not in (None, DEQUANTIZE, *codes):
        instead = f"use {' or '.join(codes)}" if codes else "use train.shard=true (FSDP2)"
        yield f"quantize={recipe.quantize}: its scales; {instead}"
