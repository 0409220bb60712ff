"""Processes that publish to one registry at the same time: is any publication lost?

    python benchmarks/racing_publishers.py s3://bucket/race --processes 8 --each 125

Works on a folder or a bucket. Each process publishes its own adapters, all with other bytes, under
the same few names. In the end every publication must be there, under a version of its own, and
verified.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapterhub.files.native import MANIFEST_FILE, Saved
from adapterhub.registry.local import registry_at
from adapterhub.registry.store import Publication
from tests.kit import registries


def publish(registry: str, process: int, each: int, names: int) -> list[tuple[str, str, str]]:
    """Publish some adapters, and return the name, the version and the digest of each.

    Args:
        registry: a folder or a URL.
        process: the number of this process.
        each: how many.
        names: under how many names.
    """
    store, published = registry_at(registry), []
    with TemporaryDirectory() as folder:
        for number in range(each):
            made = registries.write_sample(Path(folder) / str(number), process * each + number)
            assert (made / MANIFEST_FILE).is_file()
            name = f"race-{number % names}"
            entry = store.put(made, Publication(name))
            published.append((name, entry.version, Saved.at(made).digest))
    return published


def main() -> None:
    """Race, and print what was published and what was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("registry")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--each", type=int, default=125)
    parser.add_argument("--names", type=int, default=20)
    options = parser.parse_args()
    start = time.perf_counter()
    jobs = [(options.registry, p, options.each, options.names) for p in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        published = [row for rows in pool.starmap(publish, jobs) for row in rows]
    seconds = time.perf_counter() - start
    store = registry_at(options.registry)
    found = {
        (entry.name, entry.version): entry.digest
        for name in {name for name, _, _ in published}
        for entry in store.versions(name)
    }
    shared = [at for at, n in Counter((n, v) for n, v, _ in published).items() if n > 1]
    lost = [row for row in published if found.get(row[:2]) != row[2]]
    print(
        f"{len(published):,} published by {options.processes} processes under {options.names} "
        f"names in {seconds:.0f} s; lost {len(lost)}, versions shared {len(shared)}, "
        f"problems {len(store.verify())}"
    )


if __name__ == "__main__":
    main()
