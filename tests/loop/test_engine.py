"""Steps: order of batches, gradients, precision, checks, rows divided in any way, checkpointing."""

import itertools
import json
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import adapterhub as ah
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.hooks.composition import RecomputedInContext
from adapterhub.loop import checkpoint, engine, loop
from adapterhub.loop.engine import Engine, LazyBatches, _kept_on_host, batch_order, recompute, share
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import RunOptions, TrainOptions, read
from adapterhub.speed.activation_memory import activation_bytes
from adapterhub.tasks.common import language_models
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.training.run import PreparedRun, prepare, training_session
from tests.kit import tiny_models
from tests.kit.data import mixed_recipe, write_json_lines
from tests.kit.runs import Data, Learner, Net, Ticks, bits, final_bytes, fit, scores
from tests.kit.selection import long_table
from tests.kit.task_cases import CASES


class Changed(Net):
    """A network whose loss a function changes in training."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        out = super().forward(x, labels)
        if self.training:
            out.loss = self.change(out.loss)
        return out


@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("read_each_step", [True, False])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    tmp_path, broken, read_each_step, monkeypatch
):
    """The loss of step 5 is not finite, or only its gradient."""
    calls = itertools.count(1)

    def change(loss: Tensor) -> Tensor:
        if next(calls) != 13:
            return loss
        return loss * math.nan if broken == "loss" else loss + (0 * loss).sqrt()

    monkeypatch.setattr(loop, "_is_free_to_read", lambda device: read_each_step)
    with pytest.raises(TrainingError, match=r"step 5 has loss") as error:
        fit(tmp_path, trainee=Learner(Changed(change)))
    assert "learning_rate" in str(error.value)
    saved = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last")
    assert saved.progress["step"] == 3
    assert all(bool(t.isfinite().all()) for t in saved.tensors.values())


def test_a_tensor_that_is_not_finite_is_not_saved(tmp_path):
    trainee, values = Learner(), scores()

    def evaluate() -> Mapping[str, float]:
        metrics = values()
        if metrics["accuracy"] == 0.9:
            trainee.tensors()["body.3.bias"][0] = math.inf
        return metrics

    with pytest.raises(TrainingError, match=r"no longer finite: body\.3\.bias"):
        fit(tmp_path, trainee=trainee, evaluate=evaluate, metric="accuracy")
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last").progress["step"] == 3


class Unused(Net):
    """Parameters that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.scheduled = nn.Parameter(torch.zeros(3), requires_grad=False)


class Forgetful(Learner):
    """Hands only matrices to the optimizer, but claims to train everything."""

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.ndim > 1]
        return [{"name": "all", "lr": 0.01, "params": params}]


BIASES = [f"body.{n}.bias: not in the optimizer" for n in (0, 3)]
HALF = [f"body.{n}.{kind}: torch.bfloat16" for n in (0, 3) for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("trainee", "offenders"),
    [
        (lambda: Learner(Unused()), ["spare.weight: no gradient", "spare.bias: no gradient"]),
        (Forgetful, BIASES),
        (lambda: Learner(Changed(lambda loss: loss * 0)), ["every gradient is zero"]),
        (lambda: Learner(Net().bfloat16()), HALF),
        (lambda: Learner(Net().requires_grad_(False)), []),
    ],
)
def test_what_does_not_train_is_listed_at_the_first_step(tmp_path, trainee, offenders):
    data = Data()
    with pytest.raises(TrainingError, match=None if offenders else "no tensors") as error:
        fit(tmp_path, trainee=trainee(), data=data)
    assert list(error.value.offenders) == offenders
    assert data.collated <= 3
    data.collate = lambda indices: {"x": data.x[indices]}
    with pytest.raises(TrainingError, match="no loss"):
        fit(tmp_path / "no loss", data=data)


def test_out_of_memory_says_what_to_change(tmp_path):
    def fail(loss: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Learner(Changed(fail)))
    assert error.value.hint == (
        "train.batch_size=2 train.gradient_accumulation=6; train.gradient_checkpointing=true; "
        "train.max_length=64, if that cuts few texts; quantize=nf4, or train.mixed_precision=bf16"
    )


