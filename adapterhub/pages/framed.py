"""Pages of several runs: sortable tables, groups of charts, and one script, by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from markupsafe import Markup

from adapterhub.pages.page import render_template
from adapterhub.pages.sections import Chart


@dataclass(frozen=True)
class ChartGroup:
    """Charts of one kind, with a title and a sentence; `wide` ones have names in them."""

    title: str
    note: str
    charts: Sequence[Chart]
    wide: bool = False


def framed_page(template: str, **values: Any) -> str:
    """Return a page that is built from `frame.html`.

    Its script runs by the hash in the page's Content-Security-Policy, so no other script can.

    Args:
        template: the name of a file in this room.
        values: what it shows.
    """
    script = resources.files("adapterhub.pages").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render_template(
        template, script=Markup(script), script_hash=Markup(f"sha256-{digest}"), **values
    )
