"""`ah.train`: the command `adapterhub train` in Python, for files or rows in memory.

Rows are written as JSON lines into the output folder, so that a run on a list or a table is a run
on a file: `recipe.yaml` names it, and the command line can continue or repeat it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapterhub.backbones.torch_free_checks import dtype_name
from adapterhub.config.options import options_of
from adapterhub.config.user_folders import is_there
from adapterhub.config.yaml import merge_options
from adapterhub.data.options import DataOptions
from adapterhub.data.sources import DataSource
from adapterhub.data.tables import is_data_name
from adapterhub.errors import AdapterhubError, ConfigError, DataError, one_line
from adapterhub.files.atomic import replace_file
from adapterhub.inference.inputs import items_of, plain_cell
from adapterhub.inference.open import Predictor, open_adapter
from adapterhub.loop.report import reporter_for
from adapterhub.methods.common.base import Method, dump_methods, parse_methods
from adapterhub.recipe.output_folder import ROWS, check_output, new_output, resumed_by, writing
from adapterhub.recipe.recipe import NAMES as OPTION_NAMES
from adapterhub.recipe.recipe import layered, read
from adapterhub.status import Display, display_for_terminal, showing
from adapterhub.training.run import run
from adapterhub.training.run_data import check_run

_FORMS = (
    "a file, a dataset id, a list of rows ({'text': ..., 'label': ...}), a mapping of columns or "
    "of splits, or a table of pandas, polars, pyarrow or datasets"
)
_SPLITS = {"validation": "eval", "valid": "eval", "val": "eval", "dev": "eval"}
_SOURCES = ("train", "eval", "test")


def train_adapter(
    backbone: str | Path | None = None,
    data: Any = None,
    *,
    recipe: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Predictor:
    """Train an adapter as `adapterhub train` does, save it, and return it opened.

    Missing options are chosen: the task and the columns by the data, the backbone by the task. The
    output folder contains the adapter, the recipe, metrics and the report, as with the command.

    Args:
        backbone: a Hub id or a folder.
        data: the training data: a file, a dataset id, a list of rows, a mapping of columns, a table
            of pandas, polars, pyarrow or datasets, or several splits, {"train": ..., "eval": ...}.
            A list of files has several sources: ["a.jsonl", {"path": "b.csv", "weight": 2}].
        recipe: a recipe file; other arguments override it.
        resume: continue the run in the output folder.
        quiet: show notes, but no progress.
        options: the flags of the command with underscores (`method="lora(rank=16)"`,
            `task="seq2seq"`, `eval=ROWS`, `label="stars"`, `epochs=3`, `lr=1e-3`,
            `output="runs/x"`), and any option of a recipe, as `**{"train.schedule": "cosine"}`.

    Raises:
        ConfigError: an unknown option or value; the error suggests a correction.
        DataError: the data cannot be read, or do not fit the task.
        OutputError: the output folder exists already.
        AdapterhubError: of any other type, as for the command.
    """
    has_data = recipe is not None or resume or "tasks" in options
    arguments = _given(backbone, data, options, has_data=has_data)
    sources = arguments.pop("data", {})
    in_memory = {name: sources.pop(name) for name in _SOURCES if _is_object(sources.get(name))}
    arguments["data"] = sources
    output = _output_of(recipe, arguments, resume=resume)
    if resume and recipe is None and (Path(output) / "recipe.yaml").is_file():
        recipe = Path(output) / "recipe.yaml"
    rows = {name: str(_place(Path(output), name, value)) for name, value in in_memory.items()}
    made = layered([arguments, {"data": rows, "output": output}])
    parsed = read(recipe, flags=made)
    continued = resumed_by("call ah.train(..., resume=True)")
    with _in_python(), _written(Path(output), in_memory, resume), continued:
        display = Display() if quiet else display_for_terminal()
        with showing(display):
            checked = check_run(parsed, resume)
            reporter = reporter_for(Path(output), parsed.train, quiet=quiet)
            run(parsed, reporter, resume=resume, data=checked)
    return open_adapter(output, head=next(iter(parsed.tasks), None))


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Rewrite the hints of errors to name arguments instead of flags."""
    try:
        yield
    except AdapterhubError as error:
        hint = error.hint.replace("--resume", "resume=True")
        hint = re.sub(r"--([a-z-]+) ([A-Z]+)\b", _argument, hint)
        error.hint = re.sub(r"--([a-z-]+)()\b", _argument, hint)
        raise


