"""Layer selections."""

from __future__ import annotations

import pytest

from adapterhub.anatomy.sites import layer_numbers, number_ranges
from adapterhub.errors import SiteError


def test_a_selection_of_six_layers(subtests):
    cases = [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("top 2", [4, 5]),
        ("top 9", [0, 1, 2, 3, 4, 5]),
        ("first 2", [0, 1]),
        ("first 0", []),
        ("1..3", [1, 2, 3]),
        (" 4 ", [4]),
        (5, [5]),
        ((0, 5), [0, 5]),
    ]
    for layers, numbers in cases:
        with subtests.test(layers=layers):
            assert sorted(layer_numbers(layers, 6)) == numbers


def test_a_bad_selection_is_refused(subtests):
    cases = [
        ("0..6", "'0..6' do not exist"),
        ("0..999999999", "do not exist"),
        ((0, 6, -1), r"\[-1, 6\] do not exist"),
        ("6", r"\[6\] do not exist"),
        ("last", "cannot parse layers 'last'"),
        ("top ten", "cannot parse"),
        ("", "cannot parse"),
    ]
    for layers, problem in cases:
        with subtests.test(layers=layers):
            with pytest.raises(SiteError, match=f"{problem}.* in a stack of 6 layers") as error:
                layer_numbers(layers, 6)
            assert "top 4" in error.value.expected


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0..2, 5, 7..8"), ({2, 1, 0}, "0..2")],
)
def test_numbers_are_written_with_ranges(numbers, text):
    assert number_ranges(numbers) == text
