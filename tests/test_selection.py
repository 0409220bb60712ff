"""Long tables run in part, and that part is the same in every checkout."""

from __future__ import annotations

import itertools

import pytest

from tests.kit.selection import part_of


def test_a_part_has_the_first_case_and_each_value():
    cases = list(itertools.product("ab", range(8), ["x", "y", "z"]))
    part = part_of(cases)
    assert part == [case for case in cases if case in part]
    assert len(part) == 6
    assert part[0] == cases[0]
    assert {c[0] for c in part} == {*"ab"}
    assert len({c[1] for c in part}) == 6
    assert {c[2] for c in part} == {*"xyz"}


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 8, 9, 250])
def test_a_part_is_as_large_as_it_should_be_and_does_not_change(number, parts):
    cases = [pytest.param(str(i), [i], id=f"case {i}") for i in range(number)]
    part = part_of(cases, parts)
    assert len(part) == max(min(number, 1), number // parts)
    assert part == part_of(cases, parts)
    assert {id(case) for case in part} <= {id(case) for case in cases}
