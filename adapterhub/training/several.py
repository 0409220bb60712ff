"""Several runs, one after the other, each resumable: the stages of a recipe, or a sweep.

A recipe with stages writes

<output>/recipe.yaml     all stages, as they were started
<output>/stages.json     the finished stages: recipe, sizes of the data, adapter
<output>/NAME/           the run of a stage, as for a recipe without stages
<output>/adapter/        the adapter of the last stage

The runs of a sweep share the backbone, the data and the outputs of frozen layers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import AdapterhubError, ConfigError, FileError, OutputError
from adapterhub.files.atomic import put_in_place, replace_file, staging, sync_files
from adapterhub.loop.processes import Stopped, catch_stop_signals, is_main, wait_for_everyone
from adapterhub.recipe.output_folder import RECIPE, writing
from adapterhub.recipe.recipe import Recipe
from adapterhub.recipe.sweep import StagedRecipe, without_places
from adapterhub.training.run_data import check_run

if TYPE_CHECKING:
    from adapterhub.loop.report import Reporter
    from adapterhub.training.run import RunOutcome

FINISHED = "stages.json"
_ADAPTER = "adapter"


def run_stages(
    staged: StagedRecipe,
    reporter: Callable[[str, Recipe], Reporter],
    *,
    resume: bool = False,
) -> dict[str, RunOutcome]:
    """Train the unfinished stages, and return their outcomes by name.

    The data of all unfinished stages are read before the first one trains.

    Raises:
        ConfigError: the recipe or the data of a finished stage have changed.
        FileError: the adapter of a finished stage was changed.
        OutputError: the output folder exists, and the run is not resumed.
        AdapterhubError: of any type, as in a run.
    """
    output = Path(staged.output)
    rest = check_stages(staged, resume)
    if is_main():
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            replace_file(output / RECIPE, staged.to_yaml().encode())
    from adapterhub.training.run import run  # imports torch

    outcomes = {}
    for name in rest:
        recipe = staged.stages[name]
        outcomes[name] = run(recipe, reporter(name, recipe), resume=resume)
        if is_main():
            _finish(staged, name)
        wait_for_everyone()
    if is_main():
        _publish(staged)
    wait_for_everyone()
    return outcomes


def check_stages(staged: StagedRecipe, resume: bool, *, dry: bool = False) -> list[str]:
    """Check all stages without torch, and return the names of the unfinished ones."""
    output = Path(staged.output)
    if not resume and not dry and is_folder(output) and any(output.iterdir()):
        raise OutputError(
            f"the output folder {output} exists",
            expected="a new folder for the run",
            hint="another --output, or --resume to continue the run in it",
        )
    finished = _finished(output) if resume else {}
    rest = []
    for name, recipe in staged.stages.items():
        changed = any(start in rest for start in staged.starts[name])
        if name in finished and not changed:
            _check_finished(staged, name, finished[name])
        else:
            rest.append(name)
            check_run(recipe, resume, dry=dry)
    return rest


def _finished(output: Path) -> dict[str, Any]:
    """Read the records of finished stages.

    Raises:
        FileError: the file is broken.
    """
    path = output / FINISHED
    try:
        records = json.loads(path.read_bytes()) if path.exists() else {}
        return dict(records)
    except (OSError, ValueError, TypeError) as error:
        raise FileError(
            f"{path} is broken: {error}",
            expected="the file as the run wrote it",
            hint="train into another --output",
        ) from error


def _record(staged: StagedRecipe, name: str) -> dict[str, Any]:
    """Return the record of a stage: its recipe, and the sizes of its data."""
    recipe = without_places(staged, name)
    data = recipe.data
    sources = (*(each.path for each in data.sources), data.eval, data.test_file)
    files = [Path(source) for source in sources if source]
    sizes = [file.stat().st_size if file.is_file() else None for file in files]
    return {"recipe": to_dict(recipe), "bytes": sizes}


def _check_finished(staged: StagedRecipe, name: str, record: Mapping[str, Any]) -> None:
    """Check that the recipe, data and adapter of a finished stage have not changed.

    Raises:
        ConfigError: the recipe or the data have changed.
        FileError: the adapter is missing, or was changed.
    """
    before, now = (
        dict(_leaves({"recipe": each["recipe"], "bytes": each["bytes"]}))
        for each in (record, _record(staged, name))
    )
    if differing := sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
        raise ConfigError(
            f"the stage {name!r} is finished, and has changed since",
            offenders=[f"{k}: {before.get(k)!r} then, {now.get(k)!r} now" for k in differing],
            expected="the recipe and data that it was trained with",
            hint="restore them, or train into another --output",
        )
    folder = Path(staged.stages[name].output, _ADAPTER)
    if not folder.is_dir() or _digest(folder) != record["adapter"]:
        raise FileError(
            f"{folder}, the adapter of the finished stage {name!r}, is missing or was changed",
            expected="the files as they were written",
            hint="train into another --output",
        )


def _leaves(value: object, path: str = "") -> list[tuple[str, object]]:
    """List the values in nested mappings, by their path without its first name."""
    if isinstance(value, Mapping):
        pairs = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        return [leaf for key, item in pairs for leaf in _leaves(item, key)]
    return [(path.removeprefix("recipe."), value)]


def _finish(staged: StagedRecipe, name: str) -> None:
    """Record a stage as finished."""
    output, folder = Path(staged.output), Path(staged.stages[name].output, _ADAPTER)
    record = {**_record(staged, name), "adapter": _digest(folder)}
    records = {**_finished(output), name: json.loads(json.dumps(record))}
    with writing(output / FINISHED):
        replace_file(output / FINISHED, (json.dumps(records, indent=1) + "\n").encode())


def _publish(staged: StagedRecipe) -> None:
    """Copy the last stage's adapter to the adapter folder of a run."""
    last = list(staged.stages.values())[-1]
    source, target = Path(last.output, _ADAPTER), Path(staged.output, _ADAPTER)
    if target.is_dir() and _digest(target) == _digest(source):
        return
    with writing(target), staging(target) as staged_files:
        shutil.copytree(source, staged_files, dirs_exist_ok=True)
        for folder in (staged_files, *(p for p in staged_files.rglob("*") if p.is_dir())):
            sync_files(folder)
        put_in_place(staged_files, target, overwrite=True)


