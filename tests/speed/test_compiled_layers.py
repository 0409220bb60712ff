"""Layers that are compiled, and Liger's kernels, compute what the layers computed, or are not used.

Kernels of Liger itself run with `make liger`, by Triton's interpreter; the others are stand-ins.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import Recipe, RunOptions
from adapterhub.speed.compiled_layers import check_installed, compiled_layers, liger_kernels
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.matrix import ALL_CELLS, REFUSED, example
from tests.kit.runs import Notes, adapter_bytes, changed
from tests.kit.selection import ALL
from tests.kit.tiny_adapters import loss_and_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
ON = {compiled_layers: RunOptions(compile=True), liger_kernels: RunOptions(liger=True)}


def attached(method: Any, architecture: str, **config: Any) -> Any:
    """Return an adapter that changes outputs, on a tiny model, ready to train."""
    adapter = ah.attach(tiny_models.usual_model(architecture, **config), method)
    tiny_models.scramble(adapter)
    adapter.train_mode(False)
    adapter.model.config.use_cache = False  # as in training
    return adapter


def labelled(model: Any, rows: int = 3, length: int = 7, padding: int = 2) -> dict[str, Tensor]:
    """Return a batch of training, whose first row ends with padding."""
    batch = tiny_models.batch(rows, length, seed=length)
    batch["attention_mask"][0, length - padding :] = 0
    if model.config.model_type in tiny_models.WITHOUT_CLASSIFIER:
        return batch | {"labels": batch["input_ids"]}
    return batch | {"labels": torch.arange(rows) % 3}


@contextmanager
def used(
    kind: Callable[..., Any], adapter: Any, options: RunOptions | None = None
) -> Iterator[list[str]]:
    """Compile the layers, or use kernels, inside, if it may be; yield what is said of it."""
    notes: list[str] = []
    batches = with_and_without_padding(labelled(adapter.model))
    found = kind(adapter, options or ON[kind], lambda: Trial(batches, batches), notes.append)
    with Speedups([found] if found else [], notes.append) as speedups:
        if found:
            speedups.enter(Engine(AdapterTrainee(adapter), RunOptions()))
        yield notes


def state_of(model: Any) -> dict[Any, Any]:
    """Return what each module has, and what the file of Llama defines."""
    from transformers.models.llama import modeling_llama

    modules = {name: {**vars(m)} for name, m in model.named_modules()}
    return modules | {"file": dict(vars(modeling_llama))}


def unchanged(kind: Any, adapter: Any, reason: str, options: RunOptions | None = None) -> None:
    """Check that layers compute as ever, for a reason."""
    batch, before = labelled(adapter.model), state_of(adapter.model)
    expected = loss_and_gradients(adapter, batch)
    with used(kind, adapter, options) as notes:
        assert state_of(adapter.model) == before
        assert all(map(torch.equal, loss_and_gradients(adapter, batch), expected))
    (note,) = notes
    assert reason in note


# Layers are compiled one by one, for batches of all lengths.


# A layer of DeBERTa reads a value of a tensor, which torch cannot compile in one graph.
NOT_COMPILED = ("lora", "deberta")
nightly = pytest.mark.skipif(not ALL, reason="ADAPTERHUB_TESTS=all: a minute")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """Compile with a backend that changes nothing and keeps the graphs."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return lookup_backend("eager")(graph, inputs)

    monkeypatch.setattr("adapterhub.speed.compiled_layers.BACKEND", backend)
    return compiled


def test_a_step_is_the_same_for_batches_of_all_sizes(graphs):
    adapter = attached("lora", "bert", num_hidden_layers=1)
    sizes = ((4, 12, 2), (5, 7, 0), (6, 6, 6), (1, 8, 0))
    batches = [labelled(adapter.model, *size) for size in sizes]
    expected = [loss_and_gradients(adapter, batch) for batch in batches]
    with used(compiled_layers, adapter) as notes:
        (note,) = notes
        assert "compiled in" in note
        count = len(graphs)
        assert count > 0
        for batch, tensors in zip(batches, expected, strict=True):
            torch.testing.assert_close(
                loss_and_gradients(adapter, batch), tensors, atol=1e-5, rtol=1e-4
            )
        assert len(graphs) == count, "nothing is compiled after the first batch"
    assert not any("_compiled_call_impl" in vars(m) for m in adapter.model.modules())
    torch.testing.assert_close(loss_and_gradients(adapter, batches[0]), expected[0])


@nightly
@pytest.mark.timeout(900)
def test_generated_code_computes_the_same():
    adapter = attached("lora", "bert")
    batch = labelled(adapter.model, 4, 12)
    expected = loss_and_gradients(adapter, batch)
    with used(compiled_layers, adapter) as notes:
        assert "compiled in" in notes[0]
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-4, rtol=1e-3
        )


def test_what_torch_cannot_compile_is_computed_as_ever(graphs):
    unchanged(compiled_layers, attached(*NOT_COMPILED), "layers are not compiled: ")


def without_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler")


def wrong(graph, inputs):
    return lambda *values: [1.1 * each for each in graph(*values)]


