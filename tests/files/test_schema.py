"""Checks list every problem of an untrusted value; the parser accepts standard JSON only."""

from __future__ import annotations

import pytest

from adapterhub.files import schema

CHECK = schema.record(
    {
        "name": schema.text("[a-z]+", "a word"),
        "size": schema.integer(1, 9),
        "tags": schema.sequence(schema.text("[a-z]+", "a word", null=True), 0, 2),
        "scores": schema.mapping(schema.text("[a-z]+", "a word"), schema.number),
        "flag": schema.boolean,
        "free": schema.free,
    }
)
VALID = {"name": "a", "size": 1, "tags": ["b", None], "scores": {"f": 0.5}, "flag": True,
         "free": {"a": [1]}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "A"}, "at.name: 'A' is not a word"),
        ({"name": None}, "at.name: None is not a word"),
        ({"size": True}, "at.size: True is not a whole number from 1 to 9"),
        ({"size": 10}, "at.size: 10 is not a whole number from 1 to 9"),
        ({"tags": ["a"] * 3}, "at.tags: not a list of 0 to 2 items"),
        ({"tags": ["a", 1]}, "at.tags[1]: 1 is not a word"),
        ({"scores": {"f": float("nan")}}, "at.scores.f: nan is not a finite number"),
        ({"scores": {"F": 1}}, "at.scores: 'F' is not a word"),
        ({"flag": 1}, "at.flag: 1 is not true or false"),
        ({"free": {"a": "/home/ann"}}, "at.free.a: '/home/ann' contains an absolute path"),
        ({"later": 1}, "at.later: unknown, it needs a newer adapterhub"),
    ],
)
def test_each_problem_is_named_by_its_path(change: dict[str, object], problem: str) -> None:
    assert CHECK("", VALID) == CHECK("", VALID | {"later": None}) == []
    (line,) = CHECK("at", VALID | change)
    assert line.startswith(problem)


def test_every_problem_is_listed_and_many_are_counted() -> None:
    problems = CHECK("", {"name": 1, "later": 2})
    assert len(problems) == len(VALID) + 1
    assert "size: missing" in problems
    assert schema.shorten(["a", "b"]) == ["a", "b"]
    lines = schema.shorten([str(i) for i in range(75)])
    assert lines[-2:] == ["49", "and 25 more"]


def test_messages_have_no_control_characters() -> None:
    assert schema.show("\x1b[2J") == "'\\x1b[2J'"
    assert len(schema.show("x" * 500)) == 82
    assert schema.at("a", "b c\n") == "a.'b c\\n'"