def _digest(folder: Path) -> str:
    """Return a digest of the names and bytes of the files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Ended:
    """A finished run of several, with its outcome or an error."""

    recipe: Recipe
    outcome: RunOutcome | None = None
    error: AdapterhubError | None = None


def run_several(
    recipes: Sequence[Recipe], reporter: Callable[[Recipe], Reporter], *, resume: bool = False
) -> Iterator[Ended]:
    """Train recipes one after the other; load, read and compute shared parts once.

    The runs share the backbone, the data, the encoded rows and the outputs of frozen layers
    (`train.frozen_cache`). Each run has a separate output folder and ends with the same bytes as
    alone. With `resume`, a run that had begun is continued. If a run fails, it is yielded with its
    error, and the next one begins. Each note is given once.

    Yields:
        Each run when it has ended.

    Raises:
        Stopped: a signal stopped the current run, after its state was saved.
    """
    from adapterhub.loop.report import NotesOnce  # these import torch
    from adapterhub.training.loading import SharedLoader
    from adapterhub.training.run import run

    loader, notes = SharedLoader(), set[str]()
    with catch_stop_signals() as stop:
        for done, recipe in enumerate(recipes):
            if stop.requested:  # at the end of the previous run, without stopping it
                raise Stopped(
                    f"stopped by a signal after {done} of {len(recipes)} runs",
                    hint="run the same command with --resume to continue",
                )
            try:
                data, begun = loader.data(recipe), (Path(recipe.output) / RECIPE).exists()
                reports = NotesOnce([reporter(recipe)], notes)
                ended = run(recipe, reports, resume=resume and begun, data=data, loader=loader)
            except Stopped:
                raise
            except AdapterhubError as error:
                yield Ended(recipe, error=error)
            else:
                yield Ended(recipe, ended)
