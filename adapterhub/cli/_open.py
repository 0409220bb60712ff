"""Open a page in the user's browser, where there is one."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from adapterhub.cli._format import say


def open_page(page: Path) -> None:
    """Open a page in the browser; on a remote machine or without a display, say why not."""
    if not has_display(os.environ, sys.platform):
        say("no browser here: copy the file to your machine and open it there", err=True)
    elif not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found: open the file yourself", err=True)


def has_display(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser would show up in front of the user."""
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return False
    return platform in ("win32", "darwin") or bool(
        environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    )
