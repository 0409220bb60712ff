"""Replacements for the model's own methods while adapters are attached.

    save_pretrained          for a model of transformers: writes the backbone without adapters, and
                             warns; stores the adapters' tensors in the same files, for
                             transformers' Trainer to resume from; for other models: raises an error
    load_state_dict          restores these tensors
    resize_token_embeddings  refuses another size: heads and rows of adapters would not fit
    _apply                   half(), to(...): also converts parameters that are not in the model
                             now: replaced backbone parameters, and copies of inactive adapters
    train                    of the model: also sets the mode of task heads that are not in it now;
                             of batch norms: keeps them in evaluation mode, because their averages
                             do not belong to an adapter, and they would change the backbone
    generate                 passes the end of the prompt to modules that change some tokens
    init_continuous_batching, continuous_batching_context_manager
                             called by generate_batch: refuse requests that their thread would
                             compute without a route, without a prefix, or with the cache of
                             another adapter

Attaching replaces the methods on the instance; detaching the last adapter restores them.

A forward pass uses the adapters that are active when it begins.

Hooks on the model and on its stacks begin and end a pass. Modules at sites belong to the pass. The
head, labels and backbone parameters of active adapters are parts of the model, which all threads
share.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adapterhub.adapters.activation import (
    Activatable,
    Activation,
    PerRowActivation,
    RouteActivation,
    StackActivation,
    temporarily,
)
from adapterhub.adapters.adapter import Adapter, set_labels
from adapterhub.anatomy.backbone import CHILD, Backbone, has_statistics, own_modules
from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import AttachError, warn_user
from adapterhub.hooks.composition import (
    ContextEntry,
    ModelScope,
    RecomputedInContext,
    current_entry,
    kept_values,
    set_entry,
)
from adapterhub.hooks.precision import convert_masters
from adapterhub.hooks.slot import Mark
from adapterhub.hooks.token_positions import Entrance, forget_inputs, generating, keep_inputs
from adapterhub.methods.common.site_module import TokenSet
from adapterhub.patch import Patch

# Held while adapters are attached, activated or detached: a pass begins before or after.
STRUCTURE_LOCK = threading.RLock()
_PASSES = "_adapterhub_passes"
_RELABELLED = "relabelled"


class BegunPass(NamedTuple):
    """The state at the beginning of a pass."""

    module: nn.Module  # the called module
    token_sets: tuple[tuple[str, TokenSet], ...] = ()  # by stack


class ForwardPasses:
    """The forward passes of one model, in all threads.

    `active` is the activation of passes without a route. `replacing` is the activation whose heads,
    labels and parameters are in the model, if any.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.module = backbone, backbone.module
        self.scope = ModelScope()
        self.active: Activation = StackActivation()
        self.replacing: Any = None
        modules = self.module.modules()
        self.checkpointed = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        self.labels = Patch()  # a route's labels, for the loss of one pass

    def watch(self, anatomy: Anatomy, patch: Patch) -> None:
        """Install the hooks that begin and end a pass on the model and its stacks."""
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
            AttachError: they cannot be exchanged. The previous ones stay in the model.
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
        """Begin a pass with the active adapters, unless it belongs to a route or another pass.

        Raises:
            AttachError: the active adapters are not in the model while another thread's route is
                open.
        """
        entry, whole = current_entry(self.scope), module is self.module
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
        """Return the token sets that modules of this pass change, by stack."""
        entry = current_entry(self.scope)
        owner: Any = self.active if entry is None else entry.owner
        sets: tuple[tuple[str, TokenSet], ...] = owner.token_sets
        return sets

    def end(self, module: nn.Module) -> None:
        """End a pass."""
        entry = current_entry(self.scope)
        if entry is None:
            return
        if isinstance(entry.owner, BegunPass):
            if entry.owner.module is module:
                set_entry(self.scope, None)
        elif module is self.module and kept_values(self.scope).pop(_RELABELLED, False):
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
        """Set a route's labels for the loss of one pass."""
        if isinstance(route, PerRowActivation):
            with STRUCTURE_LOCK:
                set_labels(self.backbone, route.labels(), self.labels)
                kept_values(self.scope)[_RELABELLED] = True

    def restore_labels(self) -> None:
        """Restore the labels from before a pass of a route."""
        with STRUCTURE_LOCK:
            self.labels.undo()

    def _recompute_in_context(self) -> None:
        for module in self.checkpointed:
            if module.gradient_checkpointing:
                function = module._gradient_checkpointing_func
                if not isinstance(function, RecomputedInContext):
                    module._gradient_checkpointing_func = RecomputedInContext(function)  # type: ignore[assignment, arg-type]


