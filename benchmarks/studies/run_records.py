"""The records of a study that has a script of its own: a line for each run, kept in its folder.

FOLDER/records.jsonl      as they come
FOLDER/records.jsonl.gz   of a study that is kept in this repository
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunRecords:
    """The records in a folder."""

    folder: Path

    def read(self) -> list[dict[str, Any]]:
        """Return all records, first the packed ones."""
        packed, single = self.folder / "records.jsonl.gz", self.folder / "records.jsonl"
        lines = gzip.decompress(packed.read_bytes()).decode() if packed.is_file() else ""
        lines += single.read_text() if single.is_file() else ""
        return [json.loads(line) for line in lines.splitlines()]

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "records.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")

    def pack(self) -> Path:
        """Put all records into the packed file, and return it."""
        lines = "".join(json.dumps(record) + "\n" for record in self.read())
        target = self.folder / "records.jsonl.gz"
        target.write_bytes(gzip.compress(lines.encode(), mtime=0))
        (self.folder / "records.jsonl").unlink(missing_ok=True)
        return target


def study_parser(text: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of a study's script, and that of its command `train`.

    Args:
        text: what the script does.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("glue", type=Path)
    training.add_argument("--output", dest="folder", type=Path, required=True)
    training.add_argument("--seeds", type=int, default=3)
    training.add_argument("--steps", type=int, default=150)
    for name in ("table", "pack"):
        commands.add_parser(name).add_argument("folder", type=Path)
    return parser, training