def test_bf16_and_fp16_keep_fp32_tensors_and_resume_exactly(tmp_path):
    seen: set[torch.dtype] = set()
    trainee = Learner()
    trainee.model.get_submodule("body.0").register_forward_hook(
        lambda module, inputs, output: seen.add(output.dtype)
    )
    half = {"mixed_precision": "bf16", "tensorboard": False}
    fit(tmp_path / "bf16", TrainOptions(epochs=1, **half), trainee=trainee)
    assert seen == {torch.bfloat16}
    assert {t.dtype for t in trainee.tensors().values()} == {torch.float32}
    options = TrainOptions(epochs=2, mixed_precision="fp16", log_every=1, tensorboard=False)
    fit(tmp_path / "whole", options)
    with pytest.raises(TrainingError, match="stopped by a signal"):
        fit(tmp_path / "cut", options, data=Data(Ticks(9, signal.SIGINT)))
    fit(tmp_path / "cut", options, resume=True)
    saved = checkpoint.load_checkpoint(tmp_path / "cut" / "checkpoints" / "last")
    assert {t.dtype for t in saved.tensors.values()} == {torch.float32}
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


def test_a_precision_that_the_device_lacks_is_refused(tmp_path, monkeypatch):
    lacks = Mock(side_effect=ValueError("fp16 mixed precision requires a GPU"))
    monkeypatch.setattr(engine, "Accelerator", lacks)
    with pytest.raises(ConfigError, match=r"train\.mixed_precision=fp16 fails on cpu"):
        fit(tmp_path, TrainOptions(mixed_precision="fp16"))


lengths = st.lists(st.integers(1, 512), max_size=300)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)


@given(lengths=lengths, size=sizes, epoch=st.integers(0, 50), seed=seeds, grouped=st.booleans())
def test_every_index_is_in_exactly_one_batch(lengths, size, epoch, seed, grouped):
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    batches = batch_order(lengths, size, epoch, seed, grouped)
    assert np.random.rand() == expected, "the global state is left alone"
    torch.manual_seed(1)
    assert batch_order(lengths, size, epoch, seed, grouped) == batches
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(1 <= len(batch) <= size for batch in batches)


@pytest.mark.parametrize(("grouped", "least", "most"), [(True, 1, 1.05), (False, 1.7, 9)])
def test_the_order_is_another_in_each_epoch_and_grouping_saves_nearly_all_padding(
    grouped, least, most
):
    lengths = np.random.default_rng(0).integers(1, 128, 2000).tolist()
    orders = [batch_order(lengths, 16, e, s, grouped) for e in range(3) for s in range(3)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in orders[0])
    assert least * sum(lengths) <= padded < most * sum(lengths)
    means = [np.mean([lengths[i] for i in batch]) for batch in orders[0]]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3
    assert [i for batch in orders[0] for i in batch] != list(range(2000))


