"""Measure `adapterhub serve` over HTTP, with clients in a process of their own.

    python benchmarks/speed/server.py [CASE ...] [--output server.json]

The backbone is all-MiniLM-L6-v2, the texts are docstrings, cut to 40 words; there are 64 adapters,
of LoRA and of 8 methods, with heads of 4 kinds. Each server is `adapterhub serve` in a process of
one thread, and `http_load.py` asks. Cases:

    rates     requests per second with 32 clients, of servers that run side by side and are asked in
              turns: no adapter, 64 lora, 64 mixed, 64 mixed with one client; where fastapi can be
              imported, also what people write by hand (`by_hand.py`); and the backbone offline
    tail      latencies at 80 % of the rate of 64 mixed, requests at random moments (Poisson)
    overhead  one client: the milliseconds of a request, over HTTP and of the engine in this
              process, and over HTTP where no pass is computed (`without_passes.py`)
    cold      a published adapter that nobody asked for yet, to its first answer, and what the
              requests to others take meanwhile and before
    many      10,000 adapters that may be asked for, 1,000 of them in memory, drawn by Zipf's law
    overload  four times the rate: answers per second, and the time to a 429
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_turns import add_options, write_record
from serving import METHODS, MINILM, WORDS, offline, save_adapters

import adapterhub as ah
from adapterhub.data.docstrings import load_docstrings
from adapterhub.serving import Engine

HERE = Path(__file__).parent
LOAD = HERE.parent / "http_load.py"
CLIENTS = 32
READY_SECONDS = 300
BARE = MINILM
Summary = dict[str, Any]


@dataclass
class Measured:
    """Where the servers of a run are, and what they are asked.

    Attributes:
        options: those of the command line.
        registry: a folder registry with the adapters.
        lora: the references of 64 LoRA adapters.
        mixed: those of 64 adapters of 8 methods.
        texts: the inputs.
    """

    options: argparse.Namespace
    registry: Path
    lora: list[str]
    mixed: list[str]
    texts: list[str]

    def bodies(self, models: Sequence[str], count: int | None = None, seed: int = 0) -> list[str]:
        """Return bodies of requests, each with a text and one of these models, drawn evenly."""
        drawn = random.Random(seed)
        texts = [drawn.choice(self.texts) for _ in range(count or self.options.requests)]
        return [body(drawn.choice(models), text) for text in texts]


def body(model: str, text: str) -> str:
    """Return the body of a request for one answer."""
    return json.dumps({"model": model, "inputs": [text]})


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    path: str = "/v1/predict"

    @property
    def url(self) -> str:
        """The path that is asked."""
        return f"http://127.0.0.1:{self.port}{self.path}"

    def asked(self, bodies: Sequence[str], *flags: object) -> Summary:
        """Ask from another process; return rates, latencies and milliseconds of the processor."""
        before = self.processor()
        command = [sys.executable, str(LOAD), self.url, *map(str, flags)]
        ended = subprocess.run(
            command, input="\n".join(bodies), capture_output=True, text=True, check=True
        )
        summary: Summary = json.loads(ended.stdout)
        used = self.processor() - before
        return {**summary, "processor ms each": round(1000 * used / len(bodies), 3)}

    def processor(self) -> float:
        """Return the seconds of the processor that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return its resident MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def running(
    *command: object, program: str = sys.executable, ready: str = "/readyz", path: str = Server.path
) -> Iterator[Server]:
    """Run a server until the end of the block; its port is the last word of the command.

    `ready` is a path that is answered when it is ready, `path` the one that is asked.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [program, *map(str, command), str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}{ready}")
        yield Server(process, port, path)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Ask until a server is ready.

    Raises:
        SystemExit: it ended, or takes too long.
    """
    for _ in range(READY_SECONDS * 5):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url} was not ready after {READY_SECONDS} s")


def served(given: Measured, *words: object, without_passes: bool = False) -> Any:
    """Run `adapterhub serve` with some adapters, and options."""
    tokens = given.options.batch_tokens
    command = [HERE / "without_passes.py"] if without_passes else ["-m", "adapterhub", "serve"]
    return running(
        *command, *words, "--backbone", MINILM, "--registry", given.registry,
        "--threads", 1, "--refresh", "off", *(["--batch-tokens", tokens] if tokens else []),
        "--port",
    )  # fmt: skip


# Cases


