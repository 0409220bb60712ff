"""Every kind of peft checkpoint gives equal logits in both libraries, or is refused.

`make interchange` runs all cells and writes the table of docs/guides/interchange.md; by default
one model of each kind runs.
"""

import pytest

from tests.kit import peft_differential, tiny_models
from tests.kit.peft_differential import DIRECTIONS, KINDS, MASKS, Differential, tasks
from tests.kit.selection import long_table

MODELS = [(a, task) for a in tiny_models.ARCHITECTURES for task in tasks(a)]
SOME = [
    ("bert", "tagging"),
    ("gpt2", "causal-lm"),
    ("bart", "seq2seq"),
    ("llama", "classification"),
]
ALL_CELLS = [(kind, *model) for model in MODELS for kind in KINDS]
CELLS = [(kind, *SOME[i % len(SOME)]) for i, kind in enumerate(KINDS)]
if tiny_models.FULL_MATRIX:
    CELLS = ALL_CELLS


def test_every_architecture_and_kind_is_compared():
    assert {architecture for architecture, _ in MODELS} == set(tiny_models.ARCHITECTURES)
    assert len(tiny_models.ARCHITECTURES) >= 37
    assert len(MODELS) >= 71
    assert len(KINDS) >= 19
    assert set(CELLS) <= set(ALL_CELLS)


@long_table(("kind", "architecture", "task"), CELLS, 6)
def test_equal_or_refused(tmp_path, record_property, kind, architecture, task):
    outcomes = Differential(kind, architecture, task, tmp_path).run()
    for (direction, side), outcome in outcomes.items():
        cell = [kind, architecture, task, direction, side, outcome.word, outcome.reason]
        record_property(peft_differential.PROPERTY, cell)
    assert {cell: o.reason for cell, o in outcomes.items() if o.word == "wrong"} == {}


EQUAL = [
    *(("prompt", *model) for model in (("gpt2", "classification"), ("llama", "causal-lm"),
                                       ("roberta", "tagging"), ("mpnet", "tagging"),
                                       ("t5", "seq2seq"))),
    *(("prefix", *model) for model in (("roberta", "classification"), ("opt", "causal-lm"),
                                       ("gpt2", "classification"), ("bert", "tagging"))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "architecture", "task"), EQUAL)
def test_virtual_tokens_are_equal_whatever_the_padding(tmp_path, kind, architecture, task):
    """Each model counts positions in another way, and finds padding in another place."""
    outcomes = Differential(kind, architecture, task, tmp_path).run()
    assert {outcome.word for outcome in outcomes.values()} == {"equal"}


@pytest.mark.skipif(tiny_models.FULL_MATRIX, reason="the table is written after the tests")
def test_the_documented_table_has_every_cell_and_no_wrong_one():
    documented = peft_differential.documented_counts()
    assert documented.keys() == set(KINDS)
    for kind, counts in documented.items():
        for direction, count in zip(DIRECTIONS, counts, strict=True):
            assert sum(count) == len(MODELS) * len(MASKS), (kind, direction)
            assert count[-1] == 0, (kind, direction)
