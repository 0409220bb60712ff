"""Write the tables of docs/guides/defaults.md: the code's defaults, and their records."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from adapterhub.training.defaults import TABLE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/defaults.md"
sys.path.append(str(ROOT / "benchmarks"))


def table() -> str:
    """Return the rows of the table of defaults."""
    lines, above = [], 0
    for entry in TABLE:
        last = math.isinf(entry.rows)
        span = f"more than {above:,}" if last else f"up to {entry.rows:,}"
        lines.append(f"| {span} | {entry.batch_size} | {entry.steps} | {entry.epochs} |")
        above = 0 if last else int(entry.rows)
    return "\n".join(["| training rows | batch size | steps, at least | epochs, at least |",
                      "|---|---|---|---|", *lines])  # fmt: skip


def written(page: str) -> str:
    """Return the page with both tables as they are now."""
    import defaults

    for marker, content in (("table", table()), ("records", defaults.table())):
        block = rf"(<!-- {marker}: .*? -->\n).*?(<!-- /{marker} -->)"
        page = re.sub(block, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", page, flags=re.S)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
