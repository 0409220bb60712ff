"""The processes of a run: launchers, divided evaluations, stop signals, and sharded models."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import adapterhub as ah
from adapterhub.anatomy.backbone import is_sharded, local, shared_like, with_whole_parameters
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop import processes, sharding
from adapterhub.loop.engine import Engine, LazyBatches
from adapterhub.loop.processes import divided_evaluation, is_main, launcher_shards, process_index
from adapterhub.loop.sharding import has_shards, read_shards, shard, split_training, write_shards
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods.common.site_module import SharedModule
from adapterhub.recipe.recipe import RunOptions
from adapterhub.tasks.common.batches import in_step, results
from tests.kit import tiny_models
from tests.kit.runs import Data, Ticks, final_bytes, fit


def test_what_a_launcher_says_of_a_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert (is_main(), process_index(), processes.restarted()) == (True, 0, False)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (is_main(), process_index(), processes.restarted()) == (False, 2, True)


def test_only_fsdp2_is_what_a_launcher_may_shard_by(monkeypatch):
    assert not launcher_shards()
    for flag in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.setenv(flag, "true")
    with pytest.raises(ConfigError, match="Megatron-LM, FSDP of version 1") as error:
        launcher_shards()
    assert "--fsdp_version 2" in error.value.hint
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert launcher_shards()
    with processes.without_launcher_sharding():  # accelerate does not see what its launcher said
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ConfigError, match="parameters on the CPU"):
        launcher_shards()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_of_several_computes_its_own(sharded, monkeypatch):
    with divided_evaluation(sharded=True):  # a single process computes all
        assert results(range(3), str) == ["0", "1", "2"]
        assert not in_step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "join_processes", lambda: None)
    monkeypatch.setattr(processes, "everyone_s", lambda own: [["other's 0", "other's 2"], own])
    with divided_evaluation(sharded=sharded):
        assert in_step() == sharded
        assert results(range(3), str) == ["other's 0", "1", "other's 2"]
    assert not in_step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_error_names_resume(tmp_path, number):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(tmp_path / "whole")
    with pytest.raises(TrainingError, match="after step 4 of 6") as error:
        fit(tmp_path / "cut", data=Data(Ticks(10, number)))
    assert "--resume" in str(error.value)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    data = Data()
    fit(tmp_path / "cut", data=data, resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")
    assert (data.collated, data.epochs) == (5, [1]), "skipped batches were collated"


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, evaluate=lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])


def test_a_thread_without_signal_handlers_trains_all_the_same():
    def requested() -> bool:
        with processes.catch_stop_signals() as stop:
            return stop.requested

    with ThreadPoolExecutor() as threads:
        assert not threads.submit(requested).result()


# Sharded models: what is sharded and what stays whole, clipped gradients, and their files.


@pytest.fixture
def group():
    """Let this process be a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("method", ["lora", "compacter", "full", "prefix(reparametrize=true)"])
def test_all_parameters_are_sharded_but_what_several_layers_read(method, group):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, method, name="a")
    before = adapter.state.fingerprint(), adapter.manifest().backbone
    tensors = {name: t.detach().clone() for name, t in adapter.saved_tensors().items()}
    shard(adapter)
    whole = {n for n, p in model.named_parameters() if not is_sharded(p)}
    read = [m for m in model.modules() if isinstance(m, SharedModule)]
    assert len(whole) == sum(len(list(m.parameters())) for m in read)
    assert bool(read) == (method not in ("lora", "full"))
    assert (adapter.state.fingerprint(), adapter.manifest().backbone) == before
    for placed in adapter.placed:
        assert not any(map(is_sharded, with_whole_parameters(placed.module).parameters()))
    saved = adapter.saved_tensors()
    for name, tensor in tensors.items():
        assert torch.equal(local(saved[name]).reshape(tensor.shape), tensor)


OF_THE_BACKBONE = ("full", "freeze", "unfreeze", "staged", "staged, lora", "norms")


@pytest.mark.parametrize(
    ("method", "architecture"),
    [("bitfit", "gpt2"), *((m, a) for m in OF_THE_BACKBONE for a in ("gpt2", "llama"))],
)
def test_what_is_in_no_layer_trains_after_the_model_was_run(method, architecture, group):
    model = tiny_models.model(architecture, "causal-lm", **tiny_models.NO_DROPOUT)
    adapter = ah.attach(model, method, name="a")
    shard(adapter)
    trainee = AdapterTrainee(adapter)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    engine = Engine(trainee, RunOptions(learning_rate=0.1, warmup=0))
    engine.begin(2)
    trainee.enter(0, [], 0.0)
    trainee.train_mode(dropout=False)
    trained = [n for n, t in adapter.tensors().items() if t.requires_grad]
    before = {n: local(t).detach().clone() for n, t in adapter.tensors().items()}
    epoch = LazyBatches([[0], [0]], lambda _: {"input_ids": ids, "labels": ids})
    for number in range(2):
        engine.step(epoch, range(number, number + 1), (number + 1) / 2)
    after = adapter.tensors()
    assert all(is_sharded(t) for t in after.values())
    changed = {n for n, t in after.items() if not torch.equal(local(t), before[n])}
    assert changed == set(trained)


