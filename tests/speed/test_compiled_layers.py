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
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import RunOptions, read
from adapterhub.speed import compiled_layers as module
from adapterhub.speed.compiled_layers import compiled_layers
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.matrix import REFUSED, example
from tests.kit.runs import Notes, adapter_bytes, changed
from tests.kit.task_cases import CASES
from tests.kit.tiny_adapters import loss_and_gradients

ARCHITECTURE = "llama"  # of the methods; the method of the architectures is lora
SOME = [("lora", "bert")]
# A layer of DeBERTa reads a value of a tensor, which torch cannot compile in one graph.
NOT_COMPILED = ("lora", "deberta")
ALL = [(m, ARCHITECTURE) for m in sorted(METHODS)] + [
    ("houlsby" if a == "xlnet" else "lora", a) for a in tiny_models.ARCHITECTURES
]
CELLS = ALL if tiny_models.FULL_MATRIX else SOME
ON = RunOptions(compile=True)
full_matrix = pytest.mark.skipif(not tiny_models.FULL_MATRIX, reason="the full matrix: minutes")
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
    """Return a batch of training, and in the full matrix one of evaluation."""
    training = with_and_without_padding(labelled(model, 3, 9, True))
    evaluation = with_and_without_padding(labelled(model, 2, 6, False))
    return Trial(training, evaluation if tiny_models.FULL_MATRIX else ())


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


@pytest.mark.parametrize(
    ("method", "architecture"), [c for c in CELLS if c not in REFUSED and c != NOT_COMPILED]
)
def test_a_step_is_the_same_for_batches_of_all_sizes(method, architecture, graphs):
    adapter = attached(method, architecture)
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


@full_matrix
@pytest.mark.parametrize("method", ["lora(dropout=0.5)", "bitfit"])
def test_generated_code_computes_the_same(method):
    adapter = attached(method, "bert")
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


@pytest.mark.parametrize(
    ("options", "processes", "reason"),
    [
        (
            RunOptions(compile=True, gradient_checkpointing=True),
            "1",
            "train.gradient_checkpointing=true",
        ),
        (ON, "2", "several processes train"),
    ],
)
def test_options_that_exclude_it_are_named(options, processes, reason, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    unchanged(attached("lora", "bert"), [], f"train.compile=true has no effect: {reason}", options)


def test_calls_with_a_cache_are_not_compiled(graphs):
    adapter = attached("lora", "llama")
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


@full_matrix
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


class Noted(Notes):
    """Counts the graphs at each note."""

    def __init__(self, graphs) -> None:
        super().__init__()
        self.graphs, self.counts = graphs, []

    def note(self, text: str) -> None:
        self.counts.append((len(self.graphs), text))


@full_matrix
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_task_trains_and_evaluates_the_same(name, backbones, tmp_path, graphs):
    case = CASES[name]
    source = str(case.data(tmp_path))
    words = ["method=lora", "train.max_steps=6", "train.batch_size=8", "train.eval_every=3"]
    words += ["train.tensorboard=false", "train.report=false", *case.words]
    data = {"data": {"train": source, "eval": source}, "task": case.task}
    results = {}
    for where in ("false", "true"):
        flags = {"backbone": str(backbones(case.backbone)), "output": str(tmp_path / where)}
        notes = Noted(graphs)
        recipe = read(None, [*words, f"train.compile={where}"], flags | data)
        results[where] = run(recipe, notes).result.history, adapter_bytes(recipe.output)
    assert results["true"] == results["false"]
    (count,) = [count for count, text in notes.counts if "compiled in" in text]
    # Generating calls layers in another way, from the same rows on in each evaluation.
    later = 2 if name == "seq2seq" else 0
    assert 0 < count == len(graphs) - later, "compiled before the first step"