@pytest.mark.parametrize(
    ("backend", "reason"), [(without_compiler, "no C++ compiler"), (wrong, "would be different")]
)
def test_a_compiler_that_fails_or_computes_something_else_is_not_used(backend, reason, monkeypatch):
    monkeypatch.setattr("adapterhub.speed.compiled_layers.BACKEND", backend)
    unchanged(compiled_layers, attached("lora", "bert", num_hidden_layers=1), reason)


def test_options_and_calls_that_exclude_it_are_named(graphs, monkeypatch):
    words, adapter = "train.compile=true has no effect: ", attached("lora", "llama")
    recomputed = RunOptions(compile=True, gradient_checkpointing=True)
    reason = f"{words}train.gradient_checkpointing=true"
    unchanged(compiled_layers, adapter, reason, recomputed)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        unchanged(compiled_layers, adapter, f"{words}several processes train")
    adapter.model.config.use_cache = True
    unchanged(compiled_layers, adapter, "they are called with a cache")
    assert not graphs


WORDS = ["method=lora", "train.tensorboard=false", "train.report=false"]


@pytest.fixture
def recipe(recipe_with):
    """Two epochs of a method on 16 rows, compiled."""
    words = ["train.epochs=2", "train.batch_size=8", "train.eval_every=epoch", "data.rows=16"]
    return recipe_with(*WORDS, *words, "torch_compile=true")


@nightly
@pytest.mark.timeout(900)
def test_generated_code_resumes_to_the_same_bytes(recipe, tmp_path, monkeypatch):
    """The code that is generated depends on sizes: a resumed run must not begin with others."""

    def new_process(number: int) -> None:
        torch._dynamo.reset()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"cache{number}"))

    recipe = replace(recipe, data=replace(recipe.data, eval="none"))
    options: dict[str, Any] = {"save_every": 5, "max_steps": 12, "mixed_precision": "bf16"}
    names = ("whole", "cut")
    whole, cut = (changed(recipe, name, "lora", **options) for name in names)
    new_process(0)
    notes = Notes()
    run(whole, notes)
    assert len(notes.about("compiled")) == 1
    new_process(0)  # its first steps have the same sizes
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(5))
    new_process(1)
    run(cut, Notes(), resume=True)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_layers_that_are_replayed_are_not_compiled(recipe, graphs):
    notes = Notes()
    run(changed(recipe, "head", "head"), notes)
    assert notes.about("compiled") == []
    recipe = replace(recipe, data=replace(recipe.data, eval="none"))
    staged = changed(recipe, "staged", "unfreeze")
    run(staged, notes)
    stages = [note[:8] for note in notes.about("compiled")]
    assert stages[:2] == ["1 layer ", "2 layers"]
    plain = changed(recipe, "plain", "unfreeze", compile=False)
    run(plain, Notes())
    assert adapter_bytes(plain.output) == adapter_bytes(staged.output)


# Kernels of Liger, or of the test, in place of norms and of gated layers.


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


def test_kernels_are_used_and_undone(liger):
    """What a run changes is kept."""
    liger()
    adapter = attached("lora", "llama")
    batch, before = labelled(adapter.model), state_of(adapter.model)
    expected = loss_and_gradients(adapter, batch)
    with used(liger_kernels, adapter) as notes:
        changed = [n for n, m in adapter.model.named_modules() if "forward" in vars(m)]
        assert len(changed) == 2 * adapter.model.config.num_hidden_layers + 1
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-6, rtol=1e-5
        )
    assert notes == [
        f"{len(changed)} modules compute by Liger's kernels; train.liger=false for their own"
    ]
    assert state_of(adapter.model) == before
    with used(liger_kernels, adapter):
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
    unchanged(liger_kernels, attached("lora", "llama"), f"Liger's kernels are not used: {reason}")


def test_models_without_kernels_and_several_processes_do_not_use_them(liger, monkeypatch):
    liger()
    unchanged(liger_kernels, attached("lora", "t5"), "not used: it has none for t5")
    adapter, off = attached("lora", "llama"), RunOptions()
    with used(liger_kernels, adapter, off) as notes:
        assert not any("in_place" in vars(module) for module in adapter.model.modules())
    assert notes == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    unchanged(liger_kernels, adapter, "train.liger=true has no effect: several processes train")


def test_it_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(RunOptions())
    with pytest.raises(ConfigError, match=r"needs liger-kernel.*not installed") as raised:
        check_installed(ON[liger_kernels])
    assert "adapterhub[liger]" in str(raised.value)


@pytest.fixture
def liger_recipe(recipe_with, backbones):
    words = ["train.max_steps=4", "train.batch_size=4", "use_liger_kernel=true"]
    return recipe_with(*WORDS, *words, folder=backbones("llama"))


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


def test_a_run_uses_them(liger_recipe, liger, monkeypatch):
    liger()
    monkeypatch.setattr("adapterhub.training.run.check_installed", lambda options: None)
    compare_runs(liger_recipe)


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
    with used(liger_kernels, adapter) as notes:
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-4, rtol=1e-3
        )
    (note,) = notes
    assert ("compute by" in note) == (architecture in FUSED), note
    assert torch.equal(loss_and_gradients(adapter, batch)[0], expected[0])


@real
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_is_the_same_with_liger(checkpointing, liger_recipe, interpreter):
    compare_runs(liger_recipe, gradient_checkpointing=checkpointing)