def _entrances(anatomy: Anatomy) -> Iterator[tuple[nn.Module, Entrance]]:
    """Yield the modules whose calls begin a pass: the model and its stacks."""
    model, stacks = anatomy.model, anatomy.stacks
    roots: dict[str, list[str]] = {"": []}
    for each, stack in stacks.items():
        roots.setdefault(anatomy.path(stack.root), []).append(each)
    for path, here in roots.items():
        module = model.get_submodule(path)
        arguments = tuple(inspect.signature(module.forward).parameters)
        name = here[0] if len(here) == 1 else None
        behind = name == "decoder" and "encoder" in stacks
        writes = name is not None and anatomy.backbone.generates
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
        forget_inputs(passes.scope, entrance, output, module is passes.module)
    if not torch.compiler.is_compiling():
        passes.end(module)


_SAVE = "save_pretrained"
_TRAINED = f"{CHILD}.trained."  # in files: an adapter's copy of the backbone's tensor of that name
_ADDED = f"{CHILD}.added."  # in files: a tensor that an adapter added to the model


class AttachedAdapters(Activatable, Protocol):
    """The parts of a model's state that the methods use."""

    backbone: Backbone
    adapters: dict[str, Adapter]
    passes: ForwardPasses

    def open_route(self) -> RouteActivation | None:
        """Return the innermost route that is open in this context."""


