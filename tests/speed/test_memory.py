"""Memory: the loss of a frozen head in chunks is that of the model; activations are predicted."""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, Gemma2Config

import adapterhub as ah
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions, read
from adapterhub.speed import activation_memory as memory
from adapterhub.speed.activation_memory import activation_bytes, saved_bytes
from adapterhub.speed.head_loss import choose_head_loss, frozen_head, head_loss
from adapterhub.tasks import parse_task
from adapterhub.tasks.common import language_models
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.runs import Notes
from tests.kit.selection import long_table
from tests.kit.task_cases import CASES

WRITERS = (*tiny_models.DECODERS, *tiny_models.ENCODER_DECODERS)
SMALL = {"vocab_size": 120, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


@pytest.fixture
def always(monkeypatch):
    """Use chunks of two or three tokens, however small the model."""
    monkeypatch.setattr(language_models, "_WORTHWHILE", 0)
    monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 300})


@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradient_are_those_of_cross_entropy(tokens, vocabulary, chunk, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(5, vocabulary, bias=bias)
    states = torch.randn(tokens, 5, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_models, "_CHUNK", {"cpu": chunk})
        found = head_loss(states, head, targets)
    expected = F.cross_entropy(head(states), targets)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(3 * each, states)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    torch.manual_seed(0)
    head, states = nn.Linear(32, 500), torch.randn(40, 32, requires_grad=True)
    targets = torch.randint(0, 500, (40,))
    with torch.autocast("cpu", dtype=dtype):
        losses = head_loss(states, head, targets), F.cross_entropy(head(states).float(), targets)
    scale = 2.0**14 if dtype == torch.float16 else 1.0  # as a loss scaler multiplies
    ours, theirs = (torch.autograd.grad(scale * each, states)[0] for each in losses)
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_no_logits_are_kept():
    head, states = nn.Linear(4, 1000), torch.randn(50, 4, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        head.requires_grad_(False)
        head_loss(states, head, torch.zeros(50, dtype=torch.long))
    assert sum(kept) == states.numel()


def chosen(model: Any, task: str, **options: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    adapter = ah.attach(model, "lora(rank=2)")
    tiny_models.scramble(adapter)
    adapter.train_mode()
    ids = tiny_models.batch(rows=2)["input_ids"]
    labels = ids.clone()
    labels[0, :4] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    settings = RunOptions(batch_size=2, tensorboard=False, **options)
    row = {name: tensor[:1] for name, tensor in batch.items()}
    loss = choose_head_loss(adapter, parse_task(task), settings, lambda: row)
    with Speedups([loss] if loss else []) as speedups:
        speedups.enter(Engine(AdapterTrainee(adapter), settings))
        return adapter, loss if speedups.used else None, batch


@pytest.mark.usefixtures("always")
@long_table("architecture", WRITERS, 3)
def test_the_loss_of_every_architecture_that_writes(architecture):
    model = tiny_models.language_model(architecture)
    task = "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"
    adapter, loss, batch = chosen(model, task)
    results = [loss(batch), model(**batch).loss]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(each, adapter.parameters()) for each in results)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        assert model(**batch).logits.shape[-1] == model.config.vocab_size  # nothing was left


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bound", [30.0, None])
def test_bounded_logits_are_those_of_the_model(bound):
    config = Gemma2Config(**SMALL, final_logit_softcapping=bound)
    model = AutoModelForCausalLM.from_config(config)
    assert (chosen(model, "causal-lm")[1] is None) == (bound is not None)


@pytest.mark.usefixtures("always")
@long_table("task", ["causal-lm", "seq2seq", "masked-lm", "image-text-to-text"], 2)
def test_a_run_is_the_same(task, backbones, tmp_path, monkeypatch):
    case, folder = CASES[task], backbones(CASES[task].backbone)
    data = case.data(tmp_path)
    if task == "masked-lm":  # with the head that it was pre-trained with
        folder = shutil.copytree(folder, tmp_path / "pretrained")
        AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    losses, metrics = {}, {}
    for least in (0, 1 << 60):
        monkeypatch.setattr(language_models, "_WORTHWHILE", least)
        flags = {"backbone": str(folder), "output": str(tmp_path / str(least))}
        words = ["method=lora", f"task={case.task}", *case.words, "train.max_steps=6"]
        words += ["train.log_every=1", "train.tensorboard=false", "train.learning_rate=1e-2"]
        words.append("train.report=false")
        outcome = run(read(None, words, flags | {"data": {"train": str(data)}}), kept := Notes())
        losses[least], metrics[least] = kept.losses, outcome.metrics["loss"]
        assert bool(kept.about("tokens at a time")) == (least == 0)
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1 << 60], rel=1e-3)
    assert metrics[0] == pytest.approx(metrics[1 << 60], rel=1e-3)


