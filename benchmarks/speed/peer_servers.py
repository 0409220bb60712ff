"""Measure other servers beside `adapterhub serve`, each from an environment of its own.

    python benchmarks/speed/peer_servers.py --infinity ENV/bin/infinity_emb
    python benchmarks/speed/peer_servers.py --transformers ENV/bin/transformers --backbone FOLDER

Nobody has an adapter here, since these servers have none. All have one thread, and are asked in
turns over HTTP by `http_load.py`, in the shapes of OpenAI:

    infinity        vectors of docstrings of at most 40 words by all-MiniLM-L6-v2, 32 clients
    transformers    `transformers serve --continuous-batching`: 32 greedy tokens in answer to a
                    chat, 8 clients; FOLDER is a causal language model with a chat template
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from in_turns import add_options, write_record
from server import Server, Summary, in_turns, middle, running
from serving import MINILM, WORDS

from adapterhub.backbones.find import find_backbone
from adapterhub.data.docstrings import load_docstrings

OURS = ("-m", "adapterhub", "serve", "--threads", 1, "--refresh", "off", "--backbone")
TOKENS, PROMPT_WORDS = 32, 12


def vectors(program: str, texts: Sequence[str], runs: int) -> Summary:
    """Measure vectors per second of infinity and of us."""
    folder = str(find_backbone(MINILM)[0])
    bodies = [json.dumps({"model": MINILM, "input": [text]}) for text in texts]
    with ExitStack() as stack:
        registry = stack.enter_context(tempfile.TemporaryDirectory())
        ours = running(*OURS, MINILM, "--registry", registry, "--port", path="/v1/embeddings")
        peer = running(
            *("v2", "--model-id", folder, "--served-model-name", MINILM, "--engine", "torch"),
            *("--device", "cpu", "--port"),
            program=program, ready="/health", path="/embeddings",
        )  # fmt: skip
        servers = {"adapterhub": stack.enter_context(ours), "infinity": stack.enter_context(peer)}
        return rates(dict.fromkeys(servers, bodies), servers, 32, runs)


def chats(program: str, folder: Path, texts: Sequence[str], runs: int) -> Summary:
    """Measure chats per second of `transformers serve` and of us."""

    def bodies(model: str) -> list[str]:
        return [
            json.dumps({
                "model": model, "max_tokens": TOKENS, "temperature": 0.0,
                "messages": [{"role": "user", "content": " ".join(text.split()[:PROMPT_WORDS])}],
            })
            for text in texts
        ]  # fmt: skip

    path = "/v1/chat/completions"
    with ExitStack() as stack:
        registry = stack.enter_context(tempfile.TemporaryDirectory())
        ours = stack.enter_context(
            running(*OURS, folder, "--registry", registry, "--port", path=path)
        )
        peer = running(
            *("serve", "--continuous-batching", "--device", "cpu", "--dtype", "float32"),
            *(str(folder), "--port"),
            program=program, ready="/health", path=path,
        )  # fmt: skip
        servers = {"adapterhub": ours, "transformers": stack.enter_context(peer)}
        asked = {"adapterhub": bodies(model_of(ours)), "transformers": bodies(str(folder))}
        return rates(asked, servers, 8, runs)


def model_of(server: Server) -> str:
    """Return the name of the backbone that a server has."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def rates(
    bodies: dict[str, list[str]], servers: dict[str, Server], clients: int, runs: int
) -> Summary:
    """Ask servers in turns; return the medians."""
    asks = {
        name: partial(server.asked, bodies[name], "--clients", clients)
        for name, server in servers.items()
    }
    return {name: middle(some) for name, some in in_turns(asks, runs).items()}


def main() -> None:
    """Measure those that are named, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--infinity", help="the program infinity_emb")
    parser.add_argument("--transformers", help="the program transformers")
    parser.add_argument("--backbone", type=Path, help="of the chats")
    parser.add_argument("--requests", type=int, default=512, help="vectors in a turn")
    parser.add_argument("--chats", type=int, default=32, help="in a turn")
    add_options(parser)
    parser.set_defaults(runs=5)
    options = parser.parse_args()
    texts = [" ".join(e.text.split()[:WORDS]) for e in load_docstrings()[0]]
    texts = random.Random(0).sample(texts, options.requests)
    measured: dict[str, Any] = {}
    if options.infinity:
        measured["vectors"] = vectors(options.infinity, texts, options.runs)
    if options.transformers and options.backbone:
        some = texts[: options.chats]
        folder = options.backbone.resolve()
        measured["chats"] = chats(options.transformers, folder, some, options.runs)
    if not measured:
        parser.error("--infinity, or --transformers with --backbone")
    options.infinity = version_of(options.infinity, "infinity_emb")
    options.transformers = version_of(options.transformers, "transformers")
    options.backbone = options.backbone and options.backbone.name
    write_record(options, measured, "cases")


def version_of(program: str | None, package: str) -> str | None:
    """Return the version of a package in the environment of a program."""
    if program is None:
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = Path(program).parent / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
