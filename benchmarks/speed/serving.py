"""Measure the serving engine against the bare backbone, and against one request at a time.

    python benchmarks/speed/serving.py [--output serving.json]

The backbone is all-MiniLM-L6-v2, the texts are docstrings, cut to 40 words. Closed-loop clients,
each a thread that asks again when it is answered, share the requests of a turn:

    offline       the backbone on rows that are encoded and sorted by length, at the batch size that
                  was fastest; no requests
    no adapter    the engine, vectors of the backbone
    64 lora       the engine, 64 LoRA adapters with heads of 4 kinds, a random one per request
    64 mixed      the same with adapters of 8 methods
    one by one    the 64 mixed adapters, one after the other activated for one request

The variants alternate, in one process. Of each the median over the turns: requests per second, and
milliseconds of the processor per request, which include those of the clients.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from in_turns import add_options, write_record

import adapterhub as ah
from adapterhub.data.docstrings import load_docstrings
from adapterhub.inference.open import AdapterSource, open_several
from adapterhub.serving import Engine

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
METHODS = ("lora", "dora", "ia3", "pfeiffer", "parallel", "prefix", "prompt", "compacter")
HEADS = (
    ("classification", ("no", "yes")),
    ("classification", tuple("abcdefgh")),
    ("regression", ()),
    ("tagging", ("O", "B-x", "I-x")),
)
WORDS = 40  # of a text, at most
BATCHES = (1, 2, 4, 8, 16, 32)  # rows, of which the fastest is taken offline
Variants = dict[str, Callable[[Sequence[str]], Any]]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=512, help="in a turn")
    parser.add_argument("--batch-tokens", type=int, help="of the engine; by default its own")
    parser.add_argument("--only", help="variants, by their first word, with commas")
    add_options(parser)
    parser.set_defaults(runs=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        variants = make_variants(options, Path(folder), opened)
        write_record(options, measure(options, variants), "requests")


def make_variants(options: argparse.Namespace, folder: Path, opened: ExitStack) -> Variants:
    """Save adapters, open engines, and return what answers the texts of a turn."""
    loras = save_adapters(folder / "lora", options.adapters, METHODS[:1])
    mixed = save_adapters(folder / "mixed", options.adapters, METHODS)
    clients, tokens = options.clients, options.batch_tokens

    def served(adapters: Sequence[str | None]) -> Callable[[Sequence[str]], Any]:
        engine = opened.enter_context(Engine(MINILM, batch_tokens=tokens))
        engine.pin(*adapters)
        return lambda texts: ask(engine, adapters, texts, clients)

    variants: dict[str, Callable[[], Callable[[Sequence[str]], Any]]] = {
        "offline": offline,
        "no adapter": lambda: served([None]),
        f"{len(loras)} lora": lambda: served(loras),
        f"{len(mixed)} mixed": lambda: served(mixed),
        "one by one": lambda: one_by_one(mixed),
    }
    names = options.only.split(",") if options.only else variants
    return {name: make() for name, make in variants.items() if name in names}


def save_adapters(folder: Path, count: int, methods: Sequence[str]) -> list[str]:
    """Save adapters with random values, and heads of several kinds."""
    folders = [folder / str(number) for number in range(count)]
    for place, (kind, labels) in enumerate(HEADS):
        model, _ = ah.load_backbone(MINILM, task=kind, labels=labels)
        for number in range(place, count, len(HEADS)):
            method = methods[number // len(HEADS) % len(methods)]
            adapter = ah.attach(model, method, name="saved")
            with torch.no_grad():
                for parameter in adapter.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
            adapter.save(folders[number])
            adapter.detach()
    return list(map(str, folders))


def ask(engine: Any, adapters: Sequence[Any], texts: Sequence[str], clients: int) -> None:
    """Ask for an answer to each text, from several threads."""
    left, chosen = list(texts), random.Random(0)
    drawn = [chosen.choice(adapters) for _ in texts]
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                text, adapter = left.pop(), drawn[len(left)]
            engine.submit(adapter, text).result()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def offline() -> Callable[[Sequence[str]], Any]:
    """Return the passes of the backbone alone, in batches of the size that is fastest here."""
    model, tokenizer = ah.load_backbone(MINILM)
    kept: dict[int, list[Any]] = {}

    def batches(texts: Sequence[str], rows: int) -> list[Any]:
        ordered = sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"]))
        return [
            tokenizer(ordered[n : n + rows], padding=True, return_tensors="pt")
            for n in range(0, len(ordered), rows)
        ]

    def run(some: list[Any]) -> float:
        start = time.process_time()
        with torch.inference_mode():
            for batch in some:
                model(**batch)
        return time.process_time() - start

    def answer(texts: Sequence[str]) -> None:
        if not kept:
            tried = {rows: batches(texts, rows) for rows in BATCHES}
            best = min(tried, key=lambda rows: min(run(tried[rows]) for _ in range(2)))
            kept[best] = tried[best]
            print(f"offline: {best} rows at once")
        run(*kept.values())

    return answer


def one_by_one(adapters: Sequence[str]) -> Callable[[Sequence[str]], Any]:
    """Return one prediction after the other, each with its adapter activated."""
    opened = open_several({each: AdapterSource(each) for each in adapters}, MINILM)

    def answer(texts: Sequence[str]) -> None:
        chosen = random.Random(0)
        for text in texts:
            name = chosen.choice(adapters)
            predictor = opened.predictors[name]
            opened.predict(name, [predictor.task.example([text], predictor.data)])

    return answer


def measure(options: argparse.Namespace, variants: Variants) -> dict[str, dict[str, float]]:
    """Time the variants in turns, each on the same texts."""
    texts = [" ".join(e.text.split()[:WORDS]) for e in load_docstrings()[0]]
    texts = random.Random(0).sample(texts, options.requests)
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(options.runs + 1):
        for name, answer in variants.items():
            start = time.perf_counter(), time.process_time()
            answer(texts)
            if turn:  # the first one warms up
                wall[name].append(time.perf_counter() - start[0])
                processor[name].append(time.process_time() - start[1])
    count = len(texts)
    return {
        name: {
            "per second": round(count / statistics.median(wall[name]), 1),
            "processor ms each": round(1000 * statistics.median(processor[name]) / count, 3),
            "fastest turn per second": round(count / min(wall[name]), 1),
        }
        for name in variants
    }


if __name__ == "__main__":
    main()