@dataclass(frozen=True, eq=False)
class ModelMethod:
    """A replacement for a method of a model: it calls `function(state, method, ...)`.

    `before` is the method that another library may have set on the model.
    """

    state: AttachedAdapters
    name: str
    function: Callable[..., Any]
    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(self.state, self.original, *args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original method."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        model = self.state.backbone.module
        return getattr(type(model), self.name)(model, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class RefusedSave:
    """Replacement for `save_pretrained` of a module that is not of transformers, or inside one."""

    state: AttachedAdapters

    @property
    def owner(self) -> nn.Module:
        """The module with the adapters: this one, an outer one, or the parts of a pipeline."""
        return self.state.backbone.module

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to save: the files would mix tensors of adapters and the backbone.

        Raises:
            AttachError: always.
        """
        raise AttachError(
            "save_pretrained would write tensors of adapters among those of the backbone",
            offenders=map(repr, self.state.adapters),
            hint="adapter.save(FOLDER) saves an adapter; to save the backbone, detach or merge "
            "first",
        )


@dataclass(eq=False)
class StillTrain:
    """Replacement for `train` of a module whose buffers training would change.

    `mode` is the requested mode of the module.
    """

    module: nn.Module
    mode: bool

    def __call__(self, mode: bool = True) -> nn.Module:
        """Record the requested mode."""
        self.mode = mode
        return self.module

    def put_back(self) -> None:
        """Set the module to the requested mode."""
        self.module.training = self.mode


def replace_methods(state: AttachedAdapters, patch: Patch) -> None:
    """Replace the methods of a model that adapters affect."""
    model, functions = state.backbone.module, _FUNCTIONS
    for _, module in own_modules(model):
        if has_statistics(module):
            still = StillTrain(module, module.training)
            patch.push(still.put_back)
            patch.override(module, "train", still)
            module.training = False
    if state.backbone.foreign:  # other libraries have no Trainer that resumes from its files
        functions = {"_apply": convert, "train": set_mode}
        for _, module in own_modules(model):
            if hasattr(type(module), _SAVE):
                patch.override(module, _SAVE, RefusedSave(state))
    for name, function in functions.items():
        if hasattr(type(model), name):
            before = vars(model).get(name)
            patch.override(model, name, ModelMethod(state, name, function, before))


def save_backbone(
    state: AttachedAdapters,
    save: Callable[..., Any],
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Write the backbone without adapters, and the adapters' tensors next to it.

    `save` is the model's `save_pretrained`. `state_dict` holds the model's tensors if they were
    gathered.

    Raises:
        AttachError: an adapter trains backbone parameters that are sharded.
    """
    model = state.backbone.module
    whole = model.state_dict() if state_dict is None else state_dict
    adapted = _named(model)
    with temporarily(state, ()):
        replaced = {k: t for k, t in _named(model).items() if k in whole and adapted[k] is not t}
        tensors = {k: replaced.get(k, t).detach() for k, t in whole.items() if not _is_added(k)}
        of_adapters = [key for key in whole if key in replaced or _is_added(key)]
        for key in {id(adapted[key]): key for key in of_adapters}.values():  # tied tensors once
            tensors[_file_name(key)] = whole[key]
        if replaced:
            options["max_shard_size"] = sys.maxsize  # or the last loaded shard would win
        save(save_directory, is_main_process, tensors, **options)
    warn_user(
        f"save_pretrained wrote the backbone without its adapters ({', '.join(state.adapters)}), "
        "and their tensors only for Trainer to resume from; to save an adapter: "
        "adapter.save(FOLDER); to save the adapted model: merge(model), then save_pretrained",
        stacklevel=3,
    )


def load_tensors(
    state: AttachedAdapters,
    load: Callable[..., Any],
    state_dict: Mapping[str, Tensor],
    *args: Any,
    **options: Any,
) -> Any:
    """Load a state dict; copies of backbone tensors go to the adapters that trained them.

    Raises:
        AttachError: the adapter with these tensors is not attached, or not active.
    """
    stored = {k: t for k, t in state_dict.items() if k.startswith((_TRAINED, _ADDED))}
    if not stored:
        return load(state_dict, *args, **options)
    values = {_model_name(key): tensor for key, tensor in stored.items()}
    named = _named(state.backbone.module)
    if unknown := [key for key in values if key not in named]:
        raise AttachError(
            "these tensors are of adapters that are not attached",
            offenders=unknown[:5],
            expected="the adapters, with the names and methods, that the checkpoint was saved with",
            hint="attach(model, METHOD, name=NAME) as before, then resume",
        )
    own = {id(t) for adapter in state.adapters.values() for t in adapter.tensors().values()}
    trained = [key for key in values if not _is_added(key)]
    if missing := [key for key in trained if key not in named or id(named[key]) not in own]:
        raise AttachError(
            "these tensors were trained by an adapter that is not active",
            offenders=missing[:5],
            expected="the adapters that were active when the tensors were saved",
            hint="activate(model, NAME) first",
        )
    tied = {id(named[key]): tensor for key, tensor in values.items() if key in named}
    values |= {key: tied[id(tensor)] for key, tensor in named.items() if id(tensor) in tied}
    backbone = {key: tensor for key, tensor in state_dict.items() if key not in stored}
    return load(backbone | values, *args, **options)


def refuse_resize(
    state: AttachedAdapters,
    resize: Callable[..., Any],
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Refuse to resize the embedding, unless its size remains the same.

    Raises:
        AttachError: another size.
    """
    table = state.backbone.token_embedding
    size = new = 0 if table is None else len(table)
    if new_num_tokens is not None:
        new = new_num_tokens
    if pad_to_multiple_of:
        new = math.ceil(new / pad_to_multiple_of) * pad_to_multiple_of
    if new == size:
        return resize(new_num_tokens, pad_to_multiple_of, *args, **options)
    raise AttachError(
        f"cannot resize the embedding from {size} to {new} rows while adapters are attached "
        f"({', '.join(state.adapters)})",
        expected=f"{size} rows: rows for new tokens belong to an adapter",
        hint="attach(..., tokenizer=tokenizer) with a tokenizer that has the new tokens; or "
        "detach(model), resize, and attach again",
    )


def convert(
    state: AttachedAdapters, apply: Callable[..., Any], fn: Any, recurse: bool = True
) -> Any:
    """Convert or move the model and the parameters that are not in it now."""
    model = apply(fn, recurse)
    if recurse:
        convert_masters(model, fn)
        for adapter in state.adapters.values():
            adapter.convert(fn)
    return model


def set_mode(state: AttachedAdapters, train: Callable[..., Any], mode: bool = True) -> Any:
    """Set the model and the task heads that are not in it now to training or evaluation mode."""
    model = train(mode)
    for adapter in state.adapters.values():
        for module in adapter.absent_heads():
            module.train(mode)
    return model


def write_text(
    state: AttachedAdapters, generate: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Generate from a prompt that ends with the input of this call."""
    with generating(state.passes.scope, args, options):
        return generate(*args, **options)


def batch_continuously(
    state: AttachedAdapters, init: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Return a manager of continuous batching for the adapters that are active now.

    Raises:
        AttachError: a route is open, prefixes or prompts are active, or a manager is kept from an
            earlier session. Also raised by the manager's `add_request`.
    """
    _refuse_batching(state)
    if getattr(state.backbone.module, "_cached_continuous_batching_manager", None) is not None:
        raise AttachError(
            "the model keeps a manager of continuous batching, with keys and values of what was "
            "active before",
            hint="model.destroy_cached_continuous_batching_manager()",
        )
    manager = init(*args, **options)
    add, active = manager.add_request, state.activation.compositions

    def add_request(*args: Any, **options: Any) -> Any:
        _refuse_batching(state)
        if state.activation.compositions != active:
            raise AttachError(
                "another adapter is active than when this manager of continuous batching was made: "
                "requests with the same beginning share keys and values",
                hint="a new manager after each activate(...): model.init_continuous_batching()",
            )
        return add(*args, **options)

    manager.add_request = add_request
    return manager


def refuse_kept_manager(
    state: AttachedAdapters, manage: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Return a context for a manager of continuous batching that ends with the context.

    Raises:
        AttachError: a persistent manager is requested, or as in `batch_continuously`.
    """
    _refuse_batching(state)
    if options.get("persistent_manager"):
        raise AttachError(
            "a persistent manager of continuous batching would give keys and values of the adapter "
            "that is active now to later ones",
            hint="persistent_manager=False",
        )
    return manage(*args, **options)


def _refuse_batching(state: AttachedAdapters) -> None:
    """Refuse continuous batching if its results would differ from a call of the model."""
    if state.open_route() is not None:
        raise AttachError(
            "continuous batching computes in a thread of its own, where route(...) and "
            "disabled(...) do not apply",
            hint="model.generate(...) inside of it; activate(model, NAME) for all requests; or "
            "adapterhub.serving.Engine().generate(NAME, ...), each request with its own adapter",
        )
    virtual = {
        f"{adapter.name}: {placed.method.name}": None
        for adapter in state.activation.adapters
        for placed in adapter.placed
        if placed.site.kind in ("keyvalue", "embed") or placed.module.token_sets
    }
    if virtual:
        raise AttachError(
            "the paged cache of continuous batching has no place for prefixes and prompts, nor "
            "does it show the places of tokens in their texts",
            offenders=list(virtual),
            hint="model.generate(...), or adapterhub.serving.Engine().generate(NAME, ...)",
        )


def _is_added(key: str) -> bool:
    """Return whether a tensor of an adapted model does not belong to the backbone."""
    return f".{CHILD}." in f".{key}"


def _file_name(key: str) -> str:
    """Return the file name of an adapter's tensor, in hex so that transformers keeps it."""
    return (_ADDED if _is_added(key) else _TRAINED) + key.encode().hex()


def _model_name(name: str) -> str:
    return bytes.fromhex(name.rpartition(".")[2]).decode()


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the tensors of a model; tied tensors have several names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_backbone,
    "load_state_dict": load_tensors,
    "resize_token_embeddings": refuse_resize,
    "_apply": convert,
    "train": set_mode,
    "generate": write_text,
    "init_continuous_batching": batch_continuously,
    "continuous_batching_context_manager": refuse_kept_manager,
}
