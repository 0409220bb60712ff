"""What is computed, one file per method; one that registers a method is all a new one needs.

Modules with a leading underscore hold shared code. No hooks, files or training loops here.
"""

from adapterhub.methods._base import (
    METHODS,
    Method,
    Placement,
    StageSchedule,
    Unfrozen,
    method_class,
)

__all__ = ["METHODS", "Method", "Placement", "StageSchedule", "Unfrozen", "method_class"]
