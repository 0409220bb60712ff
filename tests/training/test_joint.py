"""Runs that are trained together end as each does alone, whichever methods they have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_runs import TinyRun, model_for, saved, train_alone, train_jointly
from matrix import CELLS, example, representatives
from selection import ALL, rotate
from tiny_models import FULL_MATRIX, MATRIX
from training_runs import final_bytes, lines

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError, TrainingError
from adapterhub.methods import METHODS
from adapterhub.training import checkpoint, joint
from adapterhub.training.joint import train_together
from adapterhub.training.loop import TrainingResult, train
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.recipe import Recipe, read
from adapterhub.training.report import Reporter
from adapterhub.training.run import training_session

ONE = "bert" if "bert" in MATRIX else MATRIX[0]
# In fp32, after steps of 0.003: what the order of summation changes.
TENSORS, LOSSES = {"rtol": 1e-4, "atol": 3e-5}, {"rel": 1e-5}
# Adam divides gradients by their own size, also those that are zero but for rounding: of mixing
# weights that are shifted alike, and of what DeBERTa and others do not use.
LOOSE = {"rtol": 1e-4, "atol": 1e-4}
ROUTED = {name for name, method in METHODS.items() if not method.trains_backbone}
# By default, one method of each signature.
EACH = ROUTED | {"norms"} if ALL else {*map(representatives().get, ROUTED | {"norms"})}
METHOD_CELLS = [
    (method, architecture)
    for method, architecture in CELLS
    if FULL_MATRIX or (architecture == ONE and method in EACH)
]
# DeBERTa passes its relative positions, of no row, through two projections.
NOT_BY_ROW = {"deberta-v2", "deberta"}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of the runs of each shared pass."""
    passes: list[tuple[str, ...]] = []
    compute = joint._JointRuns._compute_shared

    def noted(self: Any, group: Sequence[Any]) -> None:
        compute(self, group)
        passes.append(tuple(run.adapter.name for run in group))

    monkeypatch.setattr(joint._JointRuns, "_compute_shared", noted)
    return passes


def check_equal(output: Path, count: int, tolerance: dict[str, float] = TENSORS) -> None:
    """Compare the checkpoints and reports of runs together with those of the runs alone."""
    for number in range(count):
        alone, together = (output / way / str(number) for way in ("alone", "together"))
        for name in ("last", "best"):
            if (alone / "checkpoints" / name).exists():
                one, other = saved(alone, name), saved(together, name)
                assert one.tensors.keys() == other.tensors.keys()
                for key, tensor in one.tensors.items():
                    torch.testing.assert_close(other.tensors[key], tensor, **tolerance)
        expected, found = lines(alone / "metrics.jsonl"), lines(together / "metrics.jsonl")
        assert [e["event"] for e in found] == [e["event"] for e in expected]
        for one_line, other_line in zip(expected, found, strict=True):
            values = one_line.pop("metrics", None) or {"loss": one_line.pop("loss", 0.0)}
            others = other_line.pop("metrics", None) or {"loss": other_line.pop("loss", 0.0)}
            assert others == pytest.approx(values, **LOSSES)
            assert other_line == one_line


def compare(
    runs: Sequence[TinyRun], output: Path, architecture: str = ONE, **options: Any
) -> list[TrainingResult | AdapterhubError]:
    """Train runs in both ways, compare what they write, and return the results together."""
    tolerance = options.pop("tolerance", TENSORS)
    alone = train_alone(runs, output / "alone", architecture)
    together = train_jointly(runs, output / "together", architecture, **options)
    check_equal(output, len(runs), tolerance)
    assert [type(each) for each in together] == [type(each) for each in alone]
    return together


def three(*specs: Any, **options: Any) -> list[TinyRun]:
    """Return runs of these methods, with learning rates and seeds of their own."""
    rates = (0.003, 0.001, 0.002)
    return [
        TinyRun(spec, {"learning_rate": rate, **options}, seed=3 + number)
        for number, (spec, rate) in enumerate(zip(specs, rates, strict=False))
    ]


