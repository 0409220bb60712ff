"""Digests that survive a change of the dtype, and samples that survive padding."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.backbones import checkpoint
from adapterhub.backbones.checkpoint import (
    RUN,
    RUNS,
    Digests,
    TensorReader,
    chunks,
    combined,
    digest_table,
    reader_of,
    sample_of,
)


def digests_of(tensor, sampled=False):
    (digests,) = digest_table([reader_of("a", tensor)], sampled=sampled).values()
    return digests


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e4))
def test_copies_share_a_digest(seed, scale):
    values = torch.randn(999, generator=torch.Generator().manual_seed(seed)) * scale
    original = digests_of(values)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        copy = values.to(dtype)
        assert original.same(digests_of(copy)), dtype
        assert original.same(digests_of(copy.float())), dtype
    assert not original.same(digests_of(values * 1.02))


@given(rows=st.integers(1, 3_000), width=st.integers(1, 300), pad=st.sampled_from([8, 64, 128]))
def test_padding_does_not_change_a_sample(rows, width, pad):
    padded = -(-rows // pad) * pad
    samples = [
        sample_of(TensorReader("a", (n, width), None, is_table=True)) for n in (rows, padded)
    ]
    assert rows > pad or samples[0] == samples[1][: len(samples[0])]
    if rows > pad:
        assert samples[0] == samples[1]


@pytest.mark.parametrize("numel", [1, RUN * RUNS, RUN * RUNS + 1, 10**9])
def test_a_sample_is_within_its_tensor(numel):
    runs = sample_of(TensorReader("a", (numel,), None))
    assert runs[0][0] == 0
    assert sum(runs[-1]) == numel
    assert sum(count for _, count in runs) <= RUN * RUNS


def test_chunks_cover_every_value_once(monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK", 7)
    runs = list(chunks(TensorReader("a", (5, 9), None)))
    covered = [i for start, count in runs for i in range(start, start + count)]
    assert covered == list(range(45))


def test_threads_change_nothing(monkeypatch):
    readers = [reader_of(str(i), torch.randn(60, 70)) for i in range(20)]
    expected = digest_table(readers, sampled=False)
    monkeypatch.setattr(checkpoint, "_CHUNK", 100)
    assert digest_table(readers, sampled=False) == expected
    assert len(expected) == 20


def test_threads_run_nothing_of_torch(monkeypatch):
    """New threads that enter torch's parallel code set up its pool, which failed now and then."""
    monkeypatch.setattr(checkpoint, "_CHUNK", 100)
    of_torch, hashing = set(), set()
    rounded, update = checkpoint._rounded, checkpoint._Strands._update

    def note(values):
        of_torch.add(threading.get_ident())
        return rounded(values)

    def note_hashing(strands, parts):
        hashing.add(threading.get_ident())
        assert all(type(part) is bytes for part in parts)
        update(strands, parts)

    def read(runs, tensor):
        of_torch.add(threading.get_ident())
        return torch.cat([tensor.flatten()[a : a + n] for a, n in runs])

    monkeypatch.setattr(checkpoint, "_rounded", note)
    monkeypatch.setattr(checkpoint._Strands, "_update", note_hashing)
    tensors = [torch.randn(30, 40) for _ in range(20)]
    readers = [
        TensorReader(str(i), t.shape, partial(read, tensor=t)) for i, t in enumerate(tensors)
    ]
    digest_table(readers, sampled=False)
    assert of_torch == {threading.get_ident()}
    assert hashing
    assert threading.get_ident() not in hashing


def test_integers_are_digested_as_bytes():
    codes = torch.arange(9, dtype=torch.uint8)
    assert digests_of(codes) == Digests(digests_of(codes).half, digests_of(codes).values)
    assert digests_of(codes) != digests_of(codes.flip(0))


def test_names_and_shapes_count():
    values = torch.arange(6.0)
    tables = [
        digest_table([reader_of(name, values.reshape(shape))], sampled=False)
        for name, shape in (("a", (6,)), ("b", (6,)), ("a", (2, 3)))
    ]
    assert len({combined(table) for table in tables}) == 3
