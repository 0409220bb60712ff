"""Compositions: names, stacks and averages, and their application to the rows of a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    AppliedModules,
    Average,
    BatchPlan,
    adapter_names,
    has_average,
    is_stack,
    localize,
    parse_composition,
)
from adapterhub.hooks.slot import Slot, through

STEPS = {"double": lambda y: 2 * y, "increment": lambda y: y + 1}


def apply(key, y):
    return STEPS[key](y)


def test_user_input_becomes_a_composition():
    assert parse_composition(None) == ()
    assert parse_composition("a") == "a"
    assert parse_composition(["a", ["b", "c"]]) == ("a", ("b", "c"))
    assert parse_composition(Average(["a"])) == Average(["a"])
    with pytest.raises(AttachError):
        parse_composition(3)


def test_weights_of_an_average_are_equal_by_default_and_sum_to_one():
    assert Average(["a", "b"]).weights == (0.5, 0.5)
    for parts, weights in (([], None), (["a"], [0.5]), (["a", "b"], [1.0])):
        with pytest.raises(AttachError):
            Average(parts, weights)


def test_names_are_listed_in_order_with_repetitions():
    node = parse_composition(["a", Average(["b", ("a", "c")])])
    assert list(adapter_names(node)) == ["a", "b", "a", "c"]


def test_averages_are_found_at_any_depth():
    assert has_average(("a", ("b", Average(["c"]))))
    assert not has_average(("a", ("b", "c")))


def test_a_stack_applies_its_modules_in_order():
    y = torch.tensor([3.0])
    assert through(("double", "increment"), y, apply).item() == 7
    assert through(("increment", "double"), y, apply).item() == 8
    assert through((), y, apply).item() == 3


def test_an_average_is_the_weighted_mean():
    node = Average(["double", ("increment", "double"), ()], [0.5, 0.25, 0.25])
    expected = 0.5 * 6 + 0.25 * 8 + 0.25 * 3
    assert through(node, torch.tensor([3.0]), apply).item() == expected


def test_localizing_replaces_adapters_by_their_modules_at_a_site():
    keys = {"a": ("a-0", "a-1"), "b": ("b-0",)}
    assert localize(("a", "missing", "b"), keys) == ("a-0", "a-1", "b-0")
    assert localize(Average(["a", "missing"]), keys) == Average([("a-0", "a-1"), ()])
    assert localize(Average(["missing"]), keys) == ()


def run(plan, step, y, *others, dim=0):
    slot = Slot()
    slot.active = AppliedModules(("a",), plan)
    slot.sites["a"] = SimpleNamespace(id="attn.q")
    return slot.run(step, y, *others, dim=dim)


def test_each_row_passes_through_its_own_composition():
    plan = BatchPlan(["double", (), "increment", "double"])
    assert plan.groups == ("double", (), "increment")
    y = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    offsets = torch.tensor([[10.0], [20.0], [30.0], [40.0]])

    def step(key, y, offset):
        return apply(key, y) + offset

    output = run(plan, step, y, offsets)
    assert output.tolist() == [[12.0], [2.0], [34.0], [48.0]]


def test_rows_can_be_in_another_dimension():
    plan = BatchPlan(["double", "increment"])
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    output = run(plan, apply, y, dim=1)
    assert output.tolist() == [[2.0, 3.0], [6.0, 5.0]]


def test_a_batch_can_repeat_each_row():
    """`generate` repeats rows for beams."""
    plan = BatchPlan(["double", "increment"])
    y = torch.arange(4.0)[:, None]
    output = run(plan, apply, y)
    assert output.flatten().tolist() == [0, 2, 3, 4]


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(AttachError) as error:
        run(BatchPlan(["a", "b"]), apply, torch.zeros(3, 1))
    assert "attn.q" in str(error.value)


def test_splitting_and_joining_restores_the_order():
    plan = BatchPlan(["a", "b", "a", "c"])
    rows = torch.arange(8)
    pieces = plan.split(rows, copies=2)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 4, 5], [2, 3], [6, 7]]
    assert torch.equal(plan.join(pieces, copies=2), rows)
    assert plan.split("an option", copies=2) == ["an option"] * 3


def test_a_stack_is_one_list_of_distinct_names_for_all_rows():
    assert is_stack([("a", "b"), ("a", "b")])
    assert not is_stack([("a", "b"), ("a",)])
    assert not is_stack([("a", "a")])
    assert not is_stack([Average(["a"])])
