"""A pass stays on its device: no tensor of the host, no copy and no wait for a value.

The tests run on torch's meta device, which has shapes and no values: a look at a value raises an
error there, as it raises one while a CUDA graph is captured, and stops a GPU otherwise. What a
backbone does by itself does not count.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from matrix import SHARED, attach_smaller, every_cell, example
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adapterhub as ah
from adapterhub.methods import METHODS

META = torch.device("meta")
LIBRARIES = ("/adapterhub/", "/transformers/")
COPIES = ("aten::_to_copy", "aten::copy_")


class HostUses(TorchDispatchMode):
    """Notes the operations that read or write tensors of the host, with the code that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        # a number is passed to a kernel by value, as a tensor without dimensions is
        if any(t.device != META and (t.dim() or name in COPIES) for t in tensors):
            self.found.add(f"{name} in {caller()}")
        return result


def caller() -> str:
    frame: Any = sys._getframe(2)
    while frame and not any(
        n in frame.f_code.co_filename for n in ("/adapterhub/", "/transformers/")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame else "torch"


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers leave out its checks of values, and answer for autocast on this device."""
    for module in (transformers.modeling_utils, transformers.masking_utils):
        monkeypatch.setattr(module, "is_tracing", lambda *_: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


def passed(model: Any, rows: list[str | None] | None = None) -> set[str]:
    """Compute outputs and gradients on the meta device, twice; return the uses of the second."""
    inputs = {"input_ids": torch.zeros((4, 6), dtype=torch.long, device=META)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with ah.route(model, rows) if rows else contextlib.nullcontext():
        for uses in (HostUses(), HostUses()):
            with uses:
                output = model(**inputs)[0]
                if output.requires_grad:
                    output.sum().backward()
    assert output.device == META
    return uses.found


@functools.cache
def bare(architecture: str) -> tuple[str, set[str]]:
    """Return a kind of model that looks at no value by itself, and its uses of the host.

    BART's classifier seeks </s>; Mistral's sliding cache brings an empty tensor.
    """
    usual = "features" if architecture in tiny_models.WITHOUT_CLASSIFIER else "classification"
    try:
        return usual, passed(built(architecture, usual))
    except NotImplementedError:
        return "features", passed(built(architecture, "features"))


def built(architecture: str, task: str) -> Any:
    """Build a model whose routers look at no value."""
    config = {"experts_implementation": "batched_mm"} if architecture == "mixtral" else {}
    return tiny_models.model(architecture, task, **config).to(META)


@every_cell
def test_a_pass_stays_on_its_device(method: str, architecture: str) -> None:
    task, uses = bare(architecture)
    if method == "head" and task == "features":
        pytest.skip("the model has no head")
    model = built(architecture, task)
    with torch.device(META):
        adapter = ah.attach(model, example(method), name="a")
        attach_smaller(model, method, name="b")
    assert passed(model) == uses
    shared = {placed.site.role for placed in adapter.placed} & {*SHARED.get(architecture, ())}
    if not METHODS[method].trains_backbone and not shared:
        assert passed(model, ["a", None, "b", "a"]) == uses


def test_uses_of_the_host_are_found() -> None:
    linear = torch.nn.Linear(2, 2, device=META)
    linear.register_forward_hook(lambda *_: torch.zeros(3).to(META))
    with HostUses() as uses:
        linear(torch.zeros(1, 2, device=META))
    assert {use.partition(" ")[0] for use in uses.found} == {"aten::zeros", "aten::_to_copy"}
