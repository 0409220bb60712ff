"""What of a run can be checked before torch is imported, in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from adapterhub.backbones.early_checks import DEQUANTIZE, check_backbone_options
from adapterhub.errors import ConfigError, unknown
from adapterhub.loop.processes import is_main, launcher_shards, process_count
from adapterhub.methods.common.spec import check_spec
from adapterhub.recipe.output_folder import check_output
from adapterhub.recipe.recipe import Recipe
from adapterhub.status import reading
from adapterhub.tasks import parse_task
from adapterhub.training.run_data import RunData, read_data


def check_run(recipe: Recipe, resume: bool, *, dry: bool = False) -> RunData:
    """Check a recipe and its files, and return its data; write nothing and import no torch.

    In a `dry` run nothing will be written, so that the output folder does not matter.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    check_recipe(recipe, resume, dry=dry)
    sources = [own.data.train for own in recipe.tasks.values()] or [recipe.data.train]
    with reading(", ".join(map(str, sources))):
        return read_data(recipe)


def check_recipe(recipe: Recipe, resume: bool, *, dry: bool = False) -> Recipe:
    """Check what needs no data of a recipe, and return it as `placed`.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    recipe = placed(recipe)
    check_trackers(recipe.train.tracker)
    if is_main() and not dry:
        check_output(Path(recipe.output), resume)
    if recipe.method is not None:
        check_spec(recipe.method)  # type: ignore[arg-type]
    for spec in (recipe.task, *(own.task for own in recipe.tasks.values())):
        if spec is not None:
            parse_task(spec)
    if recipe.backbone:
        check_backbone_options(recipe.backbone, recipe.dtype, recipe.quantize)
    return recipe


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
        yield f"train.optimizer={options.optimizer}: it needs whole tensors; use adamw"
    if options.mixed_precision == "fp16":
        yield "train.mixed_precision=fp16: loss scaling; use bf16"
    if recipe.quantize not in (None, DEQUANTIZE, *codes):
        instead = f"use {' or '.join(codes)}" if codes else "use train.shard=true (FSDP2)"
        yield f"quantize={recipe.quantize}: its scales; {instead}"


_PIP = {"comet_ml": "comet-ml"}  # where the package is not called like its module
_OWN = "tensorboard"  # written by loop/report.py


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that are unknown or not installed.

    Raises:
        ConfigError: one of them is.
    """
    if not (chosen := tuple(names)):
        return
    from accelerate import tracking

    available = {str(name) for name in tracking.get_available_trackers()}
    for name in chosen:
        if name == _OWN:
            raise ConfigError(
                "TensorBoard is no train.tracker", hint="train.tensorboard=true, the default"
            )
        if name not in tracking.LOGGER_TYPE_TO_CLASS:
            choices = sorted(str(n) for n in tracking.LOGGER_TYPE_TO_CLASS if n != _OWN)
            raise unknown("tracker", name, choices)
    if missing := [name for name in chosen if name not in available]:
        raise ConfigError(
            f"not installed: {', '.join(missing)}, named by train.tracker",
            hint=f"pip install {' '.join(_PIP.get(name, name) for name in missing)}",
        )
