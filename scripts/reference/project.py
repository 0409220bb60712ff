"""The pages of the repository's root: how to contribute, and what changed."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def pages() -> dict[str, str]:
    """Return these pages, with links that are relative to docs/."""
    return {
        path: re.sub(r"\]\(docs/", "](", (_ROOT / name).read_text(encoding="utf-8"))
        for path, name in _PAGES.items()
    }