@pytest.mark.usefixtures("always")
def test_a_head_that_trains_later_has_its_logits():
    model = tiny_models.language_model("gpt2")
    adapter, loss, _ = chosen(model, "causal-lm")
    engine = Engine(AdapterTrainee(adapter), RunOptions())
    model.lm_head.weight.requires_grad_(True)
    assert loss.patch(engine) is None
    assert engine.below_head is None
    model.lm_head.weight.requires_grad_(False)
    undo = loss.patch(engine)
    assert engine.below_head is loss
    undo()
    assert engine.below_head is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("change", ["trained", "hooked", "subclass", "child", "offloaded"])
def test_heads_of_another_kind_have_their_logits(change):
    model = tiny_models.language_model("llama")
    adapter = ah.attach(model, "lora(rank=2)")
    head = model.lm_head
    if change == "trained":
        head.weight.requires_grad_(True)
    elif change == "hooked":
        head.register_forward_hook(lambda *_: None)
    elif change == "subclass":
        head.__class__ = type("Quantized", (nn.Linear,), {})
    elif change == "child":
        head.add_module("child", nn.Identity())
    else:
        head.forward = head.forward
    assert frozen_head(adapter, parse_task("causal-lm"), RunOptions()) is None


CELLS = [
    ("bert", "lora"), ("bert", "mam"), ("bert", "norms"), ("llama", "houlsby"), ("llama", "prefix"),
    ("gpt2", "ia3"), ("t5", "lora"), ("deberta-v2", "pfeiffer"), ("modernbert", "lora"),
]  # fmt: skip

DTYPES = (torch.float32, torch.bfloat16)


@long_table(("architecture", "method", "dtype"), [(*c, d) for c in CELLS for d in DTYPES], 3)
def test_the_prediction_is_what_a_larger_batch_keeps(method, architecture, dtype):
    model = tiny_models.model(architecture).to(dtype)
    adapter = ah.attach(model, example(method))
    rows, tokens = 5, 2 * memory.LONGEST
    modes = [module.training for module in model.modules()]
    predicted = activation_bytes(adapter, rows, tokens)
    assert [module.training for module in model.modules()] == modes
    adapter.train_mode()
    assert predicted == pytest.approx(saved_bytes(adapter, rows, tokens), rel=0.05)


def test_gradient_checkpointing_keeps_inputs_and_one_layer():
    adapter = ah.attach(tiny_models.model("bert", num_hidden_layers=4), "lora")
    whole, less = (activation_bytes(adapter, 4, 48, on) for on in (False, True))
    adapter.train_mode()
    inputs = saved_bytes(adapter, 4, 48, recomputed=True)
    assert 4 * 4 * 48 * 32 * 4 <= inputs < whole / 4  # layers, rows, tokens, width, bytes
    assert less == pytest.approx(inputs + (whole - inputs) / 4, rel=0.05)
    offloaded = activation_bytes(adapter, 4, 48, True, True)
    assert less - offloaded == pytest.approx(inputs * 3 / 4, rel=0.05)


def test_logits_are_counted_apart():
    model = tiny_models.model("llama", "causal-lm")
    adapter = ah.attach(model, "lora")
    predicted = activation_bytes(adapter, 4, 32)
    assert memory.logit_bytes(adapter, 4 * 32) == memory.LOGIT_BYTES * 4 * 32 * tiny_models.VOCAB
    adapter.train_mode()
    assert predicted == pytest.approx(saved_bytes(adapter, 4, 32), rel=0.05)


def test_random_numbers_are_left_alone():
    adapter = ah.attach(tiny_models.model("bert"), "lora(dropout=0.5)")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    activation_bytes(adapter, 4, 32)
    assert torch.equal(torch.rand(3), expected)


def test_an_evaluation_takes_one_layer_at_a_time():
    adapter = ah.attach(tiny_models.model("bert", num_hidden_layers=4), "lora")
    assert memory.logit_bytes(adapter, 5 * 24) == 0
    whole = activation_bytes(adapter, 5, 24)
    assert memory.evaluation_bytes(adapter, 5, 24) == pytest.approx(whole / 4, rel=0.01)