def rates(given: Measured) -> Summary:
    """Measure requests per second, of servers that are asked in turns."""
    clients = ("--clients", CLIENTS)
    few = given.options.requests // 4
    with ExitStack() as stack:
        bare, lora, mixed = (
            stack.enter_context(served(given, *some)) for some in ((), given.lora, given.mixed)
        )
        asks: dict[str, Callable[[], Summary]] = {
            "offline": partial(computed, offline(), given.texts[: given.options.requests]),
            "no adapter": lambda: bare.asked(given.bodies([BARE]), *clients),
            f"{len(given.lora)} lora": lambda: lora.asked(given.bodies(given.lora), *clients),
            f"{len(given.mixed)} mixed": lambda: mixed.asked(given.bodies(given.mixed), *clients),
            "mixed, one client": lambda: mixed.asked(
                given.bodies(given.mixed, few), "--clients", 1
            ),
        }
        if importlib.util.find_spec("fastapi"):
            peft, vectors = (
                stack.enter_context(running(HERE / "by_hand.py", what))
                for what in ("lora", "vectors")
            )
            names = [str(number) for number in range(64)]
            asks["by hand, peft"] = lambda: peft.asked(given.bodies(names, few), *clients)
            asks["by hand, sentence-transformers"] = lambda: vectors.asked(
                given.bodies([BARE], few), *clients
            )
        return {name: middle(some) for name, some in in_turns(asks, given.options.runs).items()}


def in_turns(asks: dict[str, Callable[[], Summary]], runs: int) -> dict[str, list[Summary]]:
    """Ask everybody in turns; the first turn warms up."""
    turns: dict[str, list[Summary]] = {name: [] for name in asks}
    for turn in range(runs + 1):
        for name, ask in asks.items():
            found = ask()
            if turn:
                turns[name].append(found)
                print(f"{name}: {found}", file=sys.stderr)
    return turns


def middle(turns: Sequence[Summary]) -> Summary:
    """Return the median of each number over the turns."""
    wanted = ("per second", "processor ms each", "p50 ms", "p99 ms")
    return {
        name: round(statistics.median(each[name] for each in turns), 3)
        for name in wanted
        if name in turns[0]
    }


