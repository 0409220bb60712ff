"""The memory of a stream while 10 million rows pass: generated, read in blocks, and encoded.

    python benchmarks/streaming_memory.py --measure
    python benchmarks/streaming_memory.py --measure --rows 100000 --encoded 20000

Parquet shards of short rows are written first. `reading` is what a run does before its tokenizer:
shards in turn, blocks of 10,000 rows, a check of each cell. `batches` adds what a run does up to
the model: MiniLM's tokenizer, batches of 32 rows. RSS is the memory of the process then, `peak` its
highest so far.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import records

SHARDS = 40
GROUP = 50_000  # rows of a row group
POINTS = (0.1, 0.5, 1.0)
WORDS = (
    "the",
    "movie",
    "film",
    "plot",
    "was",
    "is",
    "good",
    "great",
    "fine",
    "bad",
    "poor",
    "dull",
)


def write_rows(folder: Path, rows: int) -> None:
    """Write rows of four to twelve words with one of two classes, into `SHARDS` files."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        with pq.ParquetWriter(
            folder / f"part-{shard:03}.parquet",
            pa.schema([("text", pa.string()), ("label", pa.string())]),
        ) as file:
            left = rows // SHARDS
            while left:
                count = min(left, GROUP)
                lengths = random.integers(4, 13, count)
                words = iter(random.integers(0, len(WORDS), int(lengths.sum())).tolist())
                texts = [" ".join(WORDS[next(words)] for _ in range(n)) for n in lengths]
                labels = [("no", "yes")[n] for n in random.integers(0, 2, count)]
                table = pa.table({"text": texts, "label": labels})
                file.write_table(table, row_group_size=GROUP)
                left -= count


def megabytes() -> tuple[float, float]:
    """Return the memory of this process now, and its peak."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    now = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return round(now, 1), round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)


def watched(name: str, counts: Iterable[int], total: int) -> dict[str, Any]:
    """Let rows pass until `total` of them have; record memory on the way, and the rate."""
    start, seen, points = time.perf_counter(), 0, list(POINTS)
    found: dict[str, Any] = {"rows": total, "memory_mb": {}}
    for count in counts:
        seen += count
        while points and seen >= points[0] * total:
            now, peak = megabytes()
            share = f"{points.pop(0):.0%}"
            found["memory_mb"][share] = {"rss": now, "peak": peak}
            print(
                f"{name}: {share:>4} of {total:,} rows, RSS {now:,} MB, peak {peak:,} MB",
                flush=True,
            )
        if not points:
            break
    found["rows_per_second"] = round(seen / (time.perf_counter() - start))
    print(f"{name}: {found['rows_per_second']:,} rows/s", flush=True)
    return found


def measure(folder: Path, rows: int, encoded: int) -> None:
    """Write the rows, let them pass, and write the record."""
    from transformers import AutoTokenizer

    from adapterhub.backbones.find import find_backbone
    from adapterhub.data.options import DataOptions
    from adapterhub.data.row_stream import BlockReader, Cursor
    from adapterhub.recipe.recipe import RunOptions
    from adapterhub.tasks import Setting, parse_task
    from adapterhub.training.stream import BUFFER, StreamBatches, open_examples, stream_rows

    write_rows(folder, rows)
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    print(f"{rows:,} rows in {SHARDS} files, {size / 1e6:,.0f} MB", flush=True)
    stream, _ = open_examples(
        f"{folder}/part-*.parquet", DataOptions(), parse_task("classification")
    )
    backbone, _ = find_backbone("sentence-transformers/all-MiniLM-L6-v2", None)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    start, _ = megabytes()
    print(f"before the first row: RSS {start:,} MB", flush=True)
    blocks = stream.blocks(BlockReader(BUFFER, seed=0), Cursor())
    record = {"files_mb": round(size / 1e6, 1), "start_mb": start, "cpus": os.cpu_count()}
    record["reading"] = watched("reading", (len(examples) for _, examples in blocks), rows)
    setting = Setting(tokenizer, 128, ("no", "yes"))
    options = RunOptions(batch_size=32, max_steps=encoded)
    batches = StreamBatches(stream_rows(stream, stream.task, setting), options)
    record["batches"] = watched("batches", sizes(batches), encoded)
    records.write("streaming_memory", record)


def sizes(batches: Any) -> Iterator[int]:
    """Yield the rows of each batch."""
    for number in range(len(batches)):
        yield len(batches[number]["labels"])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", required=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--encoded", type=int, default=1_000_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), chosen.rows, chosen.encoded)


if __name__ == "__main__":
    main()
