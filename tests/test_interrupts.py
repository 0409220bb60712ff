"""Interrupts are deferred until the end of a change."""

import signal
import threading

import pytest

from adapterhub.interrupts import deferred_interrupts


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_interrupts_are_delivered_once_at_the_outermost_end():
    done = []

    def change():
        with deferred_interrupts():
            with deferred_interrupts():
                interrupt()
                interrupt()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


def test_other_threads_have_no_signals_to_defer():
    def run():
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_an_error_inside_is_the_context_of_the_interrupt():
    def change():
        with deferred_interrupts():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as error:
        change()
    assert isinstance(error.value.__context__, ZeroDivisionError)
