"""Layers are compiled one by one, for batches of all lengths, and compute what they computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import adapterhub as ah
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed import compiled_layers as module
from adapterhub.speed.compiled_layers import compiled_layers
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.runs import Notes, adapter_bytes, changed
from tests.kit.selection import ALL
from tests.kit.tiny_adapters import loss_and_gradients

# A layer of DeBERTa reads a value of a tensor, which torch cannot compile in one graph.
NOT_COMPILED = ("lora", "deberta")
ON = RunOptions(compile=True)
nightly = pytest.mark.skipif(not ALL, reason="ADAPTERHUB_TESTS=all: a minute")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


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

    monkeypatch.setattr(module, "BACKEND", backend)
    return compiled


def labelled(model: Any, rows: int, length: int, padded: bool) -> dict[str, Tensor]:
    """Return a batch of training."""
    batch = tiny_models.batch(rows, length, seed=length)
    batch["attention_mask"][0, 0 if padded else length :] = 0
    if model.config.model_type in tiny_models.WITHOUT_CLASSIFIER:
        return batch | {"labels": batch["input_ids"]}
    return batch | {"labels": torch.arange(rows) % 3}


def attached(method: str, architecture: str) -> Any:
    """Return an adapter that changes outputs, on a tiny model, ready to train."""
    adapter = ah.attach(tiny_models.usual_model(architecture), example(method))
    tiny_models.scramble(adapter)
    adapter.train_mode(False)
    adapter.model.config.use_cache = False  # as in training
    return adapter


def some_batches(model: Any) -> Trial:
    """Return a batch of training."""
    return Trial(with_and_without_padding(labelled(model, 3, 9, True)))


def one_batch(model: Any) -> Trial:
    """Return a batch of training without a mask, for which a layer is compiled once."""
    ids = tiny_models.batch()["input_ids"]
    batch = {"input_ids": ids, "labels": torch.arange(3)}
    return Trial([batch])


@contextmanager
def compiled(
    adapter: Any, notes: list[str], options: RunOptions = ON, batches: Any = some_batches
) -> Iterator[None]:
    """Compile the layers inside."""
    layers = compiled_layers(adapter, options, lambda: batches(adapter.model), notes.append)
    with Speedups([layers] if layers else [], notes.append) as speedups:
        if layers:
            speedups.enter(Engine(AdapterTrainee(adapter), RunOptions()))
        yield


def test_a_step_is_the_same_for_batches_of_all_sizes(graphs):
    adapter = attached("lora", "bert")
    sizes = ((4, 12, True), (5, 7, False), (6, 6, True), (1, 8, False))
    batches = [labelled(adapter.model, *size) for size in sizes]
    expected = [loss_and_gradients(adapter, batch) for batch in batches]
    notes: list[str] = []
    with compiled(adapter, notes):
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
    batch = labelled(adapter.model, 4, 12, True)
    expected = loss_and_gradients(adapter, batch)
    notes: list[str] = []
    with compiled(adapter, notes):
        assert "compiled in" in notes[0]
        torch.testing.assert_close(
            loss_and_gradients(adapter, batch), expected, atol=1e-4, rtol=1e-3
        )


def unchanged(adapter: Any, notes: list[str], reason: str, options: RunOptions = ON) -> None:
    """Compile, and check that nothing is compiled, for a reason."""
    batch = labelled(adapter.model, 3, 9, True)
    expected = loss_and_gradients(adapter, batch)
    with compiled(adapter, notes, options, one_batch):
        assert all(map(torch.equal, loss_and_gradients(adapter, batch), expected))
        assert not any("_compiled_call_impl" in vars(m) for m in adapter.model.modules())
    (note,) = notes
    assert reason in note


def test_what_torch_cannot_compile_is_computed_as_ever(graphs):
    unchanged(attached(*NOT_COMPILED), [], "layers are not compiled: ")


def without_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler")


def wrong(graph, inputs):
    return lambda *values: [1.1 * each for each in graph(*values)]


@pytest.mark.parametrize(
    ("backend", "reason"), [(without_compiler, "no C++ compiler"), (wrong, "would be different")]
)
def test_a_compiler_that_fails_or_computes_something_else_is_not_used(backend, reason, monkeypatch):
    monkeypatch.setattr(module, "BACKEND", backend)
    unchanged(attached("lora", "bert"), [], reason)


def test_options_and_calls_that_exclude_it_are_named(graphs, monkeypatch):
    words, adapter = "train.compile=true has no effect: ", attached("lora", "llama")
    recomputed = replace(ON, gradient_checkpointing=True)
    unchanged(adapter, [], f"{words}train.gradient_checkpointing=true", recomputed)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        unchanged(adapter, [], f"{words}several processes train")
    adapter.model.config.use_cache = True
    unchanged(adapter, [], "they are called with a cache")
    assert not graphs


@pytest.fixture
def recipe(recipe_with):
    """Two epochs of a method on 40 rows, compiled."""
    words = ["method=lora", "train.epochs=2", "train.batch_size=8", "train.eval_every=epoch"]
    words += ["train.tensorboard=false", "train.report=false", "torch_compile=true", "data.rows=40"]
    return recipe_with(*words)


def test_a_run_resumes_to_the_same_bytes(recipe, graphs):
    whole, cut = (
        changed(recipe, "whole", "lora", save_every=5),
        changed(recipe, "cut", "lora", save_every=5),
    )
    plain, notes = changed(recipe, "plain", "lora", compile=False), Notes()
    run(whole, notes)
    assert len(notes.about("compiled")) == 1
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(5))
    count = len(graphs)
    run(cut, Notes(), resume=True)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)
    run(plain, Notes())
    assert count == len(graphs), "the compilation is shared, and a plain run has none"
    assert adapter_bytes(plain.output) == adapter_bytes(whole.output)


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
    new_process(1)
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(5))
    new_process(2)
    run(cut, Notes(), resume=True)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_layers_that_are_replayed_are_not_compiled(recipe, graphs):
    notes = Notes()
    run(changed(recipe, "head", "head"), notes)
    assert notes.about("compiled") == []
    recipe = replace(recipe, data=replace(recipe.data, eval="none"))
    staged = changed(recipe, "staged", "unfreeze", epochs=3, max_steps=12)
    run(staged, notes)
    stages = [note[:8] for note in notes.about("compiled")]
    assert stages[:2] == ["1 layer ", "2 layers"]
    plain = changed(recipe, "plain", "unfreeze", epochs=3, max_steps=12, compile=False)
    run(plain, Notes())
    assert adapter_bytes(plain.output) == adapter_bytes(staged.output)