def _argument(match: re.Match[str]) -> str:
    return f"{match[1].replace('-', '_')}={match[2] or '...'}"


def _given(
    backbone: str | Path | None, data: Any, options: Mapping[str, Any], *, has_data: bool
) -> dict[str, Any]:
    """Return the recipe options named by the arguments, in their places."""
    if backbone is not None and not isinstance(backbone, (str, os.PathLike)):
        raise ConfigError(
            f"backbone is {one_line(type(backbone).__name__)}",
            expected="a Hub id or the folder of a backbone: the run loads it",
            hint="model.save_pretrained(FOLDER), and backbone=FOLDER; or ah.attach(model, ...) for "
            "a training loop of your own",
        )
    nested: dict[str, Any] = {}
    named = {"backbone": backbone} if backbone is not None else {}
    for name, value in {**named, **options}.items():
        *above, last = name.rstrip("_").replace("__", ".").split(".")
        leaf: dict[str, Any] = {last: _plain(last, value)}
        for group in reversed(above):
            leaf = {group: leaf}
        nested = merge_options(nested, leaf)
    splits = _splits_of(nested.pop("data", None) if data is None else data)
    sources = {name: nested.pop(name) for name in _SOURCES if _is_source(name, nested)}
    if twice := sorted(splits.keys() & sources.keys()):
        raise ConfigError("data are given twice", offenders=twice, expected="one of them")
    known = OPTION_NAMES.normal_form(nested)
    plain = {name: _plain(name, value) for name, value in (splits | sources).items()}
    if plain.get("train") is None and not has_data:
        raise ConfigError("data is missing", expected=_FORMS, hint='ah.train(data="train.csv")')
    return layered([known, {"data": plain}])


def _is_source(name: str, nested: Mapping[str, Any]) -> bool:
    """Return whether an argument is a source of data: `train` is also a group of options."""
    value = nested.get(name)
    options = isinstance(value, Mapping) and not _is_table(value)
    return name in nested and not (name == "train" and options)


def _splits_of(data: Any) -> dict[str, Any]:
    """Return the sources of data by option name."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        return {"train": data}
    named = {_SPLITS.get(str(name), str(name)): value for name, value in data.items()}
    if "train" not in named or named.keys() - {*_SOURCES} - _options_of_data():
        return {"train": data}
    return named


def _options_of_data() -> set[str]:
    return {option.name for option in options_of(DataOptions)}


def _is_table(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(column, (list, tuple)) for column in value.values())


def _is_object(value: Any) -> bool:
    in_files = isinstance(value, (str, float, int, os.PathLike)) or _are_sources(value)
    return value is not None and not in_files


def _are_sources(value: Any) -> bool:
    """Return whether a list has files and options of files, not rows: not mappings alone."""
    if not isinstance(value, list) or all(isinstance(each, Mapping) for each in value):
        return False
    known = {option.name for option in options_of(DataSource)}
    return all(
        {"path"} <= each.keys() <= known if isinstance(each, Mapping) else _is_location(each)
        for each in value
    )


def _is_location(value: Any) -> bool:
    if isinstance(value, os.PathLike):
        return True
    if not isinstance(value, str) or "\n" in value:
        return False
    path = re.sub(r"#\d+$", "", value)
    return is_there(path) or is_data_name(path) or path.startswith("hf:") or "://" in path


def _plain(name: str, value: Any) -> Any:
    """Return a value in recipe form: a method object as its spec, a path as a text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "method" and (isinstance(value, (list, tuple)) or _is_method(value)):
        return list(dump_methods(parse_methods(value)))
    if name == "dtype":
        return dtype_name(value)
    if name == "train" and isinstance(value, (list, tuple)):
        return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]
    return list(value) if isinstance(value, tuple) else value


