"""The maximum length that a sentence encoder was trained with, from its own configuration."""

from __future__ import annotations

import json
from pathlib import Path

_CONFIG = "sentence_bert_config.json"


def trained_length(folder: Path) -> int | None:
    """Return the `max_seq_length` that sentence-transformers recorded, or None if there is none."""
    try:
        recorded = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["max_seq_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return recorded if isinstance(recorded, int) and recorded > 0 else None
