"""What a pass uses beside its device, and a device of its own in the memory of the host."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import adapterhub as ah
from tests.kit import matrix, tiny_models

# A device of its own in the memory of the host: an operation on it and the host is refused.
#
# It is torch's PrivateUse1 device, which a process registers once for all. A tensor there wraps one
# of the host, with which its operations are computed, so that methods that decompose weights see
# values, unlike on the meta device.


NAME = "elsewhere"
# A tensor of the host may be copied, and index one of another device, as on a GPU.
MIXING = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_")


class _Module:
    """What torch asks of a device's module: `torch.cuda` for CUDA."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "device_count": 1, "current_device": 0, "is_available": True, "is_initialized": True,
            "_is_in_bad_fork": False, "get_amp_supported_dtype": [torch.bfloat16],
            "get_rng_state": torch.zeros(1), "set_rng_state": None, "manual_seed_all": None,
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)
        return lambda *_: answers[name]


class Elsewhere(torch.Tensor):
    """A tensor on that device."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        strides, offset = inner.stride(), inner.storage_offset()
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides, offset, dtype=inner.dtype, device=torch.device(NAME)
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operation, args, kwargs or {})


class Made(TorchDispatchMode):
    """Makes tensors on that device inside, where `device` says so."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        there = options.get("device") is not None and options["device"].type == NAME
        return compute(operation, args, options) if there else operation(*args, **options)


def compute(operation: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation with the tensors that are wrapped."""
    name, device = operation._schema.name, kwargs.get("device")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = [isinstance(t, Elsewhere) for t in tensors]
    # a number is passed to a kernel by value, as a tensor without dimensions is
    on_host = [t for t, away in zip(tensors, there, strict=True) if not away and t.dim()]
    if any(there) and on_host and name not in MIXING:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    options = dict(kwargs) if device is None else {**kwargs, "device": torch.device("cpu")}
    result = operation(*tree_map(unwrapped, args), **tree_map(unwrapped, options))
    if operation._schema.is_mutable:
        return kwargs.get("out", args[0])
    stays = any(there) if device is None else device.type == NAME
    return tree_map(wrapped, result) if stays else result


def unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, Elsewhere) else value


def wrapped(value: Any) -> Any:
    return Elsewhere(value) if isinstance(value, torch.Tensor) else value


def problems(method: str, architecture: str) -> str:
    """Attach a method to a model on that device; return what went wrong."""
    with Made():
        model = tiny_models.usual_model(architecture).to(NAME)
        assert {p.device.type for p in model.parameters()} == {NAME}
        try:
            adapter = ah.attach(model, matrix.example(method))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ", ".join(n for n, t in adapter.tensors().items() if t.device.type != NAME)


def attached_elsewhere(methods: Sequence[str]) -> dict[tuple[str, str], str]:
    """Register the device for the rest of this process; return what goes wrong on it, by cell."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    return {
        (method, architecture): problems(method, architecture)
        for architecture in ("bert", "llama")
        for method in methods
        if (method, architecture) not in matrix.REFUSED
    }


# What a pass uses beside its device: tensors of the host, copies and waits for values.
#
# A model on torch's meta device has shapes and no values: a look at a value raises an error there,
# as it raises one while a CUDA graph is captured, and stops a GPU otherwise. What a backbone does
# by itself does not count.


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
