"""A server of small adapters over HTTP, in a thread of this process, for clients of all kinds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn

from adapterhub.inference.open import AdapterSource
from adapterhub.serving import Engine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.request import Service
from adapterhub.serving.http.server import ENDPOINTS, HttpServer, make_app, open_service
from adapterhub.serving.options import ServeOptions
from adapterhub.web.frame import Endpoint
from tests.kit.served import CONTEXT, EXAMPLES, TEXTS, TaskExample, expected_answers, write_adapter

BACKBONE = "the-backbone"
PAIRS = ((CONTEXT, "the movie was good"), ("a plot", "the end was poor"))
NAMED: Mapping[str, TaskExample] = {
    **{("many" if n == 1 else e.task): e for n, e in enumerate(EXAMPLES)},
    "entailment": TaskExample(
        "classification",
        "classification",
        ("entailment", "neutral", "contradiction"),
        PAIRS,
        "pair",
    ),
    "masked": TaskExample("masked-lm", "masked-lm", (), ("the [MASK] was good", "a [MASK] [MASK]")),
    "choices": TaskExample("multiple-choice", "multiple-choice", (), (("a plot", "good", "bad"),)),
}
"""An adapter for each form of answers of an encoder, by the name that clients use."""


def write_named(backbone: Path, folder: Path) -> dict[str, str]:
    """Save the adapters; return the folder of each."""
    folders = {}
    for seed, (name, example) in enumerate(NAMED.items()):
        torch.manual_seed(seed)  # heads are new
        folders[name] = write_adapter(backbone, folder / name, example=example, seed=seed)
    return folders


def write_wordy(
    backbone: Path, folder: Path, example: TaskExample, method: str = "lora(rank=2)", least: int = 3
) -> str:
    """Save an adapter that writes some words about the first text; return its folder.

    Most random ones repeat a word, or write numbers that no token of the tokenizer has.
    """
    for seed in range(40):
        torch.manual_seed(seed)
        saved = write_adapter(backbone, folder / f"{seed}", method, example, seed=seed)
        (answer,) = expected_answers(saved, TEXTS[:1])
        words = answer["generated"].split()
        if len({*words}) >= least:
            return saved
    raise AssertionError(f"no adapter writes {least} words")


def service_of(engine: Engine, folders: Mapping[str, str], **more: str) -> Service:
    """Return a service of folders, of references and of the engine's backbone."""
    references = {name: AdapterSource(reference) for name, reference in more.items()}
    named = {name: AdapterSource(folder) for name, folder in folders.items()}
    allowed = AllowedAdapters({BACKBONE: None, **named, **references}, folders=frozenset(folders))
    return Service(engine, allowed, backbone=BACKBONE)


@contextmanager
def running(service: Service, endpoints: Sequence[Endpoint] = ()) -> Iterator[str]:
    """Serve on a free port of the loopback; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(service, endpoints or (*ENDPOINTS, *operations()))
    config = uvicorn.Config(app, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@contextmanager
def started(**given: Any) -> Iterator[tuple[str, HttpServer, list[Exception]]]:
    """Run a server with options; yield its address, itself, and the error that it ended with."""
    options = ServeOptions(port=0, **given)
    addresses: list[str] = []
    errors: list[Exception] = []
    ready = threading.Event()

    def say(address: str) -> None:
        addresses.append(address)
        ready.set()

    server = HttpServer(open_service(options), options, say)

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        yield addresses[0] if addresses else "", server, errors
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
