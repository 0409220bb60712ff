"""What belongs to one call: what applies, and what hooks keep, in contexts and threads."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

import adapterhub as ah
from adapterhub.hooks.composition import (
    NO_MODULES,
    AppliedModules,
    ContextEntry,
    ModelScope,
    RecomputedInContext,
    applying,
    current_entry,
    kept_values,
    set_entry,
)
from adapterhub.hooks.slot import Slot
from tests.kit import tiny_models


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def entry_of(slot, *keys):
    return ContextEntry({slot: AppliedModules(keys)}, "route")


@pytest.fixture
def slot():
    slot = Slot()
    slot.active = AppliedModules(("active",))
    return slot


def test_an_entry_replaces_what_is_active_and_nests(slot):
    assert slot.keys == ("active",)
    with applying(slot.scope, entry_of(slot, "a")):
        assert slot.keys == ("a",)
        with applying(slot.scope, entry_of(slot, "b")):
            assert slot.keys == ("b",)
        assert slot.keys == ("a",)
    assert slot.keys == ("active",)


def test_a_slot_that_an_entry_does_not_list_has_no_modules(slot):
    other = Slot()
    with applying(slot.scope, entry_of(other, "a")):
        assert slot.applied == NO_MODULES


def test_an_entry_is_of_one_model(slot):
    other = Slot()
    other.active = AppliedModules(("other",))
    with applying(slot.scope, entry_of(slot, "a")):
        assert other.keys == ("other",)
        with applying(other.scope, entry_of(other, "b")):
            assert (slot.keys, other.keys) == (("a",), ("b",))
        assert other.keys == ("other",)


def test_a_thread_has_no_entry_and_a_copied_context_has(slot):
    with applying(slot.scope, entry_of(slot, "a")):
        context = contextvars.copy_context()
        assert in_thread(lambda: slot.keys) == ("active",)
        assert in_thread(lambda: context.run(lambda: slot.keys)) == ("a",)


def test_a_cleared_entry_leaves_no_trace():
    scope = ModelScope()
    set_entry(scope, ContextEntry({}, "pass"))
    assert current_entry(scope) is not None
    set_entry(scope, None)
    assert current_entry(scope) is None


def test_what_is_kept_belongs_to_the_thread_and_the_slot(slot):
    slot.keep("x", 1)
    assert slot.kept("x") == 1
    assert in_thread(lambda: slot.kept("x")) is None
    assert Slot().kept("x") is None
    assert slot.take("x") == 1
    assert slot.take("x", "nothing") == "nothing"


def test_what_is_kept_dies_with_its_slot():
    slot = Slot()
    slot.keep("x", value := nn.Linear(2, 2))
    reference = weakref.ref(value)
    del slot, value
    gc.collect()
    assert reference() is None


def test_a_recomputation_sees_the_context_of_the_first_computation(slot):
    computed = []

    def checkpoint(function, *args):
        return function, args

    def layer(x):
        computed.append((x, slot.keys, slot.kept("state")))

    slot.keep("state", "first")
    with applying(slot.scope, entry_of(slot, "a")):
        function, args = RecomputedInContext(checkpoint)(layer, 1)
        function(*args)
    slot.keep("state", "next")
    in_thread(lambda: function(*args))
    function(*args)
    assert computed == [(1, ("a",), "first")] * 3
    assert (slot.keys, slot.kept("state")) == (("active",), "next")
    assert kept_values(slot) == {"state": "next"}


@pytest.mark.parametrize("method", ["full", "lora", "scalar-mix"])
def test_a_thread_that_kept_nothing_recomputes_again_and_again(method):
    """After the first recomputation, what the thread kept is as before: nothing."""
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    ah.attach(model, method)
    tiny_models.enable_gradient_checkpointing(model)
    model.train()

    def steps():
        for _ in range(3):
            model(**tiny_models.labelled_batch(model)).loss.backward()

    with ThreadPoolExecutor(1) as new_thread:
        new_thread.submit(steps).result()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
