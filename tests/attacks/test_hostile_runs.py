"""Damage to the folder of a run, two processes in it, full disks: refused, or without effect."""

import contextlib
import dataclasses
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapterhub.errors import AdapterhubError, ConfigError, FileError, OutputError
from adapterhub.loop import checkpoint
from adapterhub.loop.report import JsonLines, PlainLines, Reporter, Several, reporter_for
from adapterhub.recipe.output_folder import LOCK, hold_output
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.runs import OPTIONS, fit, lines, scores
from tests.kit.selection import long_table

# Flipped bits per file; at least one in each part of it (a header, a pickle, padding, a digest).
FLIPS = 2000 if tiny_models.FULL_MATRIX else 64
LAST = ("progress.json", "tensors.safetensors", "training.pt")


def flips(data: bytes, seed: int) -> Iterator[tuple[int, bytes]]:
    """Flip one bit at a time: evenly spaced, at both ends, and at random."""
    rng, bits = random.Random(seed), 8 * len(data)
    even = [i * bits // (FLIPS // 2) for i in range(FLIPS // 2)]
    for bit in sorted({*even, *range(64), bits - 1, *(rng.randrange(bits) for _ in even)}):
        yield bit, flipped(data, bit)


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def net_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny network, stopped after step 4 of 6; its best step is 2."""
    output = tmp_path_factory.mktemp("runs") / "net"
    stopped_at(output, 4)
    return output


def stopped_at(output: Path, step: int) -> None:
    class Stop(Reporter):
        def evaluated(self, line: object, timing: object) -> None:
            if getattr(line, "step", 0) == step:
                signal.raise_signal(signal.SIGTERM)

    options = dataclasses.replace(OPTIONS, eval_every=2)
    with pytest.raises(AdapterhubError, match="stopped by a signal"):
        fit(output, options, evaluate=scores((0.9, 0.5)), metric="accuracy",
            reporter=Several([JsonLines(output), Stop()]))  # fmt: skip


def resume_net(output: Path) -> None:
    options = dataclasses.replace(OPTIONS, eval_every=2)
    fit(output, options, evaluate=scores((0.1,)), metric="accuracy", resume=True)


def refuse_to_resume(output: Path, expected: str) -> FileError:
    """Require that a resume is refused, and changes nothing; return the error."""
    before = content(output)
    with pytest.raises(FileError) as error:
        resume_net(output)
    assert expected in str(error.value)
    assert error.value.hint
    assert content(output) == before
    return error.value


FLIPPED = [*(f"last/{n}" for n in LAST), *(f"best/{n}" for n in LAST[:2])]


@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_bit_of_a_checkpoint_is_refused(net_run: Path, tmp_path: Path, name: str) -> None:
    """Every flip is an error that names the file; the file has no byte without effect."""
    folder = shutil.copytree(net_run / "checkpoints", tmp_path / "checkpoints")
    whole = (folder / name).read_bytes()
    silent, count = [], 0
    for bit, damaged in flips(whole, seed=len(name)):
        (folder / name).write_bytes(damaged)
        count += 1
        try:
            checkpoint.load_checkpoint((folder / name).parent)
        except FileError as error:
            assert Path(name).name in error.problem  # noqa: PT017
        else:
            silent.append(bit)
    assert count >= FLIPS * 3 // 4
    assert not silent, f"{len(silent)} of {count} flips were not noticed: {silent[:20]}"


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_reports_that_were_changed_are_refused(net_run: Path, tmp_path: Path, name: str) -> None:
    """A resumed run promises the bytes of an uninterrupted one; a deleted file begins anew."""
    output = shutil.copytree(net_run, tmp_path / "run")
    whole = (output / name).read_bytes()
    damages = [flipped(whole, bit) for bit in range(0, 8 * len(whole), 8 * len(whole) // 20)]
    for damaged in (*damages, whole[:-1], b"", whole.split(b"\n", 1)[1]):
        (output / name).write_bytes(damaged)
        error = refuse_to_resume(output, "changed since its last checkpoint")
        assert error.offenders == (str(output / name),)
    (output / name).unlink()
    resume_net(output)
    assert [line["step"] for line in lines(output / name)] == [6, 6]


def test_a_best_checkpoint_that_does_not_fit_is_refused(net_run: Path, tmp_path: Path) -> None:
    output = shutil.copytree(net_run, tmp_path / "run")
    best = output / "checkpoints" / "best"
    shutil.rmtree(best)
    refuse_to_resume(output, "no checkpoint in")
    stopped_at(tmp_path / "other", 2)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "last", best)
    refuse_to_resume(output, "best is broken: it is of step")


@pytest.fixture(scope="module")
def recipe(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    from tests.kit.data import sentences, write_tsv

    folder = tmp_path_factory.mktemp("recipe")
    rows = sentences(16)
    files = {name: str(write_tsv(folder / f"{name}.tsv", rows)) for name in ("train", "eval")}
    flags = {"backbone": str(backbone), "output": str(folder / "run"), "data": files}
    words = ["method=lora(rank=2)", "train.max_steps=2", "train.tensorboard=false"]
    return read(None, words, flags)


@pytest.fixture(scope="module")
def finished(recipe: Recipe) -> Path:
    """The output folder of a finished run."""
    output = Path(recipe.output)
    run(recipe, reporter_for(output, recipe.train, quiet=True))
    return output


@pytest.fixture
def copied(finished: Path, recipe: Recipe, tmp_path: Path) -> Recipe:
    output = shutil.copytree(finished, tmp_path / "run")
    return dataclasses.replace(recipe, output=str(output))


def without(*names: str) -> Callable[[Recipe], Recipe]:
    def remove(recipe: Recipe) -> Recipe:
        for name in names:
            path = Path(recipe.output, name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return recipe

    return remove


def damaged(name: str) -> Callable[[Recipe], Recipe]:
    def damage(recipe: Recipe) -> Recipe:
        path = Path(recipe.output, name)
        path.write_bytes(flipped(path.read_bytes(), 999))
        return recipe

    return damage


def before_a_checkpoint(recipe: Recipe) -> Recipe:
    """Make the folder that of a run with another seed, killed before its first checkpoint."""
    without("checkpoints", "adapter", "metrics.jsonl", "timings.jsonl")(recipe)
    return dataclasses.replace(recipe, seed=9)


def foreign_adapter(recipe: Recipe) -> Recipe:
    """The end of the run would replace the adapter, and its folder has another file."""
    Path(recipe.output, "adapter", "thesis.tex").write_text("mine")
    return recipe


REFUSED: dict[str, tuple[Callable[[Recipe], Recipe], bool, str]] = {
    "another seed": (lambda r: dataclasses.replace(r, seed=9), True, "another run"),
    "broken tensors": (damaged("checkpoints/last/adapter/adapter.safetensors"), True, "is broken"),
    "no progress": (without("checkpoints/last/progress.json"), True, "progress.json: missing"),
    "an empty checkpoint": (
        without(*(f"checkpoints/last/{n}" for n in LAST)), True, "progress.json: missing"
    ),
    "a foreign adapter": (foreign_adapter, True, "contains other files"),
    "broken metrics": (damaged("metrics.jsonl"), True, "changed since its last checkpoint"),
    "no last checkpoint": (without("checkpoints/last"), True, "no last checkpoint"),
    "another recipe": (before_a_checkpoint, True, "is another recipe"),
    "no --resume": (lambda r: r, False, "exists"),
}  # fmt: skip


@long_table("reason", REFUSED, parts=4)
def test_a_refused_run_changes_no_byte_of_its_folder(copied: Recipe, reason: str) -> None:
    change, resume, expected = REFUSED[reason]
    changed = change(copied)
    output = Path(copied.output)
    before = content(output)
    with pytest.raises(AdapterhubError, match=expected) as error:
        run(changed, reporter_for(output, changed.train, quiet=True), resume=resume)
    assert error.value.hint
    assert content(output) == before


def test_a_refused_run_creates_no_folder(recipe, tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        assert (tmp_path / "run" / LOCK).exists(), "the last check is made under the lock"
        raise ConfigError("train.mixed_precision=fp16 fails on this device")

    monkeypatch.setattr("adapterhub.training.run.Engine", refuse)
    for method in ("lroa", "lora"):
        changed = dataclasses.replace(recipe, method=method, output=str(tmp_path / "run"))
        with pytest.raises(ConfigError, match=r"lroa|fp16 fails"):
            run(changed, Reporter())
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(copied: Recipe) -> None:
    output = Path(copied.output)
    whole = (output / "metrics.jsonl").read_bytes()
    without("checkpoints", "adapter")(copied)
    (output / ".recipe.yaml.0123abcd.new").write_text("half")
    outcome = run(copied, reporter_for(output, copied.train, quiet=True), resume=True)
    assert (output / "metrics.jsonl").read_bytes() == whole
    assert outcome.result.steps == 2


HOLD = """
import sys, time, pathlib
from adapterhub.recipe.output_folder import hold_output
with hold_output(pathlib.Path(sys.argv[1]), resume=True):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(
    copied: Recipe, adapterhub: Callable[..., tuple[int, str, str]]
) -> None:
    output = Path(copied.output)
    before = content(output)
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match="another process is training in") as error:
            run(copied, Reporter(), resume=True)
        assert str(output) in error.value.problem
        assert "--resume" in error.value.hint
        with pytest.raises(OutputError, match="exists"):
            run(copied, Reporter())
        assert content(output) == before
        code, out, err = adapterhub("predict", output, "the movie was good")
        assert code == 0, err
        assert out
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    run(copied, Reporter(), resume=True)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(OutputError, match="No locks available") as error,
        hold_output(tmp_path / "run", resume=False),
    ):
        pytest.fail("not locked")
    assert "local disk" in error.value.hint


def test_the_lock_file_is_no_link_out_of_the_folder(copied: Recipe, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    Path(copied.output, LOCK).unlink()
    Path(copied.output, LOCK).symlink_to(target)
    with pytest.raises(OutputError, match="cannot be locked"):
        run(copied, Reporter(), resume=True)
    assert target.read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_of_the_log_is_one_error() -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(OutputError, match="No space left"):
        PlainLines(stream).note("step 1")
    with contextlib.suppress(OSError):
        stream.close()