def _is_method(value: Any) -> bool:
    return isinstance(value, Method) or (isinstance(value, type) and issubclass(value, Method))


def _output_of(recipe: str | Path | None, arguments: Mapping[str, Any], *, resume: bool) -> str:
    """Return the output folder: as passed in, or a new one named after the data."""
    if arguments.get("output"):
        return str(arguments["output"])
    source = arguments["data"].get("train")
    file = None if recipe is None else str(recipe)
    first = source if source is None or _are_sources(source) else str(source)
    named = new_output(file, (), first, resume=resume)
    if named is None and file is not None:
        return str(read(file).output)
    return named or str(new_output(None, (), "rows", resume=resume))


def _place(output: Path, name: str, value: Any) -> Path:
    """Return the file for rows in memory."""
    return output / ROWS / (name if hasattr(value, "save_to_disk") else f"{name}.jsonl")


@contextlib.contextmanager
def _written(output: Path, in_memory: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """Write rows into the output folder; remove them if the run could not start.

    Raises:
        DataError: the data are not rows.
        OutputError: the rows cannot be written.
    """
    if not in_memory:
        yield
        return
    check_output(output, resume)
    folder = output / ROWS
    texts = {
        _place(output, name, value): _json_lines(name, value)
        for name, value in in_memory.items()
        if not hasattr(value, "save_to_disk")
    }
    created = not output.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            if not path.exists() or path.read_bytes() != text:
                replace_file(path, text)
        for name, value in in_memory.items():
            if hasattr(value, "save_to_disk") and not (resume and (folder / name).exists()):
                value.save_to_disk(str(folder / name))
    try:
        yield
    finally:
        if not (output / "recipe.yaml").exists():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                if created:
                    output.rmdir()


def _json_lines(name: str, value: Any) -> bytes:
    """Return rows as JSON lines.

    Raises:
        DataError: the data are not rows or are empty, or a cell is neither JSON nor a date.
    """
    if isinstance(value, Mapping) and _is_table(value):
        lengths = {len(column) for column in value.values()}
        if len(lengths) > 1:
            raise DataError(f"{name}: the columns have {sorted(lengths)} rows", expected=_FORMS)
        value = [
            dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)
        ]
    elif isinstance(value, Mapping):
        raise DataError(f"{name} is a mapping of neither columns nor splits", expected=_FORMS)
    rows = [
        _row(name, number, row) for number, row in enumerate(items_of(value, "train on", _FORMS))
    ]
    if not rows:
        raise DataError(f"{name} has no rows", expected=_FORMS)
    return "".join(f"{row}\n" for row in rows).encode()


def _row(name: str, number: int, row: Any) -> str:
    if isinstance(row, str):
        row = {"text": row}
    elif isinstance(row, tuple) and len(row) == 2:
        row = dict(zip(("text", "label"), row, strict=True))
    if not isinstance(row, Mapping):
        raise DataError(f"{name}, row {number}: {type(row).__name__}", expected=_FORMS)
    plain = {str(column): plain_cell(cell) for column, cell in row.items()}
    try:
        return json.dumps(plain, ensure_ascii=False, default=_json_cell)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}, row {number}: {error}",
            expected="texts, numbers, lists and mappings",
            hint="image and audio files by their paths, or a datasets.Dataset with them",
        ) from None


def _json_cell(cell: Any) -> Any:
    """Convert a cell without a JSON type: numpy values, dates, sets of options."""
    if isinstance(cell, (datetime.date, datetime.time)):
        return cell.isoformat()
    if hasattr(cell, "tolist"):  # of numpy
        return plain_cell(cell.tolist())
    if isinstance(cell, os.PathLike):
        return os.fspath(cell)
    raise TypeError(f"a cell is {type(cell).__name__}")
