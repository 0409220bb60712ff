"""A forward pass takes what is active when it begins.

Hooks on the model and on its stacks begin and end a pass. Modules at sites belong to the pass; the
head, labels and backbone parameters of active adapters are parts of the model, which all threads
share.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.activation import (
    Activation,
    PerRowActivation,
    RouteActivation,
    StackActivation,
)
from adapterhub.adapters.parts import set_labels
from adapterhub.anatomy.any_module import is_same
from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    ContextEntry,
    ModelScope,
    RecomputedInContext,
    current_entry,
    kept_values,
    set_entry,
)
from adapterhub.hooks.places import Entrance, forget_inputs, keep_inputs
from adapterhub.hooks.slot import Mark
from adapterhub.methods._site_module import TokenSet
from adapterhub.patch import Patch

# Held while what is attached or active changes: a pass begins before or after, not in between.
STRUCTURE_LOCK = threading.RLock()
_PASSES = "_adapterhub_passes"
_RELABELLED = "relabelled"


class BegunPass(NamedTuple):
    """What a pass began with."""

    module: nn.Module  # whose call it is
    token_sets: tuple[tuple[str, TokenSet], ...] = ()  # by stack


class ForwardPasses:
    """The passes of one model, in all threads.

    `active` is what a pass without a route takes, `replacing` the activation whose heads, labels
    and parameters are in the model, if any.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.scope = ModelScope()
        self.active: Activation = StackActivation()
        self.replacing: Any = None
        self.checkpointed = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self.labels = Patch()  # those of a route, for the loss of one pass

    def watch(self, anatomy: Anatomy, patch: Patch) -> None:
        """Begin and end a pass with the calls of the model and of its stacks."""
        patch.push(self._recompute_anywhere)
        for module, entrance in _entrances(anatomy):
            patch.hook(Mark, module, _PASSES, (self, entrance))
            patch.hook(module.register_forward_pre_hook, begin_pass, prepend=True, with_kwargs=True)
            patch.hook(module.register_forward_hook, end_pass, always_call=True)

    def _recompute_anywhere(self) -> None:
        """Undo `_recompute_in_context`."""
        for module in self.checkpointed:
            function = getattr(module, "_gradient_checkpointing_func", None)
            if isinstance(function, RecomputedInContext):
                module._gradient_checkpointing_func = function.checkpoint  # type: ignore[assignment]

    def replace(self, activation: Any) -> None:
        """Exchange the activation whose heads, labels and parameters are in the model.

        Raises:
            AttachError: they cannot be exchanged; they stay.
        """
        before = self.replacing
        if before is activation:
            return
        exchanged = [each for each in (before, activation) if each is not None]
        for each in exchanged:
            each.check()
        try:
            if before is not None:
                before.off()
            if activation is not None:
                activation.on()
            self.replacing = activation
        except BaseException:
            for each in reversed(exchanged):
                each.off()
            if before is not None:
                before.on()
            self.replacing = before
            raise

    def begin(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Begin a pass: it takes what is active, unless it belongs to a route or another pass.

        Raises:
            AttachError: what is active is not in the model while another thread's route is open.
        """
        entry, whole = current_entry(self.scope), is_same(module, self.model)
        if whole and torch.is_grad_enabled() and module.training:
            self._recompute_in_context()
        if entry is not None and not isinstance(entry.owner, BegunPass):
            if whole and inputs.get("labels") is not None:
                self._relabel(entry.owner)
            return
        if entry is not None and not whole:
            return
        with STRUCTURE_LOCK:
            self._refuse_suspended()
            begun = BegunPass(module, self.active.token_sets)
            set_entry(self.scope, ContextEntry(self.active.table, begun))

    def token_sets(self) -> tuple[tuple[str, TokenSet], ...]:
        """Return the sets of tokens that modules of this pass change, by stack."""
        entry = current_entry(self.scope)
        owner: Any = self.active if entry is None else entry.owner
        found: tuple[tuple[str, TokenSet], ...] = owner.token_sets
        return found

    def end(self, module: nn.Module) -> None:
        """End a pass."""
        entry = current_entry(self.scope)
        if entry is None:
            return
        if isinstance(entry.owner, BegunPass):
            if is_same(entry.owner.module, module):
                set_entry(self.scope, None)
        elif is_same(module, self.model) and kept_values(self.scope).pop(_RELABELLED, False):
            self.restore_labels()

    def _refuse_suspended(self) -> None:
        if self.active.replaces and self.replacing is not self.active:
            names = ", ".join(repr(adapter.name) for adapter in self.active.adapters)
            raise AttachError(
                f"the head, labels or backbone parameters of {names} are not in the model while "
                "another thread has a route open",
                expected="adapters without a head, or a route in every thread",
                hint=f"route(model, [{names}] * rows), or activate(model) and routes only",
            )

    def _relabel(self, route: RouteActivation) -> None:
        """Set the labels of a route for the loss of one pass."""
        if isinstance(route, PerRowActivation):
            with STRUCTURE_LOCK:
                set_labels(self.model, route.labels(), self.labels)
                kept_values(self.scope)[_RELABELLED] = True

    def restore_labels(self) -> None:
        """Set the labels as they were before a pass of a route."""
        with STRUCTURE_LOCK:
            self.labels.undo()

    def _recompute_in_context(self) -> None:
        for module in self.checkpointed:
            if module.gradient_checkpointing:
                function = module._gradient_checkpointing_func
                if not isinstance(function, RecomputedInContext):
                    module._gradient_checkpointing_func = RecomputedInContext(function)  # type: ignore[assignment, arg-type]


def _entrances(anatomy: Anatomy) -> Iterator[tuple[nn.Module, Entrance]]:
    """Yield the modules that a pass begins with: the model and its stacks."""
    model, stacks = anatomy.model, anatomy.stacks
    roots: dict[str, list[str]] = {"": []}
    for each, stack in stacks.items():
        roots.setdefault(anatomy.path(stack.root), []).append(each)
    for path, here in roots.items():
        module = model.get_submodule(path)
        arguments = tuple(inspect.signature(module.forward).parameters)
        name = here[0] if len(here) == 1 else None
        behind = name == "decoder" and "encoder" in stacks
        writes = name is not None and model.can_generate()
        writes = writes and (name != "encoder" or "decoder" not in stacks)
        yield module, Entrance(arguments, name, writes, behind)


def begin_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begin a pass: the first forward pre-hook of a model and of its stacks."""
    ((passes, entrance),) = getattr(module, _PASSES)
    if not torch.compiler.is_compiling():
        passes.begin(module, dict(zip(entrance.arguments, args, strict=False)) | kwargs)
    if sets := passes.token_sets():
        keep_inputs(passes.scope, entrance, args, kwargs, sets)


def end_pass(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """End a pass: the last forward hook of a model and of its stacks."""
    ((passes, entrance),) = getattr(module, _PASSES)
    if passes.token_sets():
        forget_inputs(passes.scope, entrance, output, is_same(module, passes.model))
    if not torch.compiler.is_compiling():
        passes.end(module)
