"""Methods: one file each. A file that defines and registers a method is all that
a new one needs."""

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
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Method", "Placement", "StageSchedule", "Unfrozen", "method_class"]
