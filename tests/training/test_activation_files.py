"""Recorded states on disk: complete or not there, and never wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from adapterhub.errors import OutputError
from adapterhub.training import activation_files
from adapterhub.training.activation_files import INDEX, STATES, DiskWriter, open_activations
from adapterhub.training.activation_folders import (
    activation_entries,
    activations_folder,
    clear_activations,
)

PLACES = {b"a" * 16: (0, 2), b"b" * 16: (2, 3)}
VALUES = torch.arange(40, dtype=torch.float32).view(5, 2, 4).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(key: str = "key", values: torch.Tensor = VALUES) -> Path:
    """Write five tokens of two layers, in two parts; return the folder."""
    with DiskWriter(key) as writer:
        writer.add(values[:2].float())
        writer.add(values[2:])
        writer.finish((1, 3), PLACES)
    return activations_folder() / key


def test_states_are_read_back_with_their_rows() -> None:
    write()
    recorded = open_activations("key")
    assert recorded is not None
    assert torch.equal(recorded.states, VALUES)
    assert (recorded.layers, recorded.places) == ((1, 3), PLACES)
    assert open_activations("other") is None


@pytest.mark.parametrize("file", [STATES, INDEX])
@pytest.mark.parametrize("how", ["changed", "short", "empty", "missing"])
def test_a_broken_folder_is_not_opened_and_is_replaced(file: str, how: str) -> None:
    path = write() / file
    data = path.read_bytes()
    middle = len(data) // 2
    broken = {"changed": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
              "short": data[:-1], "empty": b""}  # fmt: skip
    path.unlink() if how == "missing" else path.write_bytes(broken[how])
    assert open_activations("key") is None
    write()
    assert open_activations("key") is not None


def test_the_first_of_two_writers_wins_and_both_have_the_states() -> None:
    with DiskWriter("key") as first, DiskWriter("key") as second:
        for writer in (first, second):
            writer.add(VALUES)
        results = [writer.finish((1, 3), PLACES) for writer in (second, first)]
    assert all(torch.equal(recorded.states, VALUES) for recorded in results)
    assert [path.name for path in activations_folder().iterdir()] == ["key"]


def test_a_writer_that_does_not_finish_leaves_nothing_behind() -> None:
    with DiskWriter("key") as writer:
        writer.add(VALUES)
        assert not activation_entries() or not open_activations("key")
    assert not list(activations_folder().iterdir())


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(activation_files, "put_in_place", full)
    with pytest.raises(OutputError, match="No space left"):
        write()
    assert not activation_entries()


def test_states_stay_readable_when_their_files_are_deleted() -> None:
    write()
    recorded = open_activations("key")
    assert recorded is not None
    assert clear_activations() > VALUES.nbytes
    assert not activation_entries()
    if os.name != "nt":
        assert torch.equal(recorded.states, VALUES)
