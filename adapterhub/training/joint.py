"""Several runs of one backbone at once: their adapters share forward and backward passes.

Each run keeps its own loop, optimizer, random numbers, reports and checkpoints. Where the next
micro-batches of some runs have one shape, they become one batch, each row of which is routed
through the adapter of its run (adapters/route.py). Each run's loss is that of its rows, and the sum
of the losses has the gradients of each. Results are those of the runs alone, but for the order of
summation. The first shared pass is tried: where a loss is another one than alone, it is not used.

A run takes its step alone, with its adapter active, where rows cannot be routed (methods that
change backbone parameters), where its loss is not one of its rows, and where random numbers are
drawn for the whole batch (train.dropout).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.activation import route_activation_of
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.route import route
from adapterhub.adapters.state import get_state
from adapterhub.errors import AdapterhubError, AttachError, ConfigError
from adapterhub.tasks._losses import model_inputs, without_labels
from adapterhub.training.engine import MicroBatch
from adapterhub.training.loop import TrainingResult, TrainingSession
from adapterhub.training.own_draws import (
    OwnRows,
    RandomNumbers,
    drawing_modules,
    generator_state,
    own_draws,
)
from adapterhub.training.prepare import virtual_tokens
from adapterhub.training.stop_signals import StopRequest, catch_stop_signals
from adapterhub.training.trainee import AdapterTrainee

Outcome = TrainingResult | AdapterhubError
# Of a shared pass, with padding. On a processor, 8 steps of 4 configurations of a 6-layer BERT
# took, one after another, 1.16 times as long with 208 tokens of all, 1.05 with 416 and 1.02 with
# 832 on one thread (benchmarks/speed/joint.py): larger products are no faster there.
TOKENS = {"cpu": 1024}
# Elsewhere the calls of a small pass take longer than its arithmetic. Not measured; a pass for
# which memory does not suffice halves it.
MOST_TOKENS = 8192


def train_together(
    sessions: Sequence[TrainingSession], *, most_tokens: int | None = None
) -> list[Outcome]:
    """Train several adapters that are attached to one model, as each would train alone.

    A run that fails ends with its error, and the others go on. On a signal, each run saves its
    state and ends with the error that says so. Afterwards no adapter is active.

    Args:
        sessions: the runs; each has an output folder of its own.
        most_tokens: most tokens of a pass that runs share, with padding; by default as many as pay
            on the device. 0 computes each run alone.

    Returns:
        For each session, in order, its result or the error that ended it.

    Raises:
        ConfigError: the runs have different models or precisions, one folder, or several processes.
    """
    model = _common_model(sessions)
    device = sessions[0].engine.device
    limit = TOKENS.get(device.type, MOST_TOKENS) if most_tokens is None else most_tokens
    with catch_stop_signals() as stop:
        return _JointRuns(model, sessions, limit).train(stop)


def _common_model(sessions: Sequence[TrainingSession]) -> PreTrainedModel:
    """Return the model of all sessions, which can be trained together."""
    problems = []
    if len({id(session.trainee.model) for session in sessions}) != 1:
        problems.append("different backbones")
    if len({session.options.mixed_precision for session in sessions}) > 1:
        problems.append("different values of train.mixed_precision")
    if len({session.last for session in sessions}) < len(sessions):
        problems.append("the same output folder")
    if any(session.engine.world > 1 for session in sessions):
        problems.append("several processes")
    if not all(isinstance(session.trainee, AdapterTrainee) for session in sessions):
        problems.append("something else to train than an adapter")
    if problems:
        raise ConfigError(
            f"these runs cannot be trained together: they have {', '.join(problems)}",
            expected="adapters of one backbone in one process, each with its own output folder",
            hint="train them one after another",
        )
    model = sessions[0].trainee.model
    assert isinstance(model, PreTrainedModel)
    return model


class _JointRun:
    """One of the runs: its session, what it waits for, and how it ended."""

    def __init__(self, session: TrainingSession, adapter: Adapter, routable: bool) -> None:
        self.session, self.adapter, self.routable = session, adapter, routable
        self.random = RandomNumbers()
        self.needed: MicroBatch | None = None
        self.inputs: dict[str, Tensor] = {}
        self.modes: tuple[bool, ...] = ()
        self.outcome: Outcome | None = None
        self.reports, self.open = ExitStack(), ExitStack()
        self.reports.callback(session.reporter.close)
        self.parts: Iterator[MicroBatch] = iter(())
        self.left: float | None = None  # when its clock was left
        self.computed = 0.0  # seconds of passes since then
        heads = adapter.head.own.values() if adapter.head else ()
        self.virtual = virtual_tokens(adapter)
        self.drawing = drawing_modules([*(p.module for p in adapter.placed), *heads])
        self.tried: set[int] = set()  # the rows of the routes in which its loss was as alone

    @property
    def shares(self) -> bool:
        """Whether its next pass may be shared."""
        options, scaler = self.session.options, self.session.engine.accelerator.scaler
        alone = options.dropout or options.gradient_checkpointing or scaler is not None
        known = self.routable and self.session.loss_of_rows is not None
        return known and not alone and not self.session.alone()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute as this run inside; an error of the package ends it."""
        started = time.perf_counter()
        if self.left is not None:
            self.session.clock.skip(started - self.left - self.computed)
        try:
            with self.random.turn():
                yield
        except AdapterhubError as error:
            self.end(error)
        self.left = time.perf_counter() if hasattr(self.session, "clock") else None
        self.computed = 0.0

    def start(self, stop: StopRequest) -> None:
        """Begin or resume: up to the first pass."""
        with self.turn():
            self.session.load()
            self.parts = self.open.enter_context(self.session.training(stop))
            self.advance()

    def advance(self) -> None:
        """Go on with the loop, when the gradients are there, to the next pass or to the end."""
        self.needed = next(self.parts, None)
        if self.needed is None:
            self.open.close()
            self.end(self.session.finish())
        elif self.routable:
            self.inputs = without_labels(self.adapter.model, self.needed.batch)

    def end(self, outcome: Outcome) -> None:
        """Note how the run ended, and close what it has open."""
        self.outcome, self.needed = outcome, None
        self.close()

    def close(self) -> None:
        """Close what the run has open."""
        self.open.close()
        self.reports.close()