@given(start=st.integers(0, 100), size=st.integers(1, 30), world=st.integers(1, 8))
def test_processes_share_a_window_evenly(start, size, world):
    window = range(start, start + size)
    parts = [share(window, rank, world) for rank in range(world)]
    assert {len(part) for part in parts} == {-(-size // world)}
    assert {i for part in parts for i in part} == set(window)
    assert world > 1 or parts[0] == list(window)


ROWS = 8
WHOLE, ONE_BY_ONE, UNEVEN = [ROWS], [1] * ROWS, [2, 5, 1]
# The in-batch negatives of `multiple-negatives` and the order of `cosent` are of a whole batch.
# Those of embedding depend on each other; the rows of grpo are texts that the model samples.
OTHERS = ("embedding", "grpo")
TASKS = {name: (name, case.task) for name, case in CASES.items() if name not in OTHERS}
TASKS |= {
    "weighted": ("classification", "classification(class_weights={pos: 3, neg: 0.5})"),
    "weightless": ("classification", "classification(class_weights={pos: 3, neg: 0})"),
    "weighted-tagging": ("tagging", "tagging(class_weights=balanced)"),
    "weighted-images": ("image-classification", "image-classification(class_weights={'1': 3})"),
    "packed": ("causal-lm", "causal-lm(pack=true)"),
    "text": ("masked-lm", "causal-lm(data=text)"),
    "generating": ("prompted", "prompted(model=causal-lm, template='{text} is {mask}', "
                   "words={'pos': 'good', 'neg': 'bad'})"),
    "orpo": ("preference", "preference(loss_type=orpo)"),
    "triplet": ("embedding", "embedding(loss_type=triplet)"),
}  # fmt: skip
BACKBONES = {"text": "llama", "generating": "llama"}


def divided(prepared: PreparedRun, sizes: Sequence[int], world: int) -> list[Tensor]:
    """Return loss and gradients of a step on all rows, in batches of some sizes."""
    order, start = [], 0
    for size in sizes:
        order.append(list(range(start, start + size)))
        start += size
    found: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_update", lambda self, done: torch.zeros(()))
        session = training_session(prepared, Reporter(), resume=False)
        one, tensors = session.engine, session.trainee.tensors()
        prepared.model.eval()  # heads have dropout
        batches = LazyBatches(order, lambda indices: prepared.train.batch(indices))
        window = range(len(order))
        items = sum(one.items(batches[n]) for n in window)
        patch.setattr(engine, "total", lambda number: items)
        for one.rank in range(world):
            one.world = world
            one.step(batches, window, 1.0)
            gradients = [tensor.grad for tensor in tensors.values()]
            found.append([one.unread[-1][0], *(g.clone() for g in gradients if g is not None)])
            for tensor in tensors.values():
                tensor.grad = None
    return [torch.stack(each).mean(0) for each in zip(*found, strict=True)]


def assert_divided_alike(prepared: PreparedRun, *ways: tuple[Sequence[int], int]) -> None:
    """A step is the same in batches of some sizes, in several processes, as in one batch."""
    expected = divided(prepared, WHOLE, 1)
    assert 0 < expected[0] < math.inf
    for sizes, world in ways:
        for found, wanted in zip(divided(prepared, sizes, world), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)


def prepared_run(case: str, task: str, backbone: Path, folder: Path) -> PreparedRun:
    """Prepare a run on some rows, one of which has no labels where that is possible."""
    file = str(CASES[case].data(folder))
    if "triplet" in task:
        rows = map(json.loads, Path(file).read_text().splitlines())
        write_json_lines(Path(file), [row | {"negative": f"the {row['anchor']}"} for row in rows])
    flags = {
        "backbone": str(backbone), "output": str(folder / "run"), "task": task,
        "method": "lora(rank=2)", "data": {"train": file, "eval": file},
    }  # fmt: skip
    options = ("train.tensorboard=false", "train.report=false", "train.frozen_cache=off")
    prepared = prepare(read(None, options, flags))
    rows: Any = prepared.train.rows
    labels = rows[0].get("labels") if isinstance(rows, list) else None
    if isinstance(labels, list) and isinstance(labels[0], int) and case != "speech-recognition":
        rows[0]["labels"] = [IGNORED] * len(labels)
    return prepared


@long_table("name", TASKS, 6, nightly=2)
def test_a_step_is_the_same_however_its_rows_are_divided(name, backbones, tmp_path):
    case, task = TASKS[name]
    backbone = backbones(BACKBONES.get(name, CASES[case].backbone))
    prepared = prepared_run(case, task, backbone, tmp_path)
    # Of three batches, two processes compute one twice.
    assert_divided_alike(prepared, (ONE_BY_ONE, 1), (UNEVEN, 2))


@pytest.mark.parametrize("name", ["causal-lm", "seq2seq", "masked-lm", "image-text-to-text"])
def test_the_loss_below_the_head_and_in_evaluation_is_divided_alike(
    name, backbones, tmp_path, monkeypatch
):
    monkeypatch.setattr(language_models, "_WORTHWHILE", 0)
    monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 300})
    case = CASES[name]
    prepared = prepared_run(name, case.task, backbones(case.backbone), tmp_path)
    assert_divided_alike(prepared, (UNEVEN, 1))
    task, model = prepared.data.task, prepared.model
    losses = [task.evaluate(model, prepared.train, size)["loss"] for size in (1, ROWS)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_steps_of_a_mixture_are_divided_alike(backbone, tmp_path):
    assert_divided_alike(prepare(mixed_recipe(backbone, tmp_path)), (UNEVEN, 2))


class BertLearner(Learner):
    """A tiny BERT whose query weights and classifier train; the rest is frozen."""

    def __init__(self) -> None:
        super().__init__(tiny_models.model("bert", num_hidden_layers=3))
        for name, p in self.model.named_parameters():
            p.requires_grad_("query" in name or "classifier" in name)

    def train_mode(self, dropout: bool) -> None:
        self.model.train(dropout)

    def attributes(self) -> dict[str, set[str]]:
        """The names of what each module has, but for its hooks."""
        return {n: vars(m).keys() - {"_forward_hooks"} for n, m in self.model.named_modules()}


def bert_batches(epoch: int) -> LazyBatches:
    ids = torch.randint(1, 40, (16, 9), generator=torch.Generator().manual_seed(1))
    labels = (ids[:, 1] > 20).long()
    order = batch_order([9] * 16, 4, epoch, 0, True)
    return LazyBatches(order, lambda i: {"input_ids": ids[i], "labels": labels[i]})


def fit_bert(output: Path, **options: Any) -> tuple[int, dict[str, bytes]]:
    """Train; return the number of calls of one layer, and the last tensors.

    The model is left as it was: its attributes, its mode, and what is frozen.
    """
    trainee, calls = BertLearner(), []
    before, names = trainee.attributes(), trainee.tensors().keys()
    frozen = {n: p for n, p in trainee.model.named_parameters() if n not in names}
    frozen_bytes = bits(frozen)
    attention = trainee.model.get_submodule("bert.encoder.layer.1.attention")
    handle = attention.register_forward_hook(lambda *_: calls.append(1))
    options = RunOptions(tensorboard=False, epochs=2, **options)
    fit(output, options, trainee=trainee, data=bert_batches, evaluate=lambda: {"loss": 1.0})
    handle.remove()
    assert trainee.attributes() == before
    assert bits(frozen) == frozen_bytes
    assert all(p.grad is None for p in trainee.model.parameters())
    modules = [*trainee.model.modules()]
    assert not any(m.training or getattr(m, "gradient_checkpointing", False) for m in modules)
    return len(calls), bits(checkpoint.load_checkpoint(output / "checkpoints" / "last").tensors)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    """Dropout of what is frozen is off by default; bf16 leaves the model as it was, too."""
    ended = []
    for dropout in (False, True):
        calls, plain = fit_bert(tmp_path / f"plain-{dropout}", dropout=dropout)
        options = {"dropout": dropout, "gradient_checkpointing": True}
        again = fit_bert(tmp_path / f"again-{dropout}", **options)
        assert calls == 8
        assert again == (16, plain)
        ended.append(plain)
    assert ended[0] != ended[1]
    fit_bert(tmp_path / "bf16", mixed_precision="bf16")


def test_gradient_checkpointing_needs_layers_that_can(tmp_path):
    with pytest.raises(ConfigError, match="Net has no layer"):
        fit(tmp_path, RunOptions(gradient_checkpointing=True))
    with pytest.raises(ConfigError, match="out of range") as error:
        RunOptions(offload_activations=True)
    assert "only with gradient_checkpointing=true" in str(error.value)


def test_inputs_are_kept_on_the_host_and_nothing_else(tmp_path, monkeypatch):
    """On a CPU there is nothing to move, so what would be moved is counted here."""
    kept: list[torch.Size] = []

    @contextmanager
    def counted(inputs):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape) or tensor.clone(), lambda tensor: tensor
        ):
            yield

    _, expected = fit_bert(tmp_path / "plain")
    on = {"gradient_checkpointing": True, "offload_activations": True}
    _, unmoved = fit_bert(tmp_path / "cpu", **on)
    monkeypatch.setattr(engine, "_kept_on_host", counted)
    _, moved = fit_bert(tmp_path / "counted", **on)
    assert unmoved == moved == expected
    batches = 2 * 4
    assert kept.count(torch.Size([4, 9, 32])) == batches * 3, "the input of each of three layers"
    assert {len(shape) for shape in kept} <= {0, 1, 3, 4}, "no weight of a projection"

    # A context moves what is saved only if it is not on the host.
    assert isinstance(_kept_on_host([torch.zeros(1), None]), nullcontext)
    assert isinstance(_kept_on_host([torch.zeros(1, device="meta")]), save_on_cpu)


