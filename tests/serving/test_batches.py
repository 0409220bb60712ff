"""Which requests share a batch: a pure function of their sizes."""

from hypothesis import given
from hypothesis import strategies as st

from adapterhub.serving import shared_backbone
from adapterhub.serving.shared_backbone import PADDING, BatchLimits, RequestSize, choose_batch

lengths = st.integers(1, 200)
sizes = st.lists(lengths, min_size=1, max_size=4).map(
    lambda each: RequestSize(len(each), max(each), sum(each))
)
limits = st.builds(BatchLimits, st.integers(1, 2000), st.floats(0, 500))
queues = st.lists(sizes, min_size=1, max_size=40)


WIDE = BatchLimits.of_tokens(1000)


def of_lengths(*each: int) -> list[RequestSize]:
    return [RequestSize(1, n, n) for n in each]


def test_the_oldest_and_those_of_its_length():
    assert choose_batch(of_lengths(10, 50, 9, 11, 100, 10), WIDE) == [0, 2, 3, 5]
    assert choose_batch(of_lengths(10, 20), WIDE) == [0]  # a quarter of 40 positions
    assert choose_batch(of_lengths(11, 20), WIDE) == [0, 1]
    assert choose_batch(of_lengths(10, 11, 9, 9), BatchLimits(22, 10)) == [0, 1]  # the older
    assert choose_batch(of_lengths(100, 100, 1), BatchLimits(64, 10)) == [0]  # too large
    assert choose_batch([RequestSize(2, 50, 51), *of_lengths(50)], WIDE) == [0]


@given(queues, limits)
def test_a_batch_is_bounded_and_has_little_padding(queue, limits):
    chosen = choose_batch(queue, limits)
    assert chosen[0] == 0
    assert len({*chosen}) == len(chosen)
    if len(chosen) > 1:
        rows = sum(queue[n].rows for n in chosen)
        computed = rows * max(queue[n].longest for n in chosen)
        assert computed <= limits.tokens
        assert computed - sum(queue[n].tokens for n in chosen) < PADDING * computed


@given(queues, limits)
def test_no_equal_request_is_passed_over_for_a_later_one(queue, limits):
    chosen = choose_batch(queue, limits)
    for number in range(len(queue)):
        later = [n for n in chosen if n > number and queue[n] == queue[number]]
        assert number in chosen or not later


@given(queues, limits)
def test_every_request_is_chosen_after_as_many_batches_as_are_older(queue, limits):
    waiting, batches = list(enumerate(queue)), 0
    while waiting:
        chosen = choose_batch([size for _, size in waiting], limits)
        assert waiting[0][0] >= batches - len(queue)
        waiting = [each for n, each in enumerate(waiting) if n not in chosen]
        batches += 1
    assert batches <= len(queue)


@given(st.lists(sizes, min_size=1, max_size=7), limits)
def test_no_run_of_lengths_would_be_faster(queue, limits):
    """Of one-row requests: what `choose_batch` finds is the best of all runs."""
    queue = of_lengths(*(each.longest for each in queue))

    def rate(numbers):
        computed = len(numbers) * max(queue[n].longest for n in numbers)
        tokens = sum(queue[n].tokens for n in numbers)
        allowed = computed <= limits.tokens and computed - tokens < PADDING * computed
        return tokens / (limits.fixed + computed) if allowed or len(numbers) == 1 else 0

    ordered = sorted(range(len(queue)), key=lambda n: queue[n].longest)
    runs = [ordered[i:j] for i in range(len(queue)) for j in range(i + 1, len(queue) + 1)]
    best = max(rate(run) for run in runs if 0 in run)
    assert rate(choose_batch(queue, limits)) >= best * (1 - 1e-9)


def computer(cost):
    """Let a batch take `cost(positions)` seconds; return what was run, and the clock."""
    now, ran = [0.0], []

    def run(rows, tokens):
        ran.append(rows * tokens)
        now[0] += cost(rows * tokens)

    return run, ran, lambda: now[0]


def test_the_limits_of_a_device_are_measured():
    measure_limits = shared_backbone.measure_limits
    run, _, clock = computer(lambda n: 1e-4 * (40 + n) * (1 if n <= 256 else 1.5))
    assert measure_limits(run, 4096, clock).tokens == 256
    run, _, clock = computer(lambda n: 1e-6 * (300 + n))
    limits = measure_limits(run, 1024, clock)
    assert limits.tokens == 1024
    assert abs(limits.fixed - 300) < 1
    run, _, clock = computer(lambda n: 1e-4 * (20 + n))
    assert measure_limits(run, 4096, clock).tokens == 200
    # A measurement ends in time.
    run, ran, clock = computer(lambda n: 0.1 * n)
    assert measure_limits(run, 4096, clock).tokens == 16
    assert ran == [16, 16]
    run, ran, clock = computer(lambda n: 1e-3 * (100 + n))
    measure_limits(run, 4096, clock)
    assert 1e-3 * sum(100 + n for n in ran[1:]) < 1
