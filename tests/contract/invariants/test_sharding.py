"""FSDP2 (`fully_shard`) on models with adapters: two processes train and save what one does."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import adapterhub as ah
from adapterhub.anatomy.backbone import is_sharded
from adapterhub.errors import AttachError
from tests.kit import processes, tiny_models

# Site modules, a prefix, and a method that trains the backbone's own parameters.
CORE = [("lora", "llama"), ("prefix", "bert"), ("full", "bert")]
METHODS = ("lora", "pfeiffer", "prefix", "prompt", "full")
ALL = [(method, architecture) for architecture in ("llama", "bert") for method in METHODS]
CASES = ALL if tiny_models.FULL_MATRIX else CORE
STEPS = 2
pytestmark = pytest.mark.apart


def attached(method, architecture):
    torch.manual_seed(0)
    model = tiny_models.model(architecture, **tiny_models.NO_DROPOUT)
    return model, ah.attach(model, method, name="tiny")


def shard(model):
    """Shard each layer, then the whole model, as users do."""
    for module in list(model.modules()):
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == model.config.num_hidden_layers
        ):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)


def fit(model, adapter, rank=0, world=1):
    """Train on this process's rows of a batch; gradients are averaged over the processes."""
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.5)
    ids = tiny_models.batch(4)["input_ids"]
    rows = slice(rank * 4 // world, (rank + 1) * 4 // world)
    labels = torch.tensor([0, 1, 2, 0])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        optimizer.step()


def train_sharded(folder):
    """Train and save every case; runs in each process. Rank 0 records the parameter counts."""
    dist.init_process_group("gloo")
    rank, counts = dist.get_rank(), {}
    for method, architecture in CASES:
        model, adapter = attached(method, architecture)
        plain = {n for n, p in model.named_parameters() if p.requires_grad}
        shard(model)
        trained = adapter.parameters()
        sharded_count = sum(map(is_sharded, trained))
        counts[f"{method}-{architecture}"] = [len(trained), sharded_count, len(plain)]
        fit(model, adapter, rank, 2)
        adapter.save(folder / f"{method}-{architecture}")
    with pytest.raises(AttachError, match="attach first, then fully_shard"):
        ah.attach(model, "lora", name="late")
    with pytest.raises(AttachError, match="cannot be swapped"):
        ah.activate(model)  # the last case is `full`
    if rank == 0:
        (folder / "counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Run two processes; return the folder where they saved each case."""
    folder = tmp_path_factory.mktemp("sharded")
    ended = processes.run(__file__, folder, processes=2)
    assert ended.returncode == 0, ended.printed[-3000:]
    return folder


def test_every_trained_parameter_is_sharded(sharded):
    counts = json.loads((sharded / "counts.json").read_text())
    assert len(counts) == len(CASES)
    for trained, sharded_count, plain in counts.values():
        assert trained == sharded_count == plain > 0, counts


@pytest.mark.parametrize(("method", "architecture"), CASES)
def test_two_sharded_processes_save_what_one_trains(method, architecture, sharded, tmp_path):
    model, adapter = attached(method, architecture)
    start = {name: tensor.detach().clone() for name, tensor in adapter.tensors().items()}
    fit(model, adapter)
    adapter.save(tmp_path / "one")
    name = f"{method}-{architecture}"
    one, two = (
        load_file(folder / "adapter.safetensors") for folder in (tmp_path / "one", sharded / name)
    )
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, atol=1e-6, rtol=1e-4)
    assert any(not torch.allclose(two[k], start[k], atol=1e-4) for k in two.keys() & start.keys())
    fresh = tiny_models.model(architecture, **tiny_models.NO_DROPOUT)
    ah.load(fresh, sharded / name)  # the fingerprint is that of the unsharded backbone
    inputs = tiny_models.batch()
    torch.testing.assert_close(fresh(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    train_sharded(Path(sys.argv[1]))
