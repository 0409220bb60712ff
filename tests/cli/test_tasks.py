"""`adapterhub tasks`."""

from __future__ import annotations

import json

from adapterhub.tasks import TASKS


def test_tasks_lists_the_registry(adapterhub):
    code, out, _ = adapterhub("tasks")
    assert code == 0
    assert all(f" {name} " in out for name in TASKS)
    code, out, _ = adapterhub("tasks", "seq2seq")
    assert "bleu, rouge or exact" in out
    code, out, _ = adapterhub("tasks", "--json")
    assert json.loads(out).keys() == TASKS.keys()


def test_a_task_is_shown_by_any_of_its_names(adapterhub):
    code, out, _ = adapterhub("tasks", "ner")
    assert code == 0
    assert out.startswith("tagging: ")
    assert "also called ner, token-classification" in out
