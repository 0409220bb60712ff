"""What a pass uses beside its device: tensors of the host, copies and waits for values.

A model on torch's meta device has shapes and no values: a look at a value raises an error there,
as it raises one while a CUDA graph is captured, and stops a GPU otherwise. What a backbone does by
itself does not count.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adapterhub as ah

META = torch.device("meta")
LIBRARIES = ("/adapterhub/", "/transformers/")
COPIES = ("aten::_to_copy", "aten::copy_")
# On a GPU these wait for a value, which a capture refuses; on the meta device there is none. Most
# functions of torch.linalg end with the first one, those named `..._ex` do not.
WAITS = (
    "aten::_linalg_check_errors", "aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_eig",
    "aten::linalg_lstsq", "aten::linalg_matrix_exp",
)  # fmt: skip


class HostUses(TorchDispatchMode):
    """Notes operations that use tensors of the host, or wait for values, with who asked."""

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
        away = any(t.device != META and (t.dim() or name in COPIES) for t in tensors)
        if away or name in WAITS:
            self.found.add(f"{name} in {caller()}")
        return result


def caller() -> str:
    frame: Any = sys._getframe(2)
    while frame and not any(n in frame.f_code.co_filename for n in LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame else "torch"


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Let transformers leave out its checks of values, and answer for autocast on this device."""

    def patch(module: Any, name: str, answer: Any) -> Any:
        return mock.patch.object(module, name, return_value=answer)

    with (
        patch(transformers.modeling_utils, "is_tracing", True),
        patch(transformers.masking_utils, "is_tracing", True),
        patch(torch, "is_autocast_enabled", False),
        patch(torch, "autocast", contextlib.nullcontext()),
    ):
        yield


def uses_of_the_host(model: Any, rows: list[str | None] | None = None) -> set[str]:
    """Compute outputs and gradients on the meta device, twice; return the uses of the second."""
    inputs = {"input_ids": torch.zeros((4, 6), dtype=torch.long, device=META)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    uses = HostUses()
    with traced(), ah.route(model, rows) if rows else contextlib.nullcontext():
        for mode in (contextlib.nullcontext(), uses):
            with mode:
                output = model(**inputs)[0]
                if output.requires_grad:
                    output.sum().backward()
    assert output.device == META
    return uses.found
