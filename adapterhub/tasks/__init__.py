"""The tasks, one file each; a new task is one new file that registers it.

Each file defines, in this order: the example (an entry of the data), the prediction, the task's
options, and its four steps: examples from data, rows (model inputs) from examples, predictions from
the model's outputs, metrics from predictions. The docstring of the class becomes the page of the
task: it shows rows of data and a prediction. Training loops belong in training/.
"""

import importlib
import pkgutil

from adapterhub.tasks.common.base import (
    TASKS,
    Encoded,
    Prediction,
    Task,
    dump_task,
    parse_task,
    task_class,
)
from adapterhub.tasks.common.batches import Setting

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
