"""Liger's kernels are used where loss, gradients and outputs stay the same, and are undone.

Those of Liger itself run with `make liger`, by Triton's interpreter; the others are stand-ins.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import Recipe, RunOptions
from adapterhub.speed.compiled_layers import check_installed, liger_kernels
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.matrix import ALL_CELLS, REFUSED, example
from tests.kit.runs import Notes
from tests.kit.tiny_adapters import loss_and_gradients

ON = RunOptions(liger=True)


INSTALLED = importlib.util.find_spec("liger_kernel") is not None
real = pytest.mark.skipif(not INSTALLED, reason="liger-kernel is not installed: make liger")
FUSED = {"llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3"}
CELLS = [(m, "llama") for m in sorted(METHODS)] + [("lora", a) for a in tiny_models.ARCHITECTURES]


def norm(self: Any, states: Tensor) -> Tensor:
    """Compute an RMSNorm as Llama does, in another place."""
    root = states.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon
    return self.weight * (states * root.rsqrt()).to(states.dtype)


def wrong_norm(self: Any, states: Tensor) -> Tensor:
    return 1.1 * norm(self, states)


def failing_norm(self: Any, states: Tensor) -> Tensor:
    raise RuntimeError("0 active drivers")


class _Overwritten(torch.autograd.Function):
    """Multiply by two, and overwrite the input in the backward pass, as Liger's kernels do."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.kept = states
        return 2 * states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.kept.data.zero_()
        return 2 * gradient


def overwriting_gate(self: Any, states: Tensor) -> Tensor:
    """Compute a gated layer whose backward pass overwrites the output of the gate."""
    gate = 0.5 * _Overwritten.apply(self.gate_proj(states))
    return self.down_proj(self.act_fn(gate) * self.up_proj(states))  # type: ignore[no-any-return]


