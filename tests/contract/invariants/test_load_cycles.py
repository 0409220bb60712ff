"""Loading and detaching adapters repeatedly leaves no memory, hooks or modules behind."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from transformers import AttentionInterface

import adapterhub as ah
from tests.kit import selection, tiny_models
from tests.kit.tiny_models import logits

pytestmark = pytest.mark.usefixtures("settled")


LOADED = {"mam": "bert", "prompt": "gpt2", "full": "distilbert"}  # each mechanism once
MORE = {"lora": "bert", "scalar-mix": "bert", "ia3": "gpt2", "dora": "bert", "compacter": "bert"}
TIMES = 90 if selection.ALL else 30
CYCLES = [*LOADED.items(), *(MORE.items() if tiny_models.FULL_MATRIX else ())]


def footprint(model):
    """Return every module, hook, attribute and tensor name that a cycle could leave behind."""
    modules = dict(model.named_modules())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values())
    attributes = {name: set(vars(m)) for name, m in modules.items()}
    return set(modules), hooks, attributes, set(model.state_dict())


def rss():
    """Return the resident memory of this process, in bytes."""
    with open("/proc/self/statm", "rb") as file:  # a first decoder is 38 objects more
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize(("method", "architecture"), CYCLES)
def test_load_and_unload_cycles_leave_memory_flat(method, architecture, tmp_path):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, method)
    adapter.save(tmp_path / "adapter")
    adapter.detach()
    before, registered = footprint(model), set(AttentionInterface._global_mapping)

    def cycle(use):
        loaded = ah.load(model, tmp_path / "adapter", name="served")
        if use:
            logits(model)
            with ah.route(model, ["served"] * 3):
                logits(model)
        ah.detach(model)
        return weakref.ref(loaded)

    last = [cycle(use=True) for _ in range(5)][-1]
    gc.collect()
    objects, tensors, resident = len(gc.get_objects()), live_tensors(), rss()
    for number in range(TIMES):
        last = cycle(use=number % 10 == 0)
    gc.collect()
    assert last() is None
    assert live_tensors() <= tensors  # fewer: what an earlier test left has been collected
    assert len(gc.get_objects()) - objects < TIMES, "less than one object per cycle"
    assert rss() - resident < 8e6
    assert footprint(model) == before
    assert set(AttentionInterface._global_mapping) == registered