@rotate(("method", "architecture"), METHOD_CELLS, parts=3)
def test_each_method_trains_as_alone(
    method: str, architecture: str, tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    other = "lora(rank=3, dropout=0.2)" if ("lora", architecture) in CELLS else "pfeiffer"
    runs = three(example(method), other, example(method), epochs=1)
    tolerance = TENSORS if architecture == ONE else LOOSE
    compare(runs, tmp_path, architecture, tolerance=tolerance)
    names = {name for group in shared for name in group}
    if architecture in NOT_BY_ROW:
        assert names <= {"run0", "run1", "run2"}
    else:
        assert ("run0" in names) == ("run2" in names) == (method in ROUTED)
    if architecture == ONE and method in ROUTED - {"prompt", "p-tuning"}:
        assert shared == [("run0", "run1", "run2")] * 3


def test_the_number_of_methods_that_share_passes_is_known() -> None:
    assert len(ROUTED) == 19
    assert len(METHODS) - len(ROUTED) == 7


def test_those_that_share_are_not_disturbed_by_those_that_do_not(
    tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    compare([*three("lora", "bitfit", "houlsby"), TinyRun("unfreeze"), TinyRun("full")], tmp_path)
    assert set(shared) == {("run0", "run2")}
    assert len(shared) == 6


def test_the_order_does_not_matter(tmp_path: Path) -> None:
    runs = three("lora", "prefix", "lora(rank=2, dropout=0.1)")
    train_jointly(runs, tmp_path / "alone")
    train_jointly(runs, tmp_path / "together", order=(2, 0, 1))
    check_equal(tmp_path, 3)


def test_batches_and_lengths_of_runs_may_differ(
    tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    runs = [
        TinyRun("lora", {"batch_size": 3, "eval_every": 3, "save_every": 2}),
        TinyRun("houlsby", {"gradient_accumulation": 2}),
        TinyRun("ia3", {"epochs": 3, "patience": 1}, evaluates=True),
        TinyRun("lora", {"max_steps": 3}, evaluates=False),
    ]
    compare(runs, tmp_path)
    assert {len(group) for group in shared} == {1, 2, 3, 4} - {1}


def test_a_run_that_diverges_ends_alone(tmp_path: Path) -> None:
    runs = three("lora", "lora(rank=2)", "pfeiffer", epochs=4)
    runs[1].options["learning_rate"] = 1e30
    alone = train_alone(runs, tmp_path / "alone")
    together = train_jointly(runs, tmp_path / "together")
    assert isinstance(alone[1], TrainingError)
    assert isinstance(together[1], TrainingError)
    assert "train.learning_rate" in str(together[1])
    for number in (0, 2):
        result = together[number]
        assert isinstance(result, TrainingResult)
        assert result.steps == 12
        one, other = (saved(tmp_path / way / str(number)) for way in ("alone", "together"))
        for key, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[key], tensor, **TENSORS)


class Signal:
    """Sends this process a signal before the n-th batch of a run."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("alone_after", [False, True])
def test_a_signal_stops_all_and_they_resume(tmp_path: Path, alone_after: bool) -> None:
    runs = three("lora", "bitfit", "lora(rank=2, dropout=0.3)", epochs=3)
    train_alone(runs, tmp_path / "alone")
    stopping = [runs[0], replace(runs[1], event=Signal(5)), runs[2]]
    stopped = train_jointly(stopping, tmp_path / "together")
    assert all("stopped by a signal" in str(each) for each in stopped)
    assert all("the state is saved" in str(each) for each in stopped)
    if alone_after:
        model = model_for(ONE)
        adapter = runs[2].attach(model, 2)
        session = runs[2].session(adapter, tmp_path / "together" / "2", resume=True)
        assert train(session).steps == 9
    results = train_jointly(runs, tmp_path / "together", resume=True)
    assert not any(isinstance(each, AdapterhubError) for each in results)
    check_equal(tmp_path, 3)


def test_without_shared_passes_the_bytes_are_those_alone(
    tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    runs = three("lora(dropout=0.2)", "mam", "unfreeze")
    compare(runs, tmp_path, most_tokens=0)
    assert not shared
    for number in map(str, range(3)):
        assert final_bytes(tmp_path / "together" / number) == final_bytes(
            tmp_path / "alone" / number
        )


@pytest.mark.parametrize("option", ["dropout", "gradient_checkpointing"])
def test_options_of_whole_passes_are_computed_alone(
    tmp_path: Path, option: str, shared: list[tuple[str, ...]]
) -> None:
    runs = [*three("lora", "ia3", **{option: True}), TinyRun("lora"), TinyRun("houlsby")]
    compare(runs, tmp_path)
    assert set(shared) == {("run2", "run3")}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_passes_are_shared_in_other_precisions(
    precision: str, tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    runs = three("lora", "houlsby", "lora(rank=2)", mixed_precision=precision)
    train_alone(runs, tmp_path / "alone")
    results = train_jointly(runs, tmp_path / "together")
    assert not any(isinstance(each, AdapterhubError) for each in results)
    assert shared
    for number in range(3):
        one, other = (saved(tmp_path / way / str(number)) for way in ("alone", "together"))
        for key, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[key], tensor, rtol=0.05, atol=0.01)


def test_a_pass_has_no_more_tokens_than_allowed(
    tmp_path: Path, shared: list[tuple[str, ...]]
) -> None:
    compare(three("lora", "ia3", "houlsby"), tmp_path, most_tokens=2 * 4 * 7)
    assert set(shared) == {("run0", "run1")}


def test_exhausted_memory_makes_passes_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = joint._added_to_gradients
    sizes = []

    def exhausted(group: Sequence[Any]) -> Any:
        sizes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError
        return gradients(group)

    monkeypatch.setattr(joint, "_added_to_gradients", exhausted)
    runs = [*three("lora", "ia3", "lora(rank=2, dropout=0.2)"), TinyRun("pfeiffer")]
    compare(runs, tmp_path, order=(1, 0, 3, 2))
    assert sizes == [4, *[2, 2] * 5]


def test_random_numbers_of_the_whole_batch_are_not_shared(
    tmp_path: Path, shared: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.1, True)

    def attached(run: TinyRun, model: Any, number: int) -> Any:
        model.dropout.forward = drawn  # a module that is no dropout of torch
        model.dropout.p = 0.0
        return attach(run, model, number)

    attach = TinyRun.attach
    monkeypatch.setattr(TinyRun, "attach", attached)
    if ONE == "bert":
        compare(three("lora", "ia3", "houlsby"), tmp_path)
        assert not shared


def test_a_loss_that_is_not_one_of_rows_is_computed_alone(
    tmp_path: Path, shared: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = TinyRun.session

    def other_loss(run: TinyRun, *args: Any) -> Any:
        made = session(run, *args)
        if run.method == "ia3":
            made.loss_of_rows = lambda output, batch: output.logits.sum()
        if run.method == "pfeiffer":
            made.loss_of_rows = None
        return made

    monkeypatch.setattr(TinyRun, "session", other_loss)
    compare([*three("lora(dropout=0.1)", "ia3", "houlsby"), TinyRun("pfeiffer")], tmp_path)
    assert shared == [("run0", "run2")] * 5  # all but the one that was tried


def test_an_evaluation_sees_its_own_adapter_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Reporter] = []
    monkeypatch.setattr(Reporter, "close", lambda reporter: closed.append(reporter))
    runs = [replace(run, reporter=Reporter()) for run in three("lora", "bitfit", "mam")]
    model = model_for(ONE)
    adapters = [run.attach(model, number) for number, run in enumerate(runs)]
    sessions = []
    seen: list[tuple[str, ...]] = []

    def watched(evaluate: Callable[[], Any]) -> Callable[[], Any]:
        def watch() -> Any:
            seen.append(tuple(each.name for each in adapters if each.active))
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            return evaluate()

        return watch

    for number, (run, adapter) in enumerate(zip(runs, adapters, strict=True)):
        made = run.session(adapter, tmp_path / str(number))
        assert made.evaluate is not None
        made.evaluate = watched(made.evaluate)
        sessions.append(made)
    started = time.perf_counter()
    results = train_together(sessions)
    seconds = time.perf_counter() - started
    assert sorted(seen) == sorted([(f"run{n}",) for n in range(3)] * 2)
    assert [type(each) for each in results] == [TrainingResult] * 3
    assert not any(adapter.active for adapter in adapters)
    times = [each.seconds for each in results if isinstance(each, TrainingResult)]
    assert sorted(map(id, closed)) == sorted(id(run.reporter) for run in runs)
    assert min(times) > 0
    assert sum(times) < seconds  # each has the time of its own steps


def test_runs_that_cannot_be_trained_together_are_refused(tmp_path: Path) -> None:
    runs = [TinyRun("lora"), TinyRun("lora", {"mixed_precision": "bf16"})]
    sessions = [
        run.session(run.attach(model_for(ONE), number), tmp_path) for number, run in enumerate(runs)
    ]
    with pytest.raises(ConfigError) as error:
        train_together(sessions)
    assert "different backbones" in str(error.value)
    assert "different values of train.mixed_precision" in str(error.value)
    assert "the same output folder" in str(error.value)
    assert "one after another" in str(error.value)


def test_a_run_that_is_refused_does_not_keep_others(tmp_path: Path) -> None:
    runs = three("lora", "ia3", "houlsby")
    train_jointly(runs[:1], tmp_path)
    first, *others = train_jointly(runs, tmp_path)
    assert "already contains a training run" in str(first)
    assert [type(each) for each in others] == [TrainingResult] * 2


def prepared_runs(recipe: Recipe, methods: Sequence[str]) -> list[PreparedRun]:
    """Prepare runs of these methods on one loaded backbone, as one alone is prepared."""
    first = prepare(replace(recipe, name="run0", method=methods[0]))
    runs = [replace(first, recipe=replace(first.recipe, output=f"{recipe.output}0"))]
    for number, method in enumerate(methods[1:], start=1):
        adapter = ah.attach(first.model, method, name=f"run{number}")
        own = replace(first.recipe, output=f"{recipe.output}{number}", method=method)
        runs.append(replace(first, recipe=own, adapter=adapter))
    return runs


@pytest.mark.parametrize("where", ["memory", "off"])
def test_recorded_layers_are_those_of_one_run(
    where: str, backbone: Path, data: tuple[Path, Path], tmp_path: Path,
    shared: list[tuple[str, ...]],
) -> None:  # fmt: skip
    """What one run replays is not what another one's pass returns."""
    flags = {"backbone": str(backbone), "data": {"train": str(data[0]), "eval": str(data[1])}}
    words = ["train.epochs=1", "train.batch_size=8", "train.tensorboard=false"]
    words += [f"train.frozen_cache={where}", "train.report=false", "train.log_every=1"]
    recipe = read(None, words, flags | {"output": str(tmp_path / "run"), "method": "lora"})
    methods = ("head", "lora", "lora(layers=top 1)", "lora(rank=2, dropout=0.1)")
    torch.manual_seed(5)
    runs = prepared_runs(recipe, methods)
    initial = [{k: t.detach().clone() for k, t in r.adapter.tensors().items()} for r in runs]
    results = []
    for jointly in (True, False):
        for each, tensors in zip(runs, initial, strict=True):
            checkpoint.copy_tensors(each.adapter.tensors(), tensors)
        with ExitStack() as stack:
            sessions = []
            for each in runs:
                own = replace(each.recipe, output=f"{each.recipe.output}-{jointly}")
                if not jointly:
                    ah.activate(each.model, each.adapter.name)
                    with training_session(replace(each, recipe=own), Reporter(), False) as made:
                        results.append(train(made))
                    continue
                made = stack.enter_context(
                    training_session(replace(each, recipe=own), Reporter(), False)
                )
                sessions.append(made)
            if jointly:
                results += train_together(sessions)
    for together, alone in zip(results[:4], results[4:], strict=True):
        assert isinstance(together, TrainingResult)
        assert isinstance(alone, TrainingResult)
        assert together.history[0]["accuracy"] == alone.history[0]["accuracy"]
    for each in runs:
        one, other = (saved(Path(f"{each.recipe.output}-{w}")) for w in (True, False))
        for key, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[key], tensor, **TENSORS)
    replayed = {"run0", "run2"} if where == "memory" else set()
    assert {name for group in shared for name in group} == {r.adapter.name for r in runs} - replayed
