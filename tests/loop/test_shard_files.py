"""Files of sharded tensors: what is written is read back, whole or in parts, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from adapterhub.loop.sharding import (
    described,
    has_shards,
    join_training,
    read_shards,
    split_training,
    write_shards,
)

TENSORS = {
    "tensors/layer.0.weight": torch.arange(15.0).view(5, 3),
    "tensors/bias": torch.arange(3.0),
    "tensors/half": torch.ones(2, 2, dtype=torch.bfloat16),
    "optimizer/0/step": torch.tensor(7.0),
}


@pytest.fixture
def mesh(tmp_path):
    """Return the mesh of a process group with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(tensors, mesh):
    return {n: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim else t for n, t in tensors.items()}


def test_shards_are_read_whole_and_in_parts(tmp_path: Path, mesh) -> None:
    written = write_shards(tmp_path, sharded(TENSORS, mesh))
    assert [path.parent for path in written] == [tmp_path]
    assert has_shards(tmp_path)
    assert {n: (t.shape, t.dtype) for n, t in described(tmp_path).items()} == {
        n: (t.shape, t.dtype) for n, t in TENSORS.items()
    }
    whole = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_shards(tmp_path, whole)
    parts = sharded({name: torch.zeros_like(t) for name, t in TENSORS.items()}, mesh)
    read_shards(tmp_path, parts)
    for name, tensor in TENSORS.items():
        assert torch.equal(whole[name], tensor)
        part = parts[name].full_tensor() if tensor.ndim else parts[name]
        assert torch.equal(part, tensor)


def test_shards_are_read_without_a_process_group(tmp_path: Path, mesh) -> None:
    write_shards(tmp_path, sharded(TENSORS, mesh))
    dist.destroy_process_group()
    whole = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_shards(tmp_path, whole)
    assert all(torch.equal(whole[name], tensor) for name, tensor in TENSORS.items())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_missing_tensor_is_an_error(tmp_path: Path, mesh) -> None:
    write_shards(tmp_path, sharded(TENSORS, mesh))
    with pytest.raises(ValueError, match="other"):
        read_shards(tmp_path, {"other": torch.zeros(1)})


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path, mesh) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_shards(tmp_path / "file", sharded(TENSORS, mesh))


def test_the_state_of_an_optimizer_is_split_and_joined(tmp_path: Path, mesh) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    training = {"engine": {"optimizer": optimizer.state_dict(), "scheduler": {"last": 1}}, "n": 2}
    rest, tensors = split_training(training)
    assert rest is not None
    assert not any(rest["engine"]["optimizer"]["state"].values())
    assert sorted(tensors)[:3] == ["optimizer/0/exp_avg", "optimizer/0/exp_avg_sq",
                                   "optimizer/0/step"]  # fmt: skip
    write_shards(tmp_path, tensors)
    joined = join_training(rest, tmp_path, parameters)
    assert joined["n"] == 2
    state = joined["engine"]["optimizer"]["state"]
    for number, values in training["engine"]["optimizer"]["state"].items():
        assert values.keys() == state[number].keys()
        assert all(torch.equal(state[number][name], value) for name, value in values.items())


def test_a_checkpoint_without_an_optimizer_has_nothing_to_split() -> None:
    assert split_training(None) == (None, {})
