"""Have the Python reference link the errors in `Raises:`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_ERRORS = "adapterhub.errors"


class Errors(griffe.Extension):
    """Resolves the names of errors in modules that do not import them: what they call raises."""

    def __init__(self) -> None:
        super().__init__()
        source = Path(__file__).parents[2].joinpath("adapterhub/errors.py").read_text("utf-8")
        self.errors = re.findall(r"^class (\w+Error)", source, re.MULTILINE)

    def on_module_instance(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add the errors to the names of a module."""
        if mod.path != _ERRORS:
            for name in self.errors:
                mod.set_member(name, griffe.Alias(name, f"{_ERRORS}.{name}"))
