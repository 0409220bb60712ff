"""The folder of a study: what is in it, and whether a study is the one that was begun in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adapterhub.bench.study import (
    Study,
    read_study,
)
from adapterhub.errors import OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.recipe.output_folder import writing

STUDY = "study.yaml"
RECORDS = "records"
WORK = "work"
CLAIMS = "claims"


def keep_study(study: Study, output: Path) -> Study:
    """Write `study.yaml` in the folder of a study, and return it.

    It names the recorded methods of both: of the study, and of the one that is there.

    Raises:
        OutputError: the folder has another study, or cannot be written.
        ConfigError: its study is broken.
    """
    path = output / STUDY
    if path.exists():
        there = read_study(path)
        if _identity(there, output) != _identity(study, output):
            raise OutputError(
                f"{output} has another study",
                expected="the same options as when it was begun",
                hint=f"adapterhub bench {path} --output {output} to continue it, "
                "or another --output",
            )
        study = _with_recorded(there, study)
    with writing(path):
        output.mkdir(parents=True, exist_ok=True)
        replace_file(path, study.to_yaml().encode())
    return study


def as_begun(study: Study, output: Path) -> Study:
    """Return a study with what was chosen when it was begun in a folder, if it is the same one.

    Args:
        study: the study as its user gave it.
        output: the folder.

    Raises:
        ConfigError: the study in the folder is broken.
    """
    path = output / STUDY
    if not path.exists():
        return study
    begun = read_study(path)
    begun = replace(begun, recipe=replace(begun.recipe, output=str(output)))
    recipe, bench = study.recipe, study.bench
    if recipe.dtype is None:
        recipe = replace(recipe, dtype=begun.recipe.dtype, attention=begun.recipe.attention)
    if bench.equal_time and not bench.equal_steps:
        bench = replace(bench, equal_steps=begun.bench.equal_steps)
    if bench.budget is not None and bench.steps is None:
        bench = replace(bench, steps=begun.bench.steps, select_rows=begun.bench.select_rows)
    chosen = replace(study, recipe=recipe, bench=bench)
    if _identity(chosen, output) != _identity(begun, output):
        return study
    recorded = _with_recorded(begun, study).bench.recorded
    return replace(begun, bench=replace(begun.bench, recorded=recorded, margin=bench.margin))


def _with_recorded(begun: Study, study: Study) -> Study:
    """Return a study with the recorded methods of when it was begun as well."""
    names = dict.fromkeys((*begun.bench.recorded, *study.bench.recorded))
    return replace(study, bench=replace(study.bench, recorded=tuple(names)))


def _identity(study: Study, output: Path) -> str:
    """Return what a study in a folder runs: it may have been moved there from elsewhere."""
    recipe = replace(study.recipe, output=str(output))
    return Study(recipe, replace(study.bench, recorded=(), margin=None)).to_yaml()
