"""Places of virtual tokens among the caller's: behind padding, or in front of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapterhub.hooks.prompt import VirtualTokenBatch, arranged, gathered, pad_left

MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])


def batch(length=2, padding=None, skips=True):
    padding = None if padding is None else torch.tensor(padding)[:, None]
    return VirtualTokenBatch(torch.zeros(1, length, 3), padding, skips)


def row(virtual, mask=MASK, padding_last=False):
    """Return the arranged tokens of each row: p for the prompt, letters for the text."""
    places = virtual.places(4, virtual.lead(mask), padding_last)
    names = torch.arange(virtual.length + 4)[None].expand(2, -1)
    letters = "pqrs"[: virtual.length] + "abcd"
    return ["".join(letters[n] for n in numbers) for numbers in arranged(names, places)]


def test_a_prompt_is_next_to_its_text(subtests):
    cases = [
        (batch(), False, ["abpqcd", "pqabcd"]),
        (batch(skips=False), False, ["pqabcd", "pqabcd"]),
        (batch(skips=torch.tensor([[False], [True]])), False, ["pqabcd", "pqabcd"]),
        (batch(padding=[1, 0]), False, ["abpqcd", "pqabcd"]),
        (batch(padding=[1, 0]), True, ["abqcdp", "pqabcd"]),
        (batch(padding=[2, 1], skips=False), True, ["abcdpq", "qabcdp"]),
    ]
    for number, (virtual, padding_last, rows) in enumerate(cases):
        with subtests.test(number=number):
            assert row(virtual, padding_last=padding_last) == rows
            places = virtual.places(4, virtual.lead(MASK), padding_last)
            if places is not None:
                text = gathered(arranged(torch.arange(6)[None], places), places[:, 2:])
                assert text.tolist() == [[2, 3, 4, 5]] * len(text)


def test_without_mask_and_padding_nothing_moves():
    assert batch().places(4, batch().lead(None), padding_last=True) is None
    assert batch().lead(torch.ones(2, 1, 4, 4)) is None


def test_the_mask_shows_the_prompt_and_hides_its_padding():
    virtual = batch(padding=[1, 0])
    places = virtual.places(4, virtual.lead(MASK), padding_last=False)
    assert virtual.widen(MASK, places).tolist() == [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_over_pairs(additive):
    """Text sees the prompt, the prompt sees itself, and padding of a prompt is seen by itself."""
    mask = torch.eye(2, dtype=torch.bool)[None, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    virtual = replace(batch(padding=[1, 0]), tokens=torch.zeros(2, 2, 3))
    widened = virtual.widen_pairs(mask, entering=True)
    assert widened.dtype == mask.dtype
    assert widened.shape == (2, 1, 4, 4)
    seen = widened == 0 if additive else widened
    assert seen[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert seen[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    later = virtual.widen_pairs(mask, entering=False)
    assert torch.equal(later, widened[:, :, 2:])


@pytest.mark.parametrize("past", [0, 2])
def test_a_mask_over_pairs_in_a_sliding_window(past):
    """As if the virtual tokens were the first of a longer text."""
    length, tokens, window = 2, 5, 4
    whole = torch.ones(length + tokens, length + tokens).tril().triu(1 - window).bool()
    mask = whole[length + past :, length:][None, None]
    virtual = VirtualTokenBatch(torch.zeros(1, length, 3), None)
    assert torch.equal(virtual.widen_pairs(mask, False, window)[0, 0], whole[length + past :])
    if not past:
        assert torch.equal(virtual.widen_pairs(mask, True, window)[0, 0], whole)


def test_positions_of_several_axes_move_along_the_last_dimension():
    places = torch.tensor([[1, 0, 2]])
    positions = torch.tensor([[[5, 6, 7]], [[1, 2, 3]]])
    assert arranged(positions, places, dim=-1).tolist() == [[[6, 5, 7]], [[2, 1, 3]]]


def test_shorter_prompts_are_padded_on_the_left():
    rows, counts = pad_left([torch.ones(1, 3), torch.ones(2, 3)], [2, 1])
    assert [tuple(r.shape) for r in rows] == [(2, 2, 3), (1, 2, 3)]
    assert rows[0][:, 0].sum() == 0
    assert [c.tolist() for c in counts] == [[[1], [1]], [[0]]]
    assert pad_left([torch.ones(2, 3)] * 2, [1, 1])[1] is None
