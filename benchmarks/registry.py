"""Measure search times in a local registry with many adapters.

    python benchmarks/registry.py [--adapters 100000]
    python benchmarks/registry.py --table

The adapter folders are real: 50 backbones, with methods, tasks, metrics, tags and cards. The record
is written to benchmarks/results/registry.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import records
import torch

from adapterhub.files.manifest import BackboneRef, Manifest, from_json, to_json
from adapterhub.files.native import write_adapter
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


def make(root: Path, number: int) -> None:
    """Write the folders of `number` adapters."""
    seed = root.parent / "seed"
    base = Manifest(
        name="x",
        methods=({"lora": {}},),
        backbone=BackboneRef("a/b", None, "bf16-0", "bert", identity=IDENTITY),
    )
    write_adapter(seed, base, {"encoder.0.attn.q.lora.a": torch.ones(2, 4)})
    manifest_of_seed = from_json((seed / "adapter.json").read_bytes())
    draw = random.Random(0)
    for count in range(number):
        model, words = draw.randrange(50), draw.sample(WORDS, 2)
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


def table() -> str:
    """Return the Markdown table of the record."""
    times = (records.read("registry") or {"query_cpu_ms": {}})["query_cpu_ms"]
    rows = [(name, f"{times[name]:.0f} ms") for name in QUERIES if name in times]
    return records.markdown(("search", "time"), rows)


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        registry = LocalRegistry(Path(folder) / "registry")
        make(registry.root, options.adapters)
        start = time.perf_counter()
        registry.reindex()
        record: dict[str, Any] = {"adapters": options.adapters}
        record["reindex_seconds"] = round(time.perf_counter() - start, 1)
        print(f"{'index of all folders':24} {record['reindex_seconds']:7.1f} s", flush=True)
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