class _NotShared(Exception):
    """A pass cannot be shared by some runs, and nothing of it was added to gradients."""

    def __init__(self, runs: Sequence[_JointRun]) -> None:
        self.runs = runs


class _JointRuns:
    """Runs of one model, step by step."""

    def __init__(
        self, model: PreTrainedModel, sessions: Sequence[TrainingSession], limit: int
    ) -> None:
        self.model, self.limit = model, limit
        self.device = sessions[0].engine.device
        self.state = get_state(model)
        self._deactivate()
        self.modules = list(model.modules())
        self.runs = []
        for session in sessions:
            assert isinstance(session.trainee, AdapterTrainee)
            adapter = session.trainee.adapter
            run = _JointRun(session, adapter, self._is_routable(adapter))
            session.focus = partial(self._focus, run)
            self.runs.append(run)
        heads = [path for run in self.runs for path in _head_paths(run.adapter)]
        replaced = {id(m) for path in heads for m in model.get_submodule(path).modules()}
        self.of_heads = [id(module) in replaced for module in self.modules]
        self.focused: _JointRun | None = None
        self.modes: tuple[bool, ...] | None = None  # of the modules, if known

    def _is_routable(self, adapter: Adapter) -> bool:
        rows = ((adapter.name,), ())
        try:
            route_activation_of(self.model, self.state.adapters, rows)
        except AttachError:
            return False
        return True

    def train(self, stop: StopRequest) -> list[Outcome]:
        """Train all runs to their end."""
        try:
            for run in self.runs:
                run.start(stop)
                self._note_modes(run)
            while waiting := [run for run in self.runs if run.needed]:
                for group in self._groups(waiting):
                    self._compute(group)
                for run in waiting:
                    if run.needed:
                        with run.turn():
                            run.advance()
                        self._note_modes(run)
            outcomes = [run.outcome for run in self.runs]
            return [outcome for outcome in outcomes if outcome is not None]
        finally:
            for run in self.runs:
                run.close()
            self._unfocus()

    # Which run the model computes for

    def _focus(self, run: _JointRun) -> None:
        """Let the model be as it is where this run is alone: its adapter active, in its modes."""
        if self.focused is run:
            return
        self._unfocus()
        self.focused, self.modes = run, None
        self.state.activate((run.adapter.name,))
        if run.modes and run.session.layers is None:
            self._set_modes(run.modes)
            self.modes = None  # the run may change them
        else:
            run.session.train_mode()

    def _unfocus(self) -> None:
        """Make no adapter active."""
        if self.focused is not None:
            if self.focused.session.layers is not None:
                self.focused.session.layers.undo()
            self.focused = None
        if self.state.activation.compositions != ((),):
            self._deactivate()

    def _deactivate(self) -> None:
        self.state.activate(())

    def _note_modes(self, run: _JointRun) -> None:
        """Note the modes in which a run trains, and those of heads that rows do not use."""
        if self.focused is run and run.needed:
            pairs = zip(self.modules, self.of_heads, strict=True)
            run.modes = tuple(module.training and not of_head for module, of_head in pairs)

    def _set_modes(self, modes: tuple[bool, ...]) -> None:
        if self.modes != modes:
            for module, mode in zip(self.modules, modes, strict=True):
                module.training = mode
            self.modes = modes

    # Passes

    def _groups(self, waiting: Sequence[_JointRun]) -> Iterator[list[_JointRun]]:
        """Yield the runs whose next pass is shared, and those that compute theirs alone."""
        alike: dict[Hashable, list[_JointRun]] = {}
        for run in waiting:
            # Rows with fewer virtual tokens would be padded, and draw as many random numbers.
            key = (run.modes, run.virtual, _form(run.inputs)) if run.shares else run
            alike.setdefault(key, []).append(run)
        for runs in alike.values():
            group: list[_JointRun] = []
            for run in runs:
                if group and _tokens([*group, run]) > self.limit:
                    yield group
                    group = []
                group.append(run)
            yield group

    def _compute(self, group: list[_JointRun]) -> None:
        """Compute the next pass of some runs, together if that is possible."""
        if len(group) > 1:
            started = time.perf_counter()
            self._try_to_share(group)
            for run in group:
                run.computed += (time.perf_counter() - started) / len(group)
        for run in group:
            if run.needed and run.needed.loss is None:
                self._compute_alone(run)

    def _try_to_share(self, group: list[_JointRun]) -> None:
        """Compute the next pass of some runs together, or leave everything as it was."""
        drawn = [run.random.copy() for run in group]
        try:
            self._compute_shared(group)
        except (torch.OutOfMemoryError, AttachError, _NotShared) as error:
            for run, random in zip(group, drawn, strict=True):
                run.random.state = random
            if isinstance(error, torch.OutOfMemoryError):
                self.limit = _tokens(group) // 2
                return
            for run in error.runs if isinstance(error, _NotShared) else group:
                run.routable = False

    def _compute_alone(self, run: _JointRun) -> None:
        with run.turn():
            self._focus(run)
            assert run.needed is not None
            run.session.engine.compute(run.needed)

    def _compute_shared(self, group: Sequence[_JointRun]) -> None:
        """Add the gradients of the next micro-batches of several runs.

        Raises:
            AttachError: a backbone passes more than the batch's rows through a module.
            _NotShared: random numbers were drawn for all rows together, or losses differ.
        """
        sizes = [len(next(iter(run.inputs.values()))) for run in group]
        inputs = {name: torch.cat([run.inputs[name] for run in group]) for name in group[0].inputs}
        sized = list(zip(group, sizes, strict=True))
        # A route repeats its rows: the fewer it has, the fewer copies of modules are made.
        repeats = math.gcd(*sizes)
        rows = [run.adapter.name for run, size in sized for _ in range(size // repeats)]
        owners = [OwnRows(size, run.random, run.drawing) for run, size in sized]
        expected = [None if len(rows) in run.tried else self._own_loss(run) for run in group]
        self._unfocus()
        self._set_modes(group[0].modes)
        before = generator_state(self.device)
        autocast = group[0].session.engine.accelerator.autocast
        with autocast(), route(self.model, rows), own_draws(self.modules, owners, self.device):
            output = self.model(**inputs)
            losses = [
                _loss(run, part) for run, part in zip(group, _split(output, sizes), strict=True)
            ]
        if not torch.equal(before, generator_state(self.device)):
            raise _NotShared(group)
        self._compare(group, losses, expected)
        for run in group:
            run.tried.add(len(rows))
        with _added_to_gradients(group):
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        for run, loss in zip(group, losses, strict=True):
            assert run.needed is not None
            run.needed.loss = loss.detach()

    def _own_loss(self, run: _JointRun) -> Tensor | None:
        """Return what the loss of the next micro-batch is alone; nothing is drawn or changed."""
        assert run.needed is not None
        engine, drawn = run.session.engine, run.random.copy()
        self._focus(run)
        with torch.no_grad(), engine.accelerator.autocast(), run.random.turn():
            output = self.model(**model_inputs(run.needed.batch))
            loss = engine.loss(output, run.needed.batch)
        run.random.state = drawn
        return None if loss is None else run.needed.part(loss)

    def _compare(
        self, group: Sequence[_JointRun], losses: Sequence[Tensor], own: Sequence[Tensor | None]
    ) -> None:
        """Compare losses in a shared pass with those alone, where these are given and finite.

        Raises:
            _NotShared: some differ.
        """
        full = group[0].session.options.mixed_precision == "no"
        exact = full and self.model.dtype == torch.float32
        relative, absolute = (1e-4, 1e-5) if exact else (0.03, 0.01)
        differing = [
            run
            for run, loss, expected in zip(group, losses, own, strict=True)
            if expected is not None
            and bool(expected.isfinite())
            and not torch.allclose(loss.detach(), expected, relative, absolute)
        ]
        if differing:
            raise _NotShared(differing)


def _head_paths(adapter: Adapter) -> list[str]:
    return list(adapter.head.own) if adapter.head else []


def _form(inputs: Mapping[str, Tensor]) -> Hashable:
    """Return what batches have in common whose rows can be put into one."""
    return tuple((name, t.dtype, t.shape[1:]) for name, t in sorted(inputs.items()))


def _tokens(group: Sequence[_JointRun]) -> int:
    """Count the tokens of a shared batch, with padding."""
    names = ("input_ids", "decoder_input_ids")
    return sum(run.inputs[name].numel() for run in group for name in names if name in run.inputs)


def _split(output: Any, sizes: list[int]) -> list[SimpleNamespace]:
    """Return the output for the rows of each run."""
    total = sum(sizes)
    tensors = {
        name: torch.split(value, sizes)
        for name, value in output.items()
        if isinstance(value, Tensor) and value.ndim and len(value) == total
    }
    return [
        SimpleNamespace(**{name: parts[n] for name, parts in tensors.items()})
        for n in range(len(sizes))
    ]


def _loss(run: _JointRun, output: Any) -> Tensor:
    """Return the part of a run's loss, of the output for its rows."""
    assert run.needed is not None
    assert run.session.loss_of_rows is not None
    loss = run.session.loss_of_rows(output, run.needed.batch)
    assert loss is not None
    return run.needed.part(loss)


@contextmanager
def _added_to_gradients(group: Sequence[_JointRun]) -> Iterator[None]:
    """Add the gradients computed inside to those there are; on an error they are as before."""
    parameters = [p for run in group for p in run.session.engine.params]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            added = parameter.grad
            parameter.grad = gradient if added is None else gradient.add_(added)
