"""What is computed, one file per method; one that registers a method is all a new one needs.

Modules with a leading underscore hold shared code. No hooks, files or training loops here.
"""

import importlib
import pkgutil

from adapterhub.methods._base import (
    METHODS,
    Method,
    Placement,
    StageSchedule,
    Unfrozen,
    method_class,
)

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Method", "Placement", "StageSchedule", "Unfrozen", "method_class"]
