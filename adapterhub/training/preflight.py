"""What of a run can be checked before torch is imported, in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

from adapterhub.backbones.early_checks import check_backbone_options
from adapterhub.methods._described import check_spec
from adapterhub.status import reading
from adapterhub.tasks import parse_task
from adapterhub.training.output_folder import check_output
from adapterhub.training.placement import placed
from adapterhub.training.processes import is_main
from adapterhub.training.recipe import Recipe
from adapterhub.training.run_data import RunData, read_data
from adapterhub.training.tracker_names import check_trackers


def check_run(recipe: Recipe, resume: bool, *, dry: bool = False) -> RunData:
    """Check a recipe and its files, and return its data; write nothing and import no torch.

    Args:
        recipe: the recipe.
        resume: whether the run in the output folder is to be continued.
        dry: whether nothing will be written, so that the output folder does not matter.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    check_recipe(recipe, resume, dry=dry)
    sources = [own.data.train for own in recipe.tasks.values()] or [recipe.data.train]
    with reading(", ".join(map(str, sources))):
        return read_data(recipe)


def check_recipe(recipe: Recipe, resume: bool, *, dry: bool = False) -> None:
    """Check what needs no data of a recipe.

    Args:
        recipe: the recipe.
        resume: whether the run in the output folder is to be continued.
        dry: whether nothing will be written.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    placed(recipe)
    check_trackers(recipe.train.tracker)
    if is_main() and not dry:
        check_output(Path(recipe.output), resume)
    if recipe.method is not None:
        check_spec(recipe.method)  # type: ignore[arg-type]
    for spec in (recipe.task, *(own.task for own in recipe.tasks.values() if own.task)):
        parse_task(spec)
    check_backbone_options(recipe.backbone, recipe.dtype, recipe.quantize)
