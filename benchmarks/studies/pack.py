"""Pack the records of a study that is kept in this repository: a file for each task.

    python benchmarks/studies/pack.py FOLDER [NAME]

FOLDER is the output of `adapterhub bench`, which reads packs as it reads single records. What it
needed only while it ran, its checkpoints and claims, is deleted.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from pathlib import Path

from adapterhub.bench.records import PACK, RecordFolder
from adapterhub.bench.study import CLAIMS, RECORDS, WORK
from adapterhub.files.atomic import replace_file


def packed(folder: Path, name: str) -> Path:
    """Move all records into one pack, and return it: equal bytes for equal records."""
    lines = [record.to_json() for record in RecordFolder(folder).all()]
    singles, packs = list(folder.glob("*.json")), list(folder.glob(f"*{PACK}"))
    target = folder / f"{name}{PACK}"
    replace_file(target, gzip.compress("".join(lines).encode(), mtime=0))
    for path in (*singles, *packs):
        if path != target:
            path.unlink()
    return target


def main() -> None:
    """Pack the records, and print the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?", default="records")
    options = parser.parse_args()
    print(packed(options.folder / RECORDS, options.name))
    for name in (WORK, CLAIMS):
        shutil.rmtree(options.folder / name, ignore_errors=True)


if __name__ == "__main__":
    main()
