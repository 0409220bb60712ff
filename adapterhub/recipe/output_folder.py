"""The output folder of a run: its checks, its lock, and its write errors.

<output>/.lock            held by the process that trains; released by the system if it is killed
<output>/recipe.yaml      written when every check has passed
<output>/recipe.schema.json   for editors; named in the first line of the recipe
<output>/metrics.jsonl, timings.jsonl, tensorboard/
<output>/predictions.jsonl, bag_of_words.json, report.html
                          the predictions of the best step on the evaluation data, the score of a
                          bag of words, and the report
<output>/trackers.json    the ids of the run in experiment trackers
<output>/rows/            the data, if they were passed in as Python objects
<output>/checkpoints/     last and best
<output>/adapter/         the trained adapter
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock, Timeout

from adapterhub.config.user_folders import is_folder, is_there
from adapterhub.config.yaml import load_yaml
from adapterhub.errors import OutputError
from adapterhub.files.atomic import check_place, finished_names, remove_unfinished
from adapterhub.files.native import replaceable
from adapterhub.pages.page import BAG_OF_WORDS, PAGE
from adapterhub.pages.row_scores import PREDICTIONS

LOCK, RECIPE, SCHEMA = ".lock", "recipe.yaml", "recipe.schema.json"
TRACKED = "trackers.json"
_OUTPUTS = ("output", "output_dir")
_WILDCARD = re.compile(r"[*?\[\]]+")
ROWS = "rows"  # a folder with the data of a run, if they were passed in as objects
WAIT = 0.5  # seconds; `check_output` of another process holds the lock for less than a thousandth
# Files that a run writes before its first checkpoint.
_BEFORE_CHECKPOINT = frozenset(
    {
        RECIPE,
        SCHEMA,
        "metrics.jsonl",
        "timings.jsonl",
        "tensorboard",
        "checkpoints",
        PREDICTIONS,
        BAG_OF_WORDS,
        PAGE,
        TRACKED,
        ROWS,
    }
)


_RESUMED_BY = ContextVar("resumed_by", default="run the same command with --resume")


@contextlib.contextmanager
def resumed_by(command: str) -> Iterator[None]:
    """Add the command that continues a run to the errors inside the context."""
    token = _RESUMED_BY.set(command)
    try:
        yield
    finally:
        _RESUMED_BY.reset(token)


def how_to_resume() -> str:
    """Return the command that continues a stopped run."""
    return _RESUMED_BY.get()


def new_output(
    file: str | None,
    words: Sequence[str],
    train: str | Sequence[str] | None,
    *,
    above: str = "runs",
    resume: bool = False,
) -> str | None:
    """Return a new folder named after the training data, or the newest one to resume.

    Return None if a recipe or an override names a folder, or if the data have no name.
    """
    typed = {name.strip(): value for name, _, value in (word.partition("=") for word in words)}
    recipe = load_yaml(file) if file else {}
    data = recipe.get("data")
    written = data.get("train") if isinstance(data, Mapping) else data
    source = typed.get("data.train") or typed.get("data") or train or written or file
    if isinstance(source, Sequence) and not isinstance(source, str):  # named after the first one
        source = source[0].get("path") if isinstance(source[0], Mapping) else source[0]
    place = str(source or "").partition("#")[0].rstrip("/").removesuffix(".gz")
    stem = Path(place).stem
    if _WILDCARD.search(place):  # of "a/*.csv", the name is a
        parts = (stem, *reversed(Path(place).parts[:-1]))
        plain = (_WILDCARD.sub("", part).strip("-_. /") for part in parts)
        stem = next(filter(None, plain), "")
    stem = stem.replace(":", "-")
    if not stem.strip(".") or any(name in recipe or name in typed for name in _OUTPUTS):
        return None
    names = (f"{above}/{stem}{f'-{n}' * (n > 1)}" for n in itertools.count(1))
    used = list(itertools.takewhile(is_there, names))
    if resume and used:
        return used[-1]
    return f"{above}/{stem}{f'-{len(used) + 1}' * bool(used)}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError of a write inside the context into an OutputError.

    Raises:
        OutputError: `path` cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}",
            expected="a writable folder on a disk with free space",
            hint=_remedy(error.errno),
        ) from error


def _remedy(code: int | None) -> str:
    if code in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOENT, errno.ENODEV):
        return "another --output"
    writable = code in (errno.EACCES, errno.EPERM, errno.EROFS)
    first = "make the folder writable" if writable else "free some space"
    return f"{first}, then {how_to_resume()}"


def check_output(output: Path, resume: bool) -> None:
    """Check that an output folder is usable before any work is done; change nothing.

    Raises:
        OutputError: it contains a run already (without `resume`) or no run to resume, another
            process trains in it, it is a file, or it cannot be created.
    """
    if is_there(output) and not is_folder(output):
        raise OutputError(f"{output} is a file", expected="a new folder for the run")
    _check_content(output, resume)
    parent = next(p for p in (output, *output.parents, Path.cwd()) if is_folder(p))
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable", hint="another --output")
    if is_there(output / LOCK):
        _acquired(output).release()


@contextlib.contextmanager
def hold_output(output: Path, resume: bool) -> Iterator[None]:
    """Create the output folder and hold its lock; on exit, remove a folder that is still empty.

    The file `.lock` stays: another process may already have opened it to wait for the lock.

    Raises:
        OutputError: another process trains in the folder, or it cannot be created or used.
    """
    created = not is_there(output)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    lock = _acquired(output)
    try:
        _check_content(output, resume)  # another run may have ended since the first check
        remove_unfinished(output)
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows does not delete open files
            if created and os.listdir(output) == [LOCK]:
                (output / LOCK).unlink()
                output.rmdir()
        lock.release()


def _check_content(output: Path, resume: bool) -> None:
    names = {*finished_names(output)} - {LOCK, ROWS} if is_folder(output) else set()
    if names and not resume:
        raise OutputError(
            f"the output folder {output} exists",
            expected="a new folder for the run",
            hint="another --output, or --resume to continue the run in it",
        )
    check_place(output / "adapter", True, replaceable(output / "adapter"))
    checkpoints = output / "checkpoints"
    saved = {entry.name for entry in checkpoints.iterdir()} if is_folder(checkpoints) else set()
    if "last" in saved or any(name.endswith("-old") for name in saved):
        return
    others = names - _BEFORE_CHECKPOINT | {f"checkpoints/{n}" for n in saved & {"best"}}
    if others:
        raise OutputError(
            f"{output} has no last checkpoint to resume from, but other files",
            expected="the output folder of a run, with checkpoints/last",
            hint="train without --resume into another --output",
            offenders=sorted(others),
        )


def _acquired(output: Path) -> FileLock:
    """Return the lock of the folder, held by this process."""
    lock = FileLock(output / LOCK)
    try:
        if (output / LOCK).is_symlink():  # filelock before 4 would truncate its target
            raise OSError(errno.ELOOP, f"{LOCK} is a symbolic link")
        lock.acquire(timeout=WAIT)
    except Timeout as error:
        raise OutputError(
            f"another process is training in {output}",
            expected="one process for each output folder",
            hint="wait until it ends or stop it, then use --resume; or another --output",
        ) from error
    except (OSError, NotImplementedError) as error:
        raise OutputError(
            f"{output} cannot be locked: {error}",
            expected="a folder on a file system with file locks, which some network file systems "
            "lack",
            hint="another --output, on a local disk",
        ) from error
    return lock
