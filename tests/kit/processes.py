"""Processes: forks with their slow imports behind them, two at once, and fresh ones."""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

# Scripts in processes that have their slow imports behind them: forks of one that has made them.
#
#     run("scripts/pages.py", "README.md", folder=ROOT)  # like `python scripts/pages.py ...`
#
# A fork begins at once where a new interpreter takes five seconds to import torch, transformers and
# what they need. It has its own working directory, environment, arguments and `__main__`, and no
# model or thread of another. Only what is read at import is that of the parent: the hub is `hub()`,
# with one cache for all, there is no GPU, and `session.left_out` holds, so that no chart is drawn.


# What adapterhub's modules import when they are called, not when they are imported.
IMPORTED_LATER = (
    "datasets", "matplotlib.pyplot", "rouge_score.rouge_scorer", "sacrebleu", "scipy.stats",
    "sklearn.metrics", "torch._inductor.compile_fx", "torch.utils.tensorboard",
    "transformers.trainer", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
# Read when huggingface_hub is imported. A page that disables its progress bars does so before
# transformers is imported, which otherwise enables them again.
HUB = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS")


@dataclass(frozen=True)
class Ended:
    """A script that ended: its exit code, and what it printed."""

    returncode: int
    printed: str


def run(
    *words: object, folder: Path | None = None, environment: dict[str, str] | None = None,
    processes: int = 1, timeout: float = 280,
) -> Ended:  # fmt: skip
    """Run a script with its arguments in a fork, or in several, as torchrun would start them.

    Args:
        words: the script and its arguments.
        folder: the working directory.
        environment: what is added to this process's environment.
        processes: their number; if one fails, the others are killed.
        timeout: seconds after which they are killed.
    """
    parent = _parent()
    wider = os.environ | (environment or {})
    ranks = [wider | each for each in _ranks(processes)] if processes > 1 else [wider]
    job = {"words": [*map(str, words)], "folder": str(folder or Path.cwd()), "ranks": ranks}
    return parent.ask(job, timeout)


def hub() -> Any:
    """Return the hub that the forks know: a `fake_hub.Hub`, empty at first."""
    _parent()  # it imports while the hub is filled
    return _hub()[0]


def _ranks(count: int) -> list[dict[str, str]]:
    """Return what torchrun sets in the environment of each process."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0",
    }  # fmt: skip
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class _Parent:
    """The process that forks, seen from here."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self.cache, self.printed = self.folder / "hf", self.folder / "printed"
        for_hub = dict(zip(HUB, (_hub()[1], str(self.cache), "0", "1"), strict=True))
        environment = os.environ | for_hub | {
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        with (self.folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "fork", self.printed], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)

    def ask(self, job: dict[str, Any], timeout: float) -> Ended:
        """Let it fork, and wait for the end."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        self.printed.write_bytes(b"")
        requests.write(json.dumps(job) + "\n")
        requests.flush()
        if answer := answers.readline() if select.select([answers], [], [], timeout)[0] else "":
            return Ended(int(answer), self.printed.read_text(encoding="utf-8", errors="replace"))
        printed = self.printed.read_text(encoding="utf-8", errors="replace")
        errors = (self.folder / "errors").read_text(encoding="utf-8", errors="replace")
        self.close()
        return Ended(-1, f"{printed}\n{errors}\nkilled, or no answer in {timeout} s")

    def close(self) -> None:
        """Kill it and its forks."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        _parent.cache_clear()


@cache
def _parent() -> _Parent:
    return _Parent()


@cache
def _hub() -> tuple[Any, str]:
    from tests.kit import fake_hub

    serving = fake_hub.serving()
    atexit.register(serving.__exit__, None, None, None)
    return serving.__enter__()


# In the process that forks


def _import() -> None:
    """Import adapterhub and all that it needs, and read the texts that pages train on."""
    import adapterhub
    from adapterhub.data.docstrings import load_docstrings

    for module in pkgutil.walk_packages(adapterhub.__path__, "adapterhub."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in IMPORTED_LATER:
        with suppress(ModuleNotFoundError):  # tensorboard is of an extra
            importlib.import_module(name)
    load_docstrings()


def _forked(requests: IO[str], answers: IO[str]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Fork for each request; return its job and environment in the forks, at the end None."""
    for line in requests:
        job, started = json.loads(line), set[int]()
        for environment in job["ranks"]:
            if not (child := os.fork()):
                return job, environment
            started.add(child)
        failed = 0
        while started:
            child, status = os.wait()
            started.discard(child)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed = code
                for other in started:
                    os.kill(other, signal.SIGKILL)
        print(failed, file=answers, flush=True)
    return None


def _become(job: dict[str, Any], environment: dict[str, str], printed: str) -> None:
    """Run a script in a fork, as a new interpreter would."""
    with open(printed, "ab") as out, open(os.devnull, "rb") as nothing:
        for file, number in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    environment |= {name: os.environ[name] for name in HUB}
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job["folder"])
    sys.argv = job["words"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _fork(printed: str) -> None:
    from tests.kit import session

    _import()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all of them
    with session.left_out():
        if forked := _forked(sys.stdin, sys.stdout):
            _become(*forked, printed)
        else:
            shutil.rmtree(Path(printed).parent, ignore_errors=True)


# Commands of adapterhub in two processes, started by torchrun or accelerate, and their results.


def run_all(commands):
    """Run commands one after another in this process, which may be one of several."""
    import pytest

    from adapterhub import cli

    before = sys.argv
    try:
        for words in commands:
            sys.argv = ["adapterhub", *map(str, words)]
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code, words
    finally:
        sys.argv = before


def in_two(folder, commands):
    """Run commands in two processes, with the environment that torchrun gives them."""
    return finished(run(__file__, "commands", written(folder, commands), processes=2))


@contextlib.contextmanager
def launch(folder, commands, *launcher):
    """Begin commands in two processes by a launcher, which is a module of Python.

    It runs in a fork, and its workers are forks of that: options of torchrun say so.
    """
    count = [] if "--num_processes=2" in launcher else ["--nproc-per-node=2"]
    words = (*launcher, *count, __file__, "commands", written(folder, commands))
    forks = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run, __file__, "launch", *words, environment=forks)


def launched():
    """Return the processes that the launcher in the fork has started."""
    import psutil

    (launcher,) = psutil.Process(_parent().process.pid).children()
    return launcher.children()


def written(folder, commands):
    path = folder / "commands.json"
    path.write_text(json.dumps([[*map(str, words)] for words in commands]))
    return path


def start(*words):
    """Run a module of Python, such as accelerate's launcher, in fresh processes without GPUs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
    )  # fmt: skip
    return finished(Ended(done.returncode, done.stdout))


def finished(ended):
    assert ended.returncode == 0, ended.printed[-4000:]
    return ended.printed


def same_adapters(one, two):
    import torch
    from safetensors.torch import load_file

    files = (folder / "adapter" / "adapter.safetensors" for folder in (one, two))
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


def losses(folder):
    """Return the loss of each step of a run, rounded as it was recorded."""
    return [line["loss"] for line in lines_of(folder) if "loss" in line]


def evaluations(folder):
    """Return the metrics of each evaluation of a run."""
    return [line["metrics"] for line in lines_of(folder) if "metrics" in line]


def lines_of(folder):
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


# Command lines in one fresh process of Python, and the slow libraries that each has imported.
#
# python processes.py fresh < COMMANDS > RESULTS      JSON: {name: words}, {name: [code, output,
# slow]}


# They take from 0.2 to 3 seconds each.
SLOW = {"torch", "transformers", "datasets", "pandas", "sklearn", "scipy", "accelerate", "peft"}
# Libraries that a training run without trackers, and a prediction, do without.
UNNEEDED = {"datasets", "peft", "seqeval", "sacrebleu", "nltk", "rouge_score", "wandb", "mlflow",
            "detect_secrets", "cryptography"}  # fmt: skip
# Libraries that a run loads behind its first step, for metrics and charts, and a prediction never.
LATER = {"pandas", "pyarrow", "sklearn", "scipy.stats", "matplotlib"}
_PLACES = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")


def fork_command(*words: object) -> int:
    """Start a command in a copy of this process, which has imported all; return its number."""
    if child := os.fork():
        return child
    try:
        from adapterhub.cli import main

        sys.argv = ["adapterhub", *map(str, words)]
        main()
    finally:
        os._exit(0)


def run_commands(
    commands: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, tuple[int, str, list[str]]]:
    """Run command lines in a folder, which is also the home; a word `import:M` imports M.

    Args:
        commands: the words of each command line, by name.
        folder: the working directory.

    Returns:
        Exit code, output with errors, and the slow libraries that are imported by then.
    """
    run = subprocess.run(
        [sys.executable, __file__, "fresh"],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **dict.fromkeys(_PLACES, str(folder))},
        check=True,
    )
    return {name: tuple(result) for name, result in json.loads(run.stdout).items()}


def _run(words: Sequence[str]) -> tuple[int, str, list[str]]:
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        sys.argv, sys.stdin = ["adapterhub", *words], io.TextIOWrapper(io.BytesIO())
        try:
            if words[0].startswith("import:"):
                __import__(words[0].removeprefix("import:"))
            else:
                from adapterhub.cli import main

                main()
        except SystemExit as error:
            code = int(error.code or 0)
    return code, output.getvalue(), sorted((SLOW | UNNEEDED | LATER) & sys.modules.keys())


def _fresh() -> None:
    results = {name: _run(words) for name, words in json.load(sys.stdin).items()}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        _fork(sys.argv[2])
    elif sys.argv[1] == "launch":
        sys.argv = sys.argv[2:]
        importlib.import_module(sys.argv[0]).main()
    elif sys.argv[1] == "commands":
        run_all(json.loads(Path(sys.argv[2]).read_text()))
    else:
        _fresh()