def switches(model: Any) -> list[tuple[bool, Any]]:
    """Return what checkpoints each layer, which a pass with adapters wraps."""
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    assert layers
    functions = [m._gradient_checkpointing_func for m in layers]
    own = [f.checkpoint if isinstance(f, RecomputedInContext) else f for f in functions]
    return [(m.gradient_checkpointing, f) for m, f in zip(layers, own, strict=True)]


@pytest.mark.parametrize("architecture", ["bert", "llama", "t5"])
def test_a_users_own_checkpointing_comes_back(architecture):
    """Behind a prediction of memory, and behind training."""
    model = tiny_models.model(architecture, "features")
    tiny_models.enable_gradient_checkpointing(model)
    before = switches(model)
    assert all(on for on, _ in before)
    adapter = ah.attach(model, "lora")
    for recomputed in (False, True):
        activation_bytes(adapter, 2, 8, recomputed)
        assert switches(model) == before
    ah.detach(model)
    with recompute(model, True) as layers:
        assert layers is not None
        layers.apply()
        assert switches(model) != before
    assert switches(model) == before


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"batch_size": 8}, "train.batch_size=4 train.gradient_accumulation=2"),
        ({}, "train.gradient_checkpointing=true"),
        ({"gradient_checkpointing": True}, "train.offload_activations=true"),
        ({"gradient_checkpointing": True, "offload_activations": True}, "train.max_length=64"),
    ],
)
def test_the_first_advice_where_memory_ends_is_what_costs_least(options, first):
    error = engine._out_of_memory(RunOptions(**{"batch_size": 1, "max_length": 128} | options))
    assert error.hint.split("; ")[0].startswith(first)
