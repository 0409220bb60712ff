"""Write the tables of README and docs that come from code or from records, and the counts.

    python scripts/tables.py

A table is between `<!-- NAME: python benchmarks/SCRIPT.py --table -->` and `<!-- /NAME -->`; a
script with several has the name of one in front of `--table`. That of the defaults names
`adapterhub/recipe/recipe.py` instead. A number of methods, tasks and the like is between
`<!-- count: NAME -->` and `<!-- /count -->`, in a line, with a NAME of `COUNTS`;
tests/test_claims.py finds those that are written by hand.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import TABLE

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(<!-- ([\w-]+): "
    r"(?:python benchmarks/([\w/]+)\.py( \w+)? --table|adapterhub/recipe/options\.py) -->\n)"
    r".*?(<!-- /\2 -->)",
    re.DOTALL,
)


_COUNT = re.compile(r"(<!-- count: ([\w -]+) -->).*?(<!-- /count -->)")


def pages() -> list[Path]:
    """List the pages that have such tables or counts."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in found}
    return [page for page, text in texts.items() if _BLOCK.search(text) or _COUNT.search(text)]


def written(page: str) -> str:
    """Return the text of a page with its tables and counts as they are now."""
    return counted(_BLOCK.sub(lambda m: f"{m[1]}{_table(m[3], m[4])}\n{m[5]}", page))


def counted(page: str) -> str:
    """Return the text of a page with its counts as they are now."""
    return _COUNT.sub(lambda m: f"{m[1]}{COUNTS[m[2]]():,}{m[3]}", page)


def _kinds_of_peft() -> int:
    from peft import PeftType  # which takes seconds, and is not in each environment

    return len(PeftType)


def _attached(row: str) -> Callable[[], int]:
    """Return a function that counts the types of transformers in the table of `make sweep`."""

    def count() -> int:
        sweep = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
        pattern = r"^(\d+) types were built" if row == "types" else rf"^\| {row} \| (\d+) \|"
        found = re.search(pattern, sweep, re.MULTILINE)
        assert found, row
        return int(found[1])

    return count


COUNTS: dict[str, Callable[[], int]] = {
    "methods": lambda: len(METHODS),
    "kinds of peft": _kinds_of_peft,
    "types": _attached("types"),
    "types with lora": _attached("lora"),
    "types with peft": _attached("peft"),
    "types with peft all-linear": _attached("peft all-linear"),
}
"""What pages may count; other numbers of methods, tasks and the like are not written."""


def _table(script: str | None, name: str | None) -> str:
    """Return a table of a benchmark; without a script, that of the defaults."""
    if script is None:
        return defaults()
    if (folder := str(ROOT / "benchmarks")) not in sys.path:
        sys.path.insert(0, folder)
    names = [name.strip()] if name else []
    table: str = importlib.import_module(script.replace("/", ".")).table(*names)
    return table


def defaults() -> str:
    """Return the rows of the table of defaults."""
    lines, above = [], 0
    for entry in TABLE:
        last = math.isinf(entry.rows)
        span = f"more than {above:,}" if last else f"up to {entry.rows:,}"
        lines.append(f"| {span} | {entry.batch_size} | {entry.steps} | {entry.epochs} |")
        above = 0 if last else int(entry.rows)
    return "\n".join(["| training rows | batch size | steps, at least | epochs, at least |",
                      "|---|---|---|---|", *lines])  # fmt: skip


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
