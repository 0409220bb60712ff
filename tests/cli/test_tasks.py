"""`adapterhub tasks`."""

from __future__ import annotations

import json

from adapterhub.tasks import TASKS
from tests.kit.session import succeeded


def test_tasks_lists_the_registry(adapterhub):
    out = succeeded(adapterhub("tasks"))
    assert all(f" {name} " in out for name in TASKS)
    code, out, _ = adapterhub("tasks", "seq2seq")
    assert "bleu, rouge or exact" in out
    code, out, _ = adapterhub("tasks", "--json")
    assert json.loads(out).keys() == TASKS.keys()


def test_a_task_is_shown_by_any_of_its_names(adapterhub):
    out = succeeded(adapterhub("tasks", "ner"))
    assert out.startswith("tagging: ")
    assert "also called ner, token-classification" in out