def rotated(*args: Any, **kwargs: Any) -> Any:
    """Stand for a kernel in the file of the model."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(*args, **kwargs)


@pytest.fixture
def liger(monkeypatch):
    """Let a function of the test stand for Liger, for norms and for gated layers."""

    def install(norms: Any = norm, gates: Any = None) -> None:
        from transformers.integrations import liger as integration
        from transformers.models.llama import modeling_llama

        def apply(model: Any, config: dict[str, bool]) -> None:
            assert not any(config.values()), "the losses are left out"
            if model.config.model_type != "llama":
                return
            vars(modeling_llama)["apply_rotary_pos_emb"] = rotated
            for module in model.modules():
                if type(module).__name__ == "LlamaRMSNorm":
                    vars(module)["forward"] = MethodType(norms, module)
                    vars(module)["in_place"] = True
                if gates is not None and type(module).__name__ == "LlamaMLP":
                    vars(module)["forward"] = MethodType(gates, module)

        monkeypatch.setattr(integration, "apply_liger_kernel", apply)

    return install


def attached(method: Any, architecture: str = "llama") -> Any:
    adapter = ah.attach(tiny_models.usual_model(architecture), method)
    tiny_models.scramble(adapter)
    adapter.train_mode(False)
    adapter.model.config.use_cache = False  # as in training
    return adapter


def labelled(model: Any) -> dict[str, Tensor]:
    batch = tiny_models.batch(3, 7)
    batch["attention_mask"][0, -2:] = 0
    if model.config.model_type in tiny_models.WITHOUT_CLASSIFIER:
        return batch | {"labels": batch["input_ids"]}
    return batch | {"labels": torch.arange(3) % 3}


def state_of(model: nn.Module) -> dict[Any, Any]:
    """Return what each module has, and what the file of Llama defines."""
    from transformers.models.llama import modeling_llama

    modules = {name: {**vars(m)} for name, m in model.named_modules()}
    return modules | {"file": dict(vars(modeling_llama))}


class Used(ExitStack):
    """Inside, kernels are used if they may be; `notes` has what was said."""

    def __init__(self, adapter: Any, options: RunOptions = ON) -> None:
        super().__init__()
        self.notes: list[str] = []
        batch = labelled(adapter.model)
        trial = Trial(with_and_without_padding(batch), with_and_without_padding(batch))
        kernels = liger_kernels(adapter, options, lambda: trial, self.notes.append)
        speedups = Speedups([kernels] if kernels else [], self.notes.append)
        self.enter_context(speedups)
        if kernels:
            speedups.enter(Engine(AdapterTrainee(adapter), RunOptions()))


def unchanged(adapter: Any, reason: str, options: RunOptions = ON) -> None:
    """Check that nothing is used, for a reason."""
    batch, before = labelled(adapter.model), state_of(adapter.model)
    expected = loss_and_gradients(adapter, batch)
    with Used(adapter, options) as used:
        assert state_of(adapter.model) == before
        assert all(map(torch.equal, loss_and_gradients(adapter, batch), expected))
    (note,) = used.notes
    assert reason in note


def test_kernels_are_used_and_undone(liger):
    liger()
    adapter = attached("lora")
    batch, before = labelled(adapter.model), state_of(adapter.model)
    expected = loss_and_gradients(adapter, batch)
    with Used(adapter) as used:
        changed = [n for n, m in adapter.model.named_modules() if "forward" in vars(m)]
        assert len(changed) == 2 * adapter.model.config.num_hidden_layers + 1
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-6, rtol=1e-5
        )
    assert used.notes == [
        f"{len(changed)} modules compute by Liger's kernels; train.liger=false for their own"
    ]
    assert state_of(adapter.model) == before


def test_what_a_run_changes_is_kept(liger):
    liger()
    adapter = attached("lora")
    with Used(adapter):
        adapter.model.train()
        ah.attach(adapter.model, "pfeiffer", name="another")
    assert adapter.model.training
    assert {*ah.adapters(adapter.model)} == {adapter.name, "another"}


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(wrong_norm, "the loss would be different"), (failing_norm, "RuntimeError: 0 active drivers")],
)
def test_kernels_that_cannot_run_are_not_used(liger, kernel, reason):
    liger(kernel)
    unchanged(attached("lora"), f"Liger's kernels are not used: {reason}")


def test_a_gradient_that_a_kernel_overwrites_is_noticed(liger):
    """The gradient of IA3 on the gate reads the output of the gate; that of LoRA does not."""
    liger(gates=overwriting_gate)
    with Used(attached("lora(sites=[ffn.gate])")) as used:
        assert "modules compute by Liger's kernels" in used.notes[0]
    # A sigmoid behind the gate keeps its own output, which the kernel writes over.
    adapter = attached("lora(sites=[ffn.gate])")
    gate = adapter.model.get_submodule("model.layers.0.mlp.gate_proj")
    with gate.register_forward_hook(lambda module, inputs, output: output.sigmoid()):
        unchanged(adapter, "would be different")


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_models_without_kernels_are_named(architecture, liger):
    liger()
    unchanged(attached("lora", architecture), f"not used: it has none for {architecture}")


def test_several_processes_do_not_use_them(liger, monkeypatch):
    liger()
    monkeypatch.setenv("WORLD_SIZE", "2")
    unchanged(attached("lora"), "train.liger=true has no effect: several processes train")


def test_nothing_is_said_where_it_is_off(liger):
    liger(wrong_norm)
    with Used(attached("lora"), RunOptions()) as used:
        pass
    assert used.notes == []


def test_it_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(RunOptions())
    with pytest.raises(ConfigError, match=r"needs liger-kernel.*not installed") as raised:
        check_installed(ON)
    assert "adapterhub[liger]" in str(raised.value)


@pytest.fixture
def recipe(recipe_with, backbones):
    words = ["method=lora", "train.max_steps=4", "train.batch_size=4", "use_liger_kernel=true"]
    return recipe_with(
        *words, "train.tensorboard=false", "train.report=false", folder=backbones("llama")
    )


def compare_runs(recipe: Recipe, **train: Any) -> None:
    """Train with the kernels and without, and compare the losses and metrics."""
    results = {}
    for liger in (True, False):
        options = replace(recipe.train, liger=liger, **train)
        notes = Notes()
        output = str(Path(recipe.output).with_name(str(liger)))
        ran = run(replace(recipe, output=output, train=options), notes)
        assert any("compute by Liger's kernels" in note for note in notes.notes) == liger
        results[liger] = ran.result.history
    assert results[True]
    for found, expected in zip(results[True], results[False], strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


def test_a_run_uses_them(recipe, liger, monkeypatch):
    liger()
    monkeypatch.setattr("adapterhub.training.run.check_installed", lambda options: None)
    compare_runs(recipe)


@pytest.fixture
def interpreter(monkeypatch):
    """Complete Triton's interpreter: it has no fractions as arguments, and no libdevice."""
    import liger_kernel.ops.rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", lambda value: tl.rsqrt(value))


@real
@pytest.mark.parametrize(
    ("method", "architecture"), [c for c in CELLS if c in ALL_CELLS and c not in REFUSED]
)
def test_kernels_of_liger_compute_the_same(method, architecture, interpreter):
    adapter = attached(example(method), architecture)
    batch = labelled(adapter.model)
    expected = loss_and_gradients(adapter, batch)
    with Used(adapter) as used:
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-4, rtol=1e-3
        )
    (note,) = used.notes
    assert ("compute by" in note) == (architecture in FUSED), note
    assert torch.equal(loss_and_gradients(adapter, batch)[0], expected[0])


@real
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_is_the_same_with_liger(checkpointing, recipe, interpreter):
    compare_runs(recipe, gradient_checkpointing=checkpointing)
