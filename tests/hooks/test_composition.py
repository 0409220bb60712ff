"""What applies in a call: compositions of adapters, rows of a batch, contexts and threads."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch import nn

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    NO_MODULES,
    AppliedModules,
    Average,
    ContextEntry,
    adapter_names,
    applying,
    current_entry,
    has_average,
    is_stack,
    parse_composition,
    set_entry,
)
from adapterhub.hooks.slot import Slot
from tests.kit import tiny_models


def test_user_input_becomes_a_composition():
    for given, expected in (
        (None, ()), ("a", "a"), (["a", ["b", "c"]], ("a", ("b", "c"))),
        (Average(["a"]), Average(["a"])), (Average(["a", "b"]), Average(["a", "b"], [0.5, 0.5])),
    ):  # fmt: skip
        assert parse_composition(given) == expected
    with pytest.raises(AttachError):
        parse_composition(3)
    for parts, weights in (([], None), (["a"], [0.5]), (["a", "b"], [1.0])):
        with pytest.raises(AttachError):
            Average(parts, weights)


def test_what_is_in_a_composition():
    node = parse_composition(["a", Average(["b", ("a", "c")])])
    assert list(adapter_names(node)) == ["a", "b", "a", "c"]
    assert has_average(("a", ("b", Average(["c"]))))
    assert not has_average(("a", ("b", "c")))
    assert is_stack([("a", "b"), ("a", "b")])
    for rows in ([("a", "b"), ("a",)], [("a", "a")], [Average(["a"])]):
        assert not is_stack(rows)


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


def test_an_entry_replaces_what_is_active_in_its_context_and_model(slot):
    """A slot that it does not list has no modules, nor has a thread the entry of another."""
    other = Slot()
    other.active = AppliedModules(("other",))
    with applying(slot.scope, entry_of(slot, "a")):
        with applying(slot.scope, entry_of(slot, "b")), applying(other.scope, entry_of(other, "c")):
            assert (slot.keys, other.keys) == (("b",), ("c",))
        assert (slot.keys, other.keys) == (("a",), ("other",))
        context = contextvars.copy_context()
        assert in_thread(lambda: slot.keys) == ("active",)
        assert in_thread(lambda: context.run(lambda: slot.keys)) == ("a",)
    with applying(slot.scope, entry_of(other, "a")):
        assert slot.applied == NO_MODULES
    assert slot.keys == ("active",)
    set_entry(slot.scope, ContextEntry({}, "pass"))
    assert current_entry(slot.scope) is not None
    set_entry(slot.scope, None)
    assert current_entry(slot.scope) is None


def test_what_is_kept_belongs_to_the_thread_and_the_slot_and_dies_with_it():
    slot = Slot()
    slot.keep("x", value := nn.Linear(2, 2))
    assert slot.kept("x") is value
    assert in_thread(partial(slot.kept, "x")) is None
    assert Slot().kept("x") is None
    assert slot.take("x") is value
    assert slot.take("x", "nothing") == "nothing"
    slot.keep("x", value)
    reference = weakref.ref(value)
    del slot, value
    gc.collect()
    assert reference() is None


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
