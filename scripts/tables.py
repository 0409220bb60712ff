"""Write the tables of README and docs that come from code or from records.

    python scripts/tables.py

A table is between `<!-- NAME: python benchmarks/SCRIPT.py --table -->` and `<!-- /NAME -->`; a
script with several has the name of one in front of `--table`. That of the defaults names
`adapterhub/recipe/options.py` instead.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path

from adapterhub.recipe.options import TABLE

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(<!-- ([\w-]+): "
    r"(?:python benchmarks/([\w/]+)\.py( \w+)? --table|adapterhub/recipe/options\.py) -->\n)"
    r".*?(<!-- /\2 -->)",
    re.DOTALL,
)


def pages() -> list[Path]:
    """List the pages that have such tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text(encoding="utf-8"))]


def written(page: str) -> str:
    """Return the text of a page with its tables as they are now."""
    return _BLOCK.sub(lambda m: f"{m[1]}{_table(m[3], m[4])}\n{m[5]}", page)


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
