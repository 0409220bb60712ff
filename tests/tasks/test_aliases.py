"""Other names of tasks."""

from __future__ import annotations

import pytest

from adapterhub.errors import ConfigError
from adapterhub.tasks import TASKS, dump_task, parse_task, task_class
from adapterhub.tasks.common.base import ALIASES, aliases_of, resolve_alias


def test_each_alias_is_a_task_with_its_options():
    assert len(ALIASES) > 30
    assert not ALIASES.keys() & TASKS.keys()
    for alias, (name, options) in ALIASES.items():
        task = parse_task(alias)
        assert task.name == name
        assert {key: getattr(task, key) for key in options} == options
        assert alias in aliases_of(name)


@pytest.mark.parametrize(
    ("spec", "normal"),
    [
        ("qa", "question-answering"),
        ("NER", "tagging"),
        ("question_answering(stride=32)", "question-answering(stride=32)"),
        ("summarization(beams=4)", "seq2seq(metric=rouge, beams=4)"),
        ("translation(metric=exact)", "seq2seq(metric=exact)"),
        ({"chat": {"pack": True}}, "causal-lm(data=chat, pack=true)"),
    ],
)
def test_the_normal_form_has_the_name_of_the_task(spec, normal):
    assert dump_task(parse_task(spec)) == dump_task(parse_task(normal))


def test_names_without_an_alias_stay():
    assert resolve_alias("classification") == ("classification", {})
    assert task_class("sft") is TASKS["causal-lm"]


def test_an_unknown_name_suggests_names_and_aliases():
    with pytest.raises(ConfigError, match=r"did you mean 'summarization'") as error:
        parse_task("sumarization")
    assert "summarization" not in error.value.expected
    assert "seq2seq" in error.value.expected
