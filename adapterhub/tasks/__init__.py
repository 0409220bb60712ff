"""Tasks: one file each. A file that defines and registers a task is all that a new one needs."""

import importlib
import pkgutil

from adapterhub.tasks._base import (
    TASKS,
    Encoded,
    Prediction,
    Setting,
    Task,
    dump_task,
    parse_task,
    task_class,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "TASKS",
    "Encoded",
    "Prediction",
    "Setting",
    "Task",
    "dump_task",
    "parse_task",
    "task_class",
]
