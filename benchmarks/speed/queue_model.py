"""Simulate the queue of a server, to see which latencies its batches alone would give.

    python benchmarks/speed/queue_model.py

Requests with the lengths of docstrings come at the moments of a Poisson process. The engine's own
`choose_batch` chooses the batches, and a pass takes a fixed time and a time for each position, as
measured for all-MiniLM-L6-v2. There is no HTTP, no interpreter and no noise here, so a server
cannot have a smaller ratio of the 99th percentile to the median with these batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from serving import MINILM, WORDS

import adapterhub as ah
from adapterhub.data.docstrings import load_docstrings
from adapterhub.serving.shared_backbone import BatchLimits, RequestSize, choose_batch

FIXED, POSITION = 20, 0.26e-3  # of a pass, in positions; seconds of a position
LIMITS = BatchLimits(10 * FIXED, FIXED)
Arrival = tuple[float, int]  # when it comes, and its tokens


def seconds_of(batch: Sequence[Arrival]) -> float:
    """Return what a pass takes."""
    return POSITION * (FIXED + len(batch) * max(tokens for _, tokens in batch))


def served(waiting: list[Arrival]) -> list[Arrival]:
    """Take the requests of a batch out of those that wait."""
    chosen = choose_batch([RequestSize(1, n, n) for _, n in waiting], LIMITS)
    batch = [waiting[number] for number in chosen]
    for number in sorted(chosen, reverse=True):
        del waiting[number]
    return batch


def capacity(lengths: Sequence[int], clients: int = 32, count: int = 4000) -> float:
    """Return requests per second of clients that ask again when they are answered."""
    drawn, now, done = random.Random(0), 0.0, 0
    waiting = [(now, drawn.choice(lengths)) for _ in range(clients)]
    while done < count:
        batch = served(waiting)
        now += seconds_of(batch)
        done += len(batch)
        waiting += [(now, drawn.choice(lengths)) for _ in batch]
    return done / now


def latencies(lengths: Sequence[int], rate: float, count: int = 20_000) -> Iterator[float]:
    """Yield the seconds of requests at random moments."""
    drawn, due = random.Random(1), 0.0
    coming: list[Arrival] = []
    for _ in range(count):
        due += drawn.expovariate(rate)
        coming.append((due, drawn.choice(lengths)))
    coming.reverse()
    now, waiting = 0.0, list[Arrival]()
    while coming or waiting:
        now = now if waiting else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            waiting.append(coming.pop())
        batch = served(waiting)
        now += seconds_of(batch)
        yield from (now - came for came, _ in batch)


def main() -> None:
    """Print the percentiles at shares of the capacity."""
    _, tokenizer = ah.load_backbone(MINILM)
    texts = [" ".join(e.text.split()[:WORDS]) for e in load_docstrings()[0]]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    most = capacity(lengths)
    print(f"capacity {most:.0f} a second")
    for share in (0.5, 0.8, 0.9):
        found = sorted(latencies(lengths, share * most))
        median, late = (1000 * found[int(q * len(found))] for q in (0.5, 0.99))
        print(f"{share:.0%}: p50 {median:.0f} ms, p99 {late:.0f} ms, ratio {late / median:.1f}")


if __name__ == "__main__":
    main()
