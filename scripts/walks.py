"""Count the doors of executed walks: pairs of files of the package between which a call passes.

    python scripts/walks.py [library train serve hub] [--doors WALK | --json]

A walk is what one command or call really runs: a profiler notes every function of the package.
Imports, class bodies, lambdas and comprehensions do not count. The walks are those of a LoRA on the
default backbone, with a CPU and warm caches. tests/test_scripts.py has their ceilings.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import adapterhub as ah

PACKAGE = str(Path(ah.__path__[0])) + os.sep
REGISTRY = Path(PACKAGE).parent / "registry"
BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
SETTLED = 0.3  # seconds in which the threads of a server finish what follows an answer


class Walk:
    """The functions of the package that run, and the doors between their files.

    Attributes:
        functions: the file and first line of each function.
        doors: how often a call passes from one file to another.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, int]] = set()
        self.doors: Counter[tuple[str, str]] = Counter()

    def note(self, frame: FrameType) -> None:
        """Note the call of a function."""
        code, caller = frame.f_code, frame.f_back
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")
        if not code.co_filename.startswith(PACKAGE) or not is_function or _imports(caller):
            return
        self.functions.add((code.co_filename, code.co_firstlineno))
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.doors[caller.f_code.co_filename, code.co_filename] += 1

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of files, functions and doors."""
        return len({file for file, _ in self.functions}), len(self.functions), len(self.doors)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


WALKS: dict[str, Walk] = {}
_walking: list[Walk] = []


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call" and _walking:
        _walking[-1].note(frame)


@contextmanager
def walk(name: str) -> Iterator[None]:
    """Record a walk; threads that started while a profiler was set belong to it."""
    WALKS[name] = Walk()
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    _walking.append(WALKS[name])
    try:
        yield
    finally:
        _walking.pop()
        sys.setprofile(None)


def library(folder: Path) -> None:
    """Walk through attach, save, load and publish."""
    model, _ = ah.load_backbone(BACKBONE, task="classification", labels=["a", "b"])
    warm, _ = ah.load_backbone(BACKBONE, task="classification", labels=["a", "b"])
    ah.attach(warm, "lora", name="warm")
    (folder / "registry").mkdir()
    with walk("attach"):
        adapter = ah.attach(model, "lora", name="polite")
    with walk("save"):
        adapter.save(str(folder / "saved"))
    adapter.detach()
    with walk("load"):
        ah.load(model, str(folder / "saved"))
    with walk("publish"):
        ah.publish(str(folder / "saved"), name="polite")


def train(folder: Path) -> None:
    """Walk through `adapterhub train`, three steps of it."""
    from adapterhub.cli import main

    with (folder / "topics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "topic"])
        topics = ("network request", "sorted list", "file path")
        rows.writerows([f"{topic} number {i}", topic] for i in range(120) for topic in topics)
    words = ["train", folder / "topics.csv", "--output", folder / "run", "--steps", "3", "--quiet"]
    sys.argv = ["adapterhub", *map(str, words), "--backbone", BACKBONE]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), walk("train"):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"adapterhub train ended with {end.code}") from end


def serve(folder: Path) -> None:
    """Walk through a request to a server of two adapters, from HTTP to probabilities."""
    from adapterhub.serving.http.lifecycle import HttpServer, open_service
    from adapterhub.serving.options import ServeOptions

    threading.setprofile(_profile)
    options = ServeOptions(("sst2-lora", "docstrings-pfeiffer"), registry=str(REGISTRY), port=0)
    address, started = _started()
    server = HttpServer(open_service(options), options, started)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()

    def predict(text: str) -> None:
        body = json.dumps({"model": "sst2-lora", "inputs": [text]}).encode()
        request = urllib.request.Request(
            address() + "/v1/predict", body, {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()

    predict("a fine film")
    time.sleep(SETTLED)
    with walk("serve"):
        predict("a gorgeous, witty movie")
        time.sleep(SETTLED)
    server.stop()
    thread.join(20)


def hub(folder: Path) -> None:
    """Walk through a commit, in a hub, and through a push, in its client."""
    from huggingface_hub import CommitOperationAdd, HfApi

    threading.setprofile(_profile)
    version = next(path for path in REGISTRY.glob("*/sst2-lora/v*") if path.is_dir())
    files = [p for p in version.iterdir() if p.is_file() and not p.name.startswith(".")]
    base, token = _hub(folder / "hub")
    api = HfApi(endpoint=base, token=token)
    api.create_repo("ada/x")
    api.upload_file(path_or_fileobj=b"# A\n", path_in_repo="README.md", repo_id="ada/x")
    operations = [CommitOperationAdd(file.name, file.read_bytes()) for file in files]
    time.sleep(SETTLED)
    with walk("hub"):
        api.create_commit("ada/x", operations, commit_message="v1")
        time.sleep(SETTLED)

    (folder / "pushed").mkdir()
    for file in files:
        shutil.copy(file, folder / "pushed")
    with _apart(folder / "other") as (base, token):
        os.environ["ADAPTERHUB_TOKENS"] = f"{base}={token}"
        with walk("push"):
            ah.push(str(folder / "pushed"), f"{base}/ada/x")


def _started() -> tuple[Callable[[], str], Callable[[str], None]]:
    addresses: list[str] = []
    ready = threading.Event()

    def address() -> str:
        if not ready.wait(200):
            raise RuntimeError("the server did not start")
        return addresses[0] if addresses[0].startswith("http") else f"http://{addresses[0]}"

    def started(at: str) -> None:
        addresses.append(at)
        ready.set()

    return address, started


def _user(folder: Path) -> str:
    _command("hub", "user", str(folder), "ada")
    words = ("hub", "token", "create", str(folder), "--user", "ada", "--role", "write")
    return _command(*words).split()[-1]


def _command(*words: str) -> str:
    command = [sys.executable, "-m", "adapterhub", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hub(folder: Path) -> tuple[str, str]:
    """Start a hub in a thread; return its address and a token."""
    from adapterhub.hub.server import serve_hub
    from adapterhub.hub.state import HubOptions

    token = _user(folder)
    address, started = _started()
    arguments = (folder, "127.0.0.1", 0, HubOptions(), started)
    threading.Thread(target=serve_hub, args=arguments, daemon=True).start()
    return address(), token


@contextmanager
def _apart(folder: Path) -> Iterator[tuple[str, str]]:
    """Run a hub in another process, so that a walk has the client alone."""
    token = _user(folder)
    words = [sys.executable, __file__, "--serve-hub", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            yield address if address.startswith("http") else f"http://{address}", token
        finally:
            process.terminate()


def _serve_hub(folder: str) -> None:
    from adapterhub.hub.server import serve_hub
    from adapterhub.hub.state import HubOptions

    options = HubOptions()
    serve_hub(Path(folder), "127.0.0.1", 0, options, lambda at: print(at, flush=True))


GROUPS = {"library": library, "train": train, "serve": serve, "hub": hub}


def measure(*groups: str) -> dict[str, Walk]:
    """Return the walks of some groups, in empty folders of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "XDG_CONFIG_HOME": f"{folder}/config",
            "XDG_DATA_HOME": f"{folder}/data",
            "ADAPTERHUB_REGISTRY": f"{folder}/registry",
            "HF_HUB_DISABLE_XET": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        for group in groups:
            GROUPS[group](folder)
    return WALKS


def main() -> None:
    """Print the walks that the command line names, or the doors of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"some of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--doors", metavar="WALK", help="print each door of a walk with its calls")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--serve-hub", metavar="FOLDER", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve_hub:
        return _serve_hub(flags.serve_hub)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        walks = measure(*(flags.groups or GROUPS))
    if flags.json:
        print(json.dumps({name: each.counts() for name, each in walks.items()}))
    elif flags.doors:
        for (start, end), calls in walks[flags.doors].doors.most_common():
            print(f"{calls:6} {start.removeprefix(PACKAGE)} -> {end.removeprefix(PACKAGE)}")
    else:
        for name, each in walks.items():
            print("{}: {} files, {} functions, {} doors".format(name, *each.counts()))


if __name__ == "__main__":
    main()