def computed(answer: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> Summary:
    """Time what computes texts in this process."""
    start = time.perf_counter(), time.process_time()
    answer(texts)
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    count = len(texts)
    return {"per second": count / wall, "processor ms each": 1000 * processor / count}


def tail(given: Measured) -> Summary:
    """Measure latencies at 80 % of the rate, of requests at random moments."""
    with served(given, *given.mixed) as server:
        server.asked(given.bodies(given.mixed), "--clients", CLIENTS)  # warm
        capacity = server.asked(given.bodies(given.mixed), "--clients", CLIENTS)["per second"]
        rate = 0.8 * capacity
        found = server.asked(given.bodies(given.mixed, 4 * given.options.requests), "--rate", rate)
    return {"capacity": capacity, **found, "p99 / p50": round(found["p99 ms"] / found["p50 ms"], 2)}


def overhead(given: Measured) -> Summary:
    """Measure what HTTP adds to a request of one client."""
    texts = given.texts[: given.options.requests // 2]
    with (
        served(given, given.lora[0]) as server,
        served(given, given.lora[0], without_passes=True) as idle,
        Engine(MINILM, registry=given.registry) as engine,
    ):
        engine.pin(given.lora[0])

        def submitted() -> Summary:
            found = computed(
                lambda some: [engine.submit(given.lora[0], text).result() for text in some], texts
            )
            return {**found, "ms each": 1000 / found["per second"]}

        def posted(server: Server) -> Summary:
            found = server.asked([body(given.lora[0], text) for text in texts], "--clients", 1)
            return {**found, "ms each": 1000 / found["per second"]}

        asks: dict[str, Callable[[], Summary]] = {
            "engine": submitted,
            "http": partial(posted, server),
            "idle": partial(posted, idle),
        }
        turns = in_turns(asks, given.options.runs)
    ms = {n: statistics.median(t["ms each"] for t in some) for n, some in turns.items()}
    cpu = {n: statistics.median(t["processor ms each"] for t in some) for n, some in turns.items()}
    return {
        "engine ms": round(ms["engine"], 3),
        "http ms": round(ms["http"], 3),
        "added ms": round(ms["http"] - ms["engine"], 3),
        "added processor ms": round(cpu["http"] - cpu["engine"], 3),
        "without passes ms": round(ms["idle"], 3),
        "without passes processor ms": round(cpu["idle"], 3),
    }


def cold(given: Measured) -> Summary:
    """Measure the first answer of an adapter, and what others take meanwhile."""
    spare = given.lora[len(given.lora) // 2 :]
    used, late = given.lora[: len(given.lora) // 2], len(spare) // 4
    with served(given, *used, "--allow", "lora-*") as server:
        server.asked(given.bodies(used), "--clients", CLIENTS)
        rate = 0.5 * server.asked(given.bodies(used), "--clients", CLIENTS)["per second"]
        count = int(rate * 10)
        before = server.asked(given.bodies(used, count), "--rate", rate)
        first: list[float] = []

        def load_others() -> None:
            for name in spare[late:]:
                time.sleep(0.25)
                first.extend(asyncio.run(once(server.url, name, given.texts[0])).seconds)

        loading = threading.Thread(target=load_others)
        loading.start()
        meanwhile = server.asked(given.bodies(used, count, seed=1), "--rate", rate)
        loading.join()
        alone = [
            asyncio.run(once(server.url, name, given.texts[0])).seconds[0] for name in spare[:late]
        ]
    return {
        "first answer, idle, ms": round(1000 * statistics.median(alone), 1),
        "first answer, at half the rate, ms": round(1000 * statistics.median(first), 1),
        "others' p99 before, ms": before["p99 ms"],
        "others' p99 meanwhile, ms": meanwhile["p99 ms"],
    }


async def once(url: str, model: str, text: str) -> Any:
    """Ask once."""
    sys.path.insert(0, str(LOAD.parent))
    from http_load import Load

    return await Load(url, [body(model, text)]).closed(1)


def many(given: Measured) -> Summary:
    """Measure the rate with more adapters than fit into memory, against those of `rates`."""
    allowed, kept = given.options.allowed, given.options.allowed // 10
    names = [f"{each}" for each in aliases(given, allowed)]
    size = adapter_bytes(given)
    weights = [1 / (rank + 1) for rank in range(allowed)]
    drawn = random.Random(0)

    def zipf(count: int) -> list[str]:
        chosen = drawn.choices(names, weights, k=count)
        return [body(name, drawn.choice(given.texts)) for name in chosen]

    memory = ("--adapter-memory", f"{kept * size // 1024}KiB")
    with (
        served(given, *given.lora) as few,
        served(given, "--allow", "copy-*", *memory) as server,
    ):
        for _ in range(4):  # fills the memory
            server.asked(zipf(given.options.requests * 4), "--clients", CLIENTS)
        start = server.memory()
        turns = in_turns(
            {
                f"{len(given.lora)} adapters": lambda: few.asked(
                    given.bodies(given.lora), "--clients", CLIENTS
                ),
                f"{allowed:,} adapters": lambda: server.asked(
                    zipf(given.options.requests), "--clients", CLIENTS
                ),
            },
            given.options.runs,
        )
        return {
            **{name: middle(some) for name, some in turns.items()},
            "adapters in memory": kept,
            "budget MB": round(kept * size / 1e6, 1),
            "memory MB, before and after": [round(start, 1), round(server.memory(), 1)],
        }


def overload(given: Measured) -> Summary:
    """Measure answers and refusals at four times the rate."""
    with served(given, *given.mixed, "--queue-tokens", 4096) as server:
        server.asked(given.bodies(given.mixed), "--clients", CLIENTS)
        capacity = server.asked(given.bodies(given.mixed), "--clients", CLIENTS)["per second"]
        rate = 4 * capacity
        found = server.asked(
            given.bodies(given.mixed, int(rate * 20)), "--rate", rate, "--connections", 1024
        )
    return {
        "capacity": capacity,
        **found,
        "of the capacity": round(found["per second"] / capacity, 3),
    }


CASES: dict[str, Callable[[Measured], Summary]] = {
    each.__name__: each for each in (rates, tail, overhead, cold, many, overload)
}


# What is served


def published(folders: Sequence[str], registry: Path, name: str) -> list[str]:
    """Publish adapters, and return their references."""
    names = [f"{name}-{number}" for number in range(len(folders))]
    for folder, each in zip(folders, names, strict=True):
        ah.publish(folder, each, registry=registry)
    return names


def aliases(given: Measured, count: int) -> list[str]:
    """Publish so many small adapters with values of their own."""
    names = [f"copy-{number}" for number in range(count)]
    model, _ = ah.load_backbone(MINILM, task="classification", labels=["no", "yes"])
    adapter = ah.attach(model, "lora", name="copied")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            with torch.no_grad():
                for parameter in adapter.parameters():
                    parameter.normal_(std=0.02)
            adapter.save(Path(folder) / name)
            ah.publish(Path(folder) / name, name, registry=given.registry)
    return names


def adapter_bytes(given: Measured) -> int:
    """Return the size of the tensors of one of the small adapters."""
    with Engine(MINILM, registry=given.registry) as engine:
        engine.pin("copy-0")
        return engine.models()[0].bytes


def main() -> None:
    """Measure cases and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="one of the cases above; all")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--allowed", type=int, default=10_000, help="adapters of the case many")
    parser.add_argument("--requests", type=int, default=512, help="in a turn")
    parser.add_argument("--batch-tokens", type=int, help="of the servers; by default their own")
    add_options(parser)
    parser.set_defaults(runs=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder, registry = Path(name), Path(name) / "registry"
        lora = save_adapters(folder / "lora", options.adapters, METHODS[:1])
        mixed = save_adapters(folder / "mixed", options.adapters, METHODS)
        given = Measured(
            options,
            registry,
            published(lora, registry, "lora"),
            published(mixed, registry, "mixed"),
            [" ".join(e.text.split()[:WORDS]) for e in load_docstrings()[0]],
        )
        found = {case: CASES[case](given) for case in options.cases or CASES}
    write_record(options, found, "cases")


if __name__ == "__main__":
    main()
