"""The runs of a sweep and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError
from adapterhub.recipe.sweep import MOST_NAME, parse_sweep


def test_the_last_option_changes_fastest():
    runs = parse_sweep(["method=lora,pfeiffer", "train.learning_rate=1e-3,1e-4"])
    assert [run.words for run in runs] == [
        ("method=lora", "train.learning_rate=1e-3"),
        ("method=lora", "train.learning_rate=1e-4"),
        ("method=pfeiffer", "train.learning_rate=1e-3"),
        ("method=pfeiffer", "train.learning_rate=1e-4"),
    ]
    assert [run.name for run in runs][::3] == [
        "lora,learning_rate=1e-3",
        "pfeiffer,learning_rate=1e-4",
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("method=lora(rank=4, alpha=8),mam", ["lora(rank=4, alpha=8)", "mam"]),
        ("method=[prefix, lora],lora", ["[prefix, lora]", "lora"]),
        ("method={lora: {rank: 4, alpha: 8}}", ["{lora: {rank: 4, alpha: 8}}"]),
        ("data.text='a, b',c", ["'a, b'", "c"]),
        ("seed=0, 1 ,2", ["0", "1", "2"]),
        ("task=causal-lm(a=')'),x", ["causal-lm(a=')')", "x"]),
    ],
)
def test_commas_inside_brackets_and_quotes_belong_to_a_value(word, values):
    key = word.partition("=")[0]
    assert [run.words for run in parse_sweep([word])] == [(f"{key}={v}",) for v in values]


@pytest.mark.parametrize("word", ["method", "method=", "=lora", "method=lora,", "seed=,1"])
def test_an_option_without_values_is_refused(word):
    with pytest.raises(ConfigError, match="is not an option with values"):
        parse_sweep([word])


def test_repetitions_are_refused_all_at_once():
    with pytest.raises(ConfigError) as error:
        parse_sweep(["seed=0,0", "method=lora", "method=mam"])
    assert error.value.offenders == ("method is given twice", "seed has the value 0 twice")


def test_names_that_differ_only_in_odd_characters_are_numbered():
    names = [run.name for run in parse_sweep(["method=lora(rank=4),LORA[rank=4],lora/rank=4"])]
    assert names == ["lora-rank=4", "LORA-rank=4-2", "lora-rank=4-3"]


values = st.text(st.characters(exclude_characters="()[]{}'\",=", min_codepoint=33), min_size=1)


@given(st.lists(values, min_size=1, max_size=6, unique=True), st.integers(1, 3))
def test_every_name_is_the_plain_name_of_one_folder(texts, others):
    texts = list({text.strip(): None for text in texts if text.strip()}) or ["x"]
    seeds = ",".join(map(str, range(others)))
    runs = parse_sweep([f"data.text={','.join(texts)}", f"seed={seeds}"])
    names = [run.name for run in runs]
    assert len(runs) == len(texts) * others
    assert len({name.lower() for name in names}) == len(names)
    assert all(name.isascii() and "/" not in name and not name.startswith(".") for name in names)
    assert all(len(name) <= MOST_NAME + 4 for name in names)
