"""Interrupts are deferred during a change, and a context is left although its exit was hit."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
import weakref

import pytest
import tiny_models
import torch
from selection import ALL

import adapterhub as ah
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import find_state, get_state
from adapterhub.interrupts import Reversal, deferred_interrupts


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


class Change(Reversal[str]):
    """Records what happens; fails where it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.log = list(failing), []

    def enter(self) -> str:
        self.do("enter")
        return "entered"

    def leave(self) -> None:
        self.do("leave")

    def do(self, what: str) -> None:
        self.log.append(what)
        if what in self.failing:
            self.failing.remove(what)
            raise MemoryError(what)


def test_an_interrupt_is_delivered_at_the_end():
    done = []

    def change():
        with deferred_interrupts():
            interrupt()
            interrupt()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_deliver_once_at_the_outermost_end():
    done = []

    def change():
        with deferred_interrupts():
            with deferred_interrupts():
                interrupt()
            done.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done


def test_the_users_handler_is_called_and_kept():
    calls = []

    def handler(number, frame):
        calls.append(number)

    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        interrupt()
        assert not calls
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_handlers_stay(handler):
    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_inside_stays():
    def handler(number, frame):
        pass

    with deferred_interrupts():
        signal.signal(signal.SIGINT, handler)
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_have_no_signals_to_defer():
    def run():
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_an_interpreter_without_signals_has_none_to_defer(monkeypatch):
    def refuse(*_):
        raise ValueError("signal only works in main thread of the main interpreter")

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", refuse)
        with deferred_interrupts():
            pass


def test_an_error_inside_is_the_context_of_the_interrupt():
    def change():
        with deferred_interrupts():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as error:
        change()
    assert isinstance(error.value.__context__, ZeroDivisionError)


def test_a_change_is_undone_once():
    change = Change()
    with change as entered:
        assert entered == "entered"
    assert change.log == ["enter", "leave"]


def test_a_context_is_entered_once_at_a_time():
    change = Change()
    with change, pytest.raises(RuntimeError, match="entered already"), change:
        raise AssertionError
    assert change.log == ["enter", "leave"]


def test_a_change_that_fails_is_undone():
    change = Change("enter")
    with pytest.raises(MemoryError), change:
        raise AssertionError
    assert change.log == ["enter", "leave"]


def test_undoing_that_fails_is_tried_again():
    change = Change("leave")
    with pytest.raises(MemoryError), change:
        pass
    assert change.log == ["enter", "leave", "leave"]


def test_an_interrupt_in_enter_is_an_interrupt_before_it():
    change = Change()
    change.enter = interrupt
    with pytest.raises(KeyboardInterrupt), change:
        raise AssertionError
    assert change.log == ["leave"]


def test_an_exit_stack_leaves_it():
    change = Change()
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(change) == "entered"
    assert change.log == ["enter", "leave"]


def test_looking_at_the_exit_does_not_leave():
    change = Change()
    assert hasattr(change, "__exit__")
    with change:
        assert callable(change.__exit__)
        assert change.log == ["enter"]
    assert change.log == ["enter", "leave"]


def test_contexts_leave_no_garbage():
    change = Change()
    with change:
        pass
    gc.disable()
    try:
        reference = weakref.ref(change)
        del change
        assert reference() is None, "there is no cycle"
    finally:
        gc.enable()


class Sender(threading.Thread):
    """Sends signals at random moments; one of them interrupts each time that it is `armed`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.armed, self.done, self.interrupts = False, threading.Event(), 0

    def run(self) -> None:
        generator = random.Random(0)
        while not self.done.wait(0.003 * generator.random()):
            os.kill(os.getpid(), signal.SIGINT)

    def handle(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.interrupts += 1
            raise KeyboardInterrupt


def change_all(model) -> None:
    """Open a route, attach, detach and activate."""
    with ah.route(model, ["a", "b", None]):
        pass
    if "c" in get_state(model).adapters:
        ah.detach(model, "c")
    ah.attach(model, "bitfit", name="c")
    ah.detach(model, "c")
    ah.activate(model, ah.Average(["a", "b"]))
    ah.activate(model, "a")


# Python reports an interrupt inside a callback of the garbage collector, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_of_another_thread_leave_no_half_state():
    """Real signals at random moments: whatever was interrupted, the model is whole."""
    model = tiny_models.model("bert", num_hidden_layers=1)
    batch, keys = tiny_models.batch(), list(model.state_dict())
    for name in ("a", "b"):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name))
    ah.activate(model, "a")
    state, expected, rounds = get_state(model), model(**batch).logits, 0
    sender = Sender()
    signal.signal(signal.SIGINT, sender.handle)
    sender.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end and (ALL or sender.interrupts < 60):
        try:
            rounds += 1
            sender.armed = True
            change_all(model)
            sender.armed = False
        except KeyboardInterrupt:
            assert state.routes == []
            assert state.open_route() is None
            assert not STRUCTURE_LOCK._is_owned()
            assert signal.getsignal(signal.SIGINT) == sender.handle
    sender.armed = False
    sender.done.set()
    sender.join()
    assert rounds >= sender.interrupts > 10
    ah.activate(model, "a")
    assert torch.equal(model(**batch).logits, expected)
    ah.detach(model)
    assert find_state(model) is None
    assert list(model.state_dict()) == keys
