"""What may change in the steps of a run: the optimizer, and noise on token embeddings."""

import copy

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop import engine
from adapterhub.loop.engine import OPTIMIZERS, Engine, noisy_embeddings
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models
from tests.kit.own_models import network

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def started(optimizer):
    """An engine that trains all tensors of a tiny backbone, small and large; or its factors."""
    torch.manual_seed(0)
    method = "lora(rank=3)" if optimizer == "riemannian" else "full"
    adapter = ah.attach(tiny_models.model("bert", **SIZES, **tiny_models.NO_DROPOUT), method)
    engine = Engine(AdapterTrainee(adapter), RunOptions(optimizer=optimizer))
    engine.begin(8)
    return engine


def steps(engine, numbers):
    for seed in numbers:
        rows = tiny_models.batch(seed=seed) | {"labels": torch.tensor([0, 1, 2])}
        engine.step([rows], range(1), done=1.0)


def tensors(engine):
    return {name: t.detach().clone() for name, t in engine.trainee.tensors().items()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_it_resumes_exactly_and_its_predicted_memory_is_the_real_one(name, tmp_path):
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    whole = started(name)
    steps(whole, range(6))
    cut = started(name)
    start = tensors(cut)
    steps(cut, range(3))
    saved = tensors(cut)
    torch.save(cut.state(), tmp_path / "state")
    again = started(name)
    with torch.no_grad():
        for key, tensor in again.trainee.tensors().items():
            tensor.copy_(saved[key])
    again.load_state(torch.load(tmp_path / "state", weights_only=True))
    steps(again, range(3, 6))
    expected = tensors(whole)
    assert all(torch.equal(t, expected[key]) for key, t in tensors(again).items())
    assert all(not torch.equal(expected[key], start[key]) for key in start)
    state_tensors = [v for state in whole.optimizer.state.values() for k, v in state.items()
            if isinstance(v, torch.Tensor) and v.numel() > 1 and "qmap" not in k]  # fmt: skip
    real = sum(t.numel() * t.element_size() for t in state_tensors)
    predicted = sum(map(OPTIMIZERS[name].bytes, whole.trainee.tensors().values()))
    assert predicted == pytest.approx(real, rel=0.01)


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    started("adamw")
    with pytest.raises(ConfigError, match="bitsandbytes") as error:
        started("adamw-8bit")
    assert "adapterhub[quantized]" in error.value.hint


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_riemannian_step_is_that_of_peft():
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_riemannian_optimizer

    model = tiny_models.model("bert", **SIZES, **tiny_models.NO_DROPOUT)
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(
        r=3, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS"))  # fmt: skip
    adapter = ah.attach(model, "lora(rank=3, alpha=16)")
    theirs = {
        f"{placed.site.id}.lora.{name}": wrapped.get_parameter(
            f"base_model.model.{placed.site.host}.lora_{name}.default.weight"
        )
        for placed in adapter.placed
        for name in "AB"
    }
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(adapter.tensors()[name].normal_(std=0.3))
    options = RunOptions(optimizer="riemannian", learning_rate=1e-2, head_learning_rate=1e-2,
        weight_decay=0, max_grad_norm=0, warmup=0, schedule="constant", eps=1e-3)  # fmt: skip
    engine = Engine(AdapterTrainee(adapter), options)
    engine.begin(8)
    optimizer = create_riemannian_optimizer(
        wrapped, torch.optim.AdamW, lr=1e-2, weight_decay=0, eps=1e-3
    )
    for seed in range(3):
        rows = tiny_models.batch(seed=seed) | {"labels": torch.tensor([0, 1, 2])}
        before = {name: t.detach().clone() for name, t in theirs.items()}
        engine.step([rows], range(1), done=1.0)
        wrapped.train()
        wrapped(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, tensor in theirs.items():
            assert not torch.equal(tensor, before[name])
            torch.testing.assert_close(adapter.tensors()[name], tensor, atol=1e-5, rtol=1e-4)


def test_a_riemannian_run_needs_two_factors_that_train():
    for method in ("ia3", "lora-fa"):
        engine = Engine(AdapterTrainee(ah.attach(tiny_models.model("bert"), method)),
            RunOptions(optimizer="riemannian"))  # fmt: skip
        with pytest.raises(ConfigError, match="both train") as error:
            engine.begin(8)
        assert "train.optimizer=adamw" in error.value.hint


# Uniform noise on token embeddings, only where gradients are computed: train.neftune_alpha.


@pytest.mark.parametrize(
    ("architecture", "method"), [("llama", "lora"), ("bert", "prompt(length=3)"), ("t5", "full")]
)
def test_embeddings_get_noise_while_gradients_are_computed(architecture, method):
    model = tiny_models.usual_model(architecture)
    ah.attach(model, method)
    batch = tiny_models.labelled_batch(model)
    weight, seen = model.get_input_embeddings().weight, []
    tables = [m for m in model.modules() if getattr(m, "weight", None) is weight]
    bare = model(**batch).logits
    with noisy_embeddings(model, 5.0):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, bare)
        watches = [t.register_forward_hook(lambda m, i, o: seen.append((i[0], o))) for t in tables]
        noisy = model(**batch).logits
        for watch in watches:
            watch.remove()
    assert not torch.allclose(noisy, bare)
    assert len(seen) == (2 if architecture == "t5" else 1)
    for ids, output in seen:
        most = 5.0 / (output.shape[1] * output.shape[2]) ** 0.5
        noise = output - weight[ids]
        assert noise.abs().max() <= most * (1 + 1e-4)
        assert noise.std().item() == pytest.approx(most / 3**0.5, rel=0.1)
    assert torch.equal(model(**batch).logits, bare)


def test_a_backbone_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="no table of tokens"):
        noisy_embeddings(network("conv2d")[0], 1.0).__enter__()
