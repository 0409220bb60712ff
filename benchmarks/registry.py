"""Measure search times in a registry with many adapters.

    python benchmarks/registry.py [--adapters 100000]
    python benchmarks/registry.py --table
    python benchmarks/registry.py website [--adapters 10000]
    python benchmarks/registry.py website --table

The adapter folders are real: 50 backbones, with methods, tasks, metrics, tags and cards. With
`website`, a web server sends the registry, and waits 50 ms before each answer; and 1,000 versions
are copied, twice. The records are benchmarks/results/registry.json and registry-website.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import records
import torch

from adapterhub.files.manifest import BackboneRef, Manifest, from_json, to_json
from adapterhub.files.native import write_adapter
from adapterhub.registry.copying import copy_registry
from adapterhub.registry.http_storage import WebsiteRegistry
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Query

METHODS = ("lora", "pfeiffer", "houlsby", "prefix", "mam", "prompt")
TASKS = ("classification", "regression", "tagging", "seq2seq", "causal-lm")
WORDS = ("english", "german", "medical", "legal", "news", "reviews", "chat", "code", "tweets")
TAGS = {"best": 0.3, "winner": 0.0005}
IDENTITY = {
    **{"config": {}, "files": [], "half": f"v2-{0:064x}", "parts": {}},
    **{"rows": None, "tokens": None, "strength": "sample"},
}
QUERIES = {
    "all, by name": Query(),
    "one backbone": Query(backbone="acme/model-7"),
    "one fingerprint": Query(backbone=f"bf16-{7:064x}"),
    "task and method": Query(task="tagging", method="lora"),
    "by a metric": Query(sort="accuracy"),
    "a backbone by a metric": Query(backbone="acme/model-7", sort="accuracy"),
    "by size": Query(task="seq2seq", sort="size"),
    "all, 1,000 of them": Query(limit=1_000),
    "all versions": Query(all_versions=True),
    "a frequent tag": Query(tags=("best",)),
    "a rare tag by a metric": Query(tags=("winner",), sort="accuracy"),
    "a word of each card": Query(text="adapter"),
    "the start of many words": Query(text="1", task="tagging", sort="size"),
    "text": Query(text="medical german"),
    "text by a metric": Query(text="legal", sort="accuracy"),
    "nothing found": Query(text="swahili"),
}


def make(root: Path, number: int, backbones: int = 50) -> None:
    """Write the folders of `number` adapters."""
    seed = root.parent / f"seed-of-{root.name}"
    base = Manifest(
        name="x",
        methods=({"lora": {}},),
        backbone=BackboneRef("a/b", None, "bf16-0", "bert", identity=IDENTITY),
    )
    write_adapter(seed, base, {"encoder.0.attn.q.lora.a": torch.ones(2, 4)})
    manifest_of_seed = from_json((seed / "adapter.json").read_bytes())
    draw = random.Random(0)
    for count in range(number):
        model, words = draw.randrange(backbones), draw.sample(WORDS, 2)
        folder = root / f"acme--model-{model}" / f"{words[0]}-{count}" / "v1"
        folder.mkdir(parents=True)
        manifest = dataclasses.replace(
            manifest_of_seed,
            methods=({draw.choice(METHODS): {}},),
            backbone=dataclasses.replace(
                base.backbone, id=f"acme/model-{model}", fingerprint=f"bf16-{model:064x}"
            ),
            task=draw.choice(TASKS),
            metrics={"accuracy": draw.random()},
        )
        (folder / "adapter.json").write_bytes(to_json(manifest))
        shutil.copyfile(seed / "adapter.safetensors", folder / "adapter.safetensors")
        (folder / "README.md").write_text(f"An adapter for {' '.join(words)}.", encoding="utf-8")
        if tags := [tag for tag, share in TAGS.items() if draw.random() < share]:
            names = {"tags": dict.fromkeys(tags, "v1"), "yanked": {}}
            (folder.parent / "names.json").write_text(json.dumps(names), encoding="utf-8")


def timed(registry: LocalRegistry, query: Query) -> tuple[float, float, int]:
    """Time a search: median wall and processor time of nine runs in ms, and the number of results.

    Processor time is less affected by other load on the machine.
    """
    times = []
    for _ in range(9):
        start = time.perf_counter(), time.process_time()
        entries = registry.search(query)
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, processor = (sorted(each)[4] * 1e3 for each in zip(*times, strict=True))
    return wall, processor, len(entries)


LATENCY = 0.05  # seconds before each answer


class Handler(SimpleHTTPRequestHandler):
    """Sends files and their tags, late."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_GET(self) -> None:
        time.sleep(LATENCY)
        Handler.requests += 1
        path = Path(self.translate_path(self.path))
        data = path.read_bytes() if path.is_file() else b""
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        same = self.headers["if-none-match"] == tag
        self.send_response(304 if same else 200 if path.is_file() else 404)
        self.send_header("etag", tag)
        self.send_header("content-length", str(0 if same else len(data)))
        self.end_headers()
        self.wfile.write(b"" if same else data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """Takes sixteen connections at once: with the usual five, others wait for a second."""

    request_queue_size = 128


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; yield the address."""
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def website(folder: Path, number: int) -> Iterator[dict[str, Any]]:
    """Yield the times of searches over http, and of copies."""
    for backbones, query in ((1, Query()), (50, Query()), (50, Query(backbone="acme/model-7"))):
        root = folder / f"of-{backbones}"
        if not root.exists():
            make(root, number, backbones)
            LocalRegistry(root).index()
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        with served(root) as url:
            for state in ("cold", "warm"):
                times = []
                for _ in range(1 if state == "cold" else 5):
                    Handler.requests, start = 0, time.perf_counter()
                    WebsiteRegistry(url).search(query)
                    times.append(time.perf_counter() - start)
                what = "one backbone" if query.backbone else "all"
                yield {
                    "adapters": number,
                    "backbones": backbones,
                    "search": f"search of {what}, {state}",
                    "seconds": sorted(times)[len(times) // 2],
                    "requests": Handler.requests,
                }
    make(folder / "thousand", 1_000)
    for state in ("first", "second"):
        start = time.perf_counter()
        report = copy_registry(str(folder / "thousand"), str(folder / "copy"))
        yield {
            "adapters": 1_000,
            "backbones": 50,
            "search": f"copy to a folder, {state}",
            "seconds": time.perf_counter() - start,
            "copied": len(report.copied),
        }


def website_table() -> str:
    """Return the Markdown table of the record of `website`."""
    rows = [
        (f"{row['adapters']:,}", str(row["backbones"]), row["search"], f"{row['seconds']:.2f} s")
        for row in (records.read("registry-website") or {"rows": []})["rows"]
    ]
    return records.markdown(("adapters", "backbones", "what", "time"), rows)


def table(name: str = "") -> str:
    """Return the Markdown table of a record."""
    if name == "website":
        return website_table()
    times = (records.read("registry") or {"query_cpu_ms": {}})["query_cpu_ms"]
    rows = [(name, f"{times[name]:.0f} ms") for name in QUERIES if name in times]
    return records.markdown(("search", "time"), rows)


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--adapters", type=int)
    parser.add_argument("what", nargs="?", choices=["website"])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.what or ""))
        return
    if options.what:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            for row in website(Path(folder), options.adapters or 10_000):
                rows.append(row)
                print(row, flush=True)
            records.write("registry-website", {"rows": rows})
        return
    number = options.adapters or 100_000
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        registry = LocalRegistry(Path(folder) / "registry")
        make(registry.root, number)
        start = time.perf_counter()
        registry.index()
        record: dict[str, Any] = {"adapters": number}
        record["index_seconds"] = round(time.perf_counter() - start, 1)
        print(f"{'index of all folders':24} {record['index_seconds']:7.1f} s", flush=True)
        record |= {"query_ms": {}, "query_cpu_ms": {}, "load": os.getloadavg()[0]}
        for name, query in QUERIES.items():
            wall, processor, count = timed(registry, query)
            record["query_ms"][name] = round(wall, 2)
            record["query_cpu_ms"][name] = round(processor, 2)
            print(f"{name:24} {wall:7.2f} ms {processor:7.2f} ms CPU  {count:4} found", flush=True)
        record["device"] = f"CPU ({platform.machine()})"
        records.write("registry", record)  # first: removing the folders takes minutes


if __name__ == "__main__":
    main()
