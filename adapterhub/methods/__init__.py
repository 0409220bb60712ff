"""Adapter methods, one file each; a new method only needs a file that registers it.

The docstring of a file becomes the page of its method: the equation first, then symbols and
choices, a paragraph `Parameters: ...`, and the source last. `common/` holds
shared code. No hooks, files or training loops here.
"""

from adapterhub.methods.common.base import (
    METHODS,
    Method,
    Placement,
    StageSchedule,
    Unfrozen,
    method_class,
)

__all__ = ["METHODS", "Method", "Placement", "StageSchedule", "Unfrozen", "method_class"]
