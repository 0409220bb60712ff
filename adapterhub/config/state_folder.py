"""The folder of what adapterhub remembers for a user: no settings, and no secrets."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path

STATE_VARIABLE = "ADAPTERHUB_STATE"


def state_folder() -> Path:
    """Return `$ADAPTERHUB_STATE`, or else the user's state folder."""
    folder = os.environ.get(STATE_VARIABLE)
    return Path(folder) if folder else user_state_path("adapterhub", appauthor=False)