@pytest.mark.parametrize("limit", [0.1, 100.0])
def test_gradients_are_clipped_as_torch_clips_whole_ones(limit, group):
    torch.manual_seed(0)
    gradients = [torch.randn(4, 3), torch.randn(5), torch.randn(2, 2)]
    plain = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    mixed = [torch.nn.Parameter(distribute_tensor(p.data, group, [Shard(0)])) for p in plain[:2]]
    mixed.append(torch.nn.Parameter(plain[2].data.clone()))
    for p, q, gradient in zip(plain, mixed, gradients, strict=True):
        p.grad, q.grad = gradient.clone(), shared_like(q, gradient.clone())
    norm = torch.nn.utils.clip_grad_norm_(plain, limit)
    torch.testing.assert_close(sharding.clip_gradients(mixed, limit), norm)
    for p, q in zip(plain, mixed, strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(local(q.grad), p.grad)


def test_infinite_numbers_are_found_in_a_share(group):
    tensor = distribute_tensor(torch.tensor([1.0, torch.inf]), group, [Shard(0)])
    trainee = SimpleNamespace(tensors=lambda: {"bad": tensor, "good": torch.ones(2)})
    engine: Any = SimpleNamespace(trainee=trainee, sharded=True, not_finite=RuntimeError)
    with pytest.raises(RuntimeError, match="bad"):
        Engine.finite_tensors(engine)


def test_weights_whose_scales_cannot_be_sharded_are_refused():
    model = tiny_models.model("llama")
    adapter = ah.attach(model, "lora")
    model.config.quantization_config = {"load_in_8bit": True, "quant_method": "bitsandbytes"}
    with pytest.raises(ConfigError, match="int8, whose weights cannot be sharded") as error:
        shard(adapter)
    assert "nf4" in error.value.expected


TENSORS = {
    "tensors/layer.0.weight": torch.arange(15.0).view(5, 3),
    "tensors/bias": torch.arange(3.0),
    "tensors/half": torch.ones(2, 2, dtype=torch.bfloat16),
    "optimizer/0/step": torch.tensor(7.0),
}


def sharded(tensors, group):
    return {n: distribute_tensor(t, group, [Shard(0)]) if t.ndim else t for n, t in tensors.items()}


def test_shards_are_read_whole_and_in_parts(tmp_path, group):
    """Whole ones without a process group. What is missing or cannot be written is an error."""
    written = write_shards(tmp_path, sharded(TENSORS, group))
    assert [path.parent for path in written] == [tmp_path]
    assert has_shards(tmp_path)
    kinds = {n: (t.shape, t.dtype) for n, t in sharding.described(tmp_path).items()}
    assert kinds == {n: (t.shape, t.dtype) for n, t in TENSORS.items()}
    parts = sharded({name: torch.zeros_like(t) for name, t in TENSORS.items()}, group)
    read_shards(tmp_path, parts)
    parts = {name: part.full_tensor() if part.ndim else part for name, part in parts.items()}
    with pytest.raises(ValueError, match="other"):
        read_shards(tmp_path, {"other": torch.zeros(1)})
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_shards(tmp_path / "file", sharded(TENSORS, group))
    dist.destroy_process_group()
    whole = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_shards(tmp_path, whole)
    for name, tensor in TENSORS.items():
        assert torch.equal(whole[name], tensor)
        assert torch.equal(parts[name], tensor)


def test_the_state_of_an_optimizer_is_split_and_joined(tmp_path, group):
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
    joined = sharding.join_training(rest, tmp_path, parameters)
    assert joined["n"] == 2
    state = joined["engine"]["optimizer"]["state"]
    for number, values in training["engine"]["optimizer"]["state"].items():
        assert values.keys() == state[number].keys()
        assert all(torch.equal(state[number][name], value) for name, value in values.items())
    assert split_training(None) == (None, {})
    # A state is divided as its parameters are.
    parameter = distribute_tensor(torch.zeros(4, 2), group, [Shard(0)])
    shared = sharding.share_state({0: state[0] | {"name": "x"}}, [parameter])[0]
    assert [is_sharded(shared[name]) for name in ("exp_avg", "step")] == [True, False]
    assert shared["name"] == "x"
    assert torch.equal(local(shared["exp_avg"]), state[0]["exp_avg"])
