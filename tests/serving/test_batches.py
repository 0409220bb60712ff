"""Which requests share a batch: a pure function of their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapterhub.serving.batches import PADDING, RequestSize, choose_batch

lengths = st.integers(1, 200)
sizes = st.lists(lengths, min_size=1, max_size=4).map(
    lambda each: RequestSize(len(each), max(each), sum(each))
)
queues = st.lists(sizes, min_size=1, max_size=40)


def of_lengths(*each: int) -> list[RequestSize]:
    return [RequestSize(1, n, n) for n in each]


def test_the_oldest_and_those_of_its_length():
    assert choose_batch(of_lengths(10, 50, 9, 11, 100, 10), 1000) == [0, 5, 2, 3]


def test_lengths_that_add_too_much_padding_wait():
    assert choose_batch(of_lengths(10, 20), 1000) == [0]  # a quarter of 40 positions
    assert choose_batch(of_lengths(11, 20), 1000) == [0, 1]


def test_the_older_of_two_as_near_comes_first():
    assert choose_batch(of_lengths(10, 11, 9, 9), 22) == [0, 1]


def test_a_request_that_is_too_large_is_alone():
    assert choose_batch(of_lengths(100, 100, 1), 64) == [0]
    assert choose_batch([RequestSize(2, 50, 51), *of_lengths(50)], 1000) == [0]


@given(queues, st.integers(1, 2000))
def test_a_batch_is_bounded_and_has_little_padding(queue, tokens):
    chosen = choose_batch(queue, tokens)
    assert chosen[0] == 0
    assert len({*chosen}) == len(chosen)
    if len(chosen) > 1:
        rows = sum(queue[n].rows for n in chosen)
        computed = rows * max(queue[n].longest for n in chosen)
        assert computed <= tokens
        assert computed - sum(queue[n].tokens for n in chosen) < PADDING * computed


@given(queues, st.integers(1, 2000))
def test_no_equal_request_is_passed_over_for_a_later_one(queue, tokens):
    chosen = choose_batch(queue, tokens)
    for number in range(len(queue)):
        later = [n for n in chosen if n > number and queue[n] == queue[number]]
        assert number in chosen or not later


@given(queues, st.integers(1, 2000))
def test_every_request_is_chosen_after_as_many_batches_as_are_older(queue, tokens):
    waiting, batches = list(enumerate(queue)), 0
    while waiting:
        chosen = choose_batch([size for _, size in waiting], tokens)
        assert waiting[0][0] >= batches - len(queue)
        waiting = [each for n, each in enumerate(waiting) if n not in chosen]
        batches += 1
    assert batches <= len(queue)


@given(st.lists(lengths, min_size=1, max_size=40), st.integers(200, 2000))
def test_rows_of_one_length_fill_a_batch(many, tokens):
    queue = of_lengths(*[many[0]] * len(many))
    assert len(choose_batch(queue, tokens)) == min(len(many), max(tokens // many[0], 1))
