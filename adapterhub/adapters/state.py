"""The state of a model: attached adapters, the active ones, and the model before them.

Several threads may share a model. Every change happens under `STRUCTURE_LOCK`.

On an error, the structure of the model is restored: modules, hooks, attributes and `requires_grad`.
Tensors are not part of the structure: activations exchange them and restore them. Modules in slots
are not part of it either, since no change touches them. Other threads may compute meanwhile, so
only differences are restored.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub.adapters.activation import (
    Activation,
    RouteActivation,
    StackActivation,
    activation_of,
    refuse_below,
    template_of,
    temporarily,
    with_brought,
)
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.model_methods import (
    STRUCTURE_LOCK,
    BegunPass,
    ForwardPasses,
    replace_methods,
)
from adapterhub.anatomy.backbone import (
    Backbone,
    EndTokens,
    PipelineParts,
    is_pipeline,
    is_transformers,
    own_modules,
    slots_in,
)
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.checkpoint import named_tensors
from adapterhub.backbones.end_tokens import with_stops
from adapterhub.backbones.fingerprint import (
    BackboneIdentity,
    ModelIdentities,
    Vocabulary,
)
from adapterhub.backbones.processor import TokenizerSnapshot
from adapterhub.backbones.quantized import prepare_quantized
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.hooks.composition import (
    NO_MODULES,
    Composition,
    ContextEntry,
    ModelScope,
    adapter_names,
    applying,
    current_entry,
    set_entry,
)
from adapterhub.hooks.layer_output import require_input_gradients
from adapterhub.interrupts import deferred_interrupts
from adapterhub.methods.common.base import METHODS
from adapterhub.patch import Patch

_LOAD = "model, tokenizer = load_backbone({})"
_AGAIN = f"load the backbone again: {_LOAD.format('ID')}"
_CONVERTED = "; a saved adapter of it can be loaded here: load(model, FOLDER)"


class AdaptedModel(NamedTuple):
    """A model with adapters: their names, and the original parameters of the model."""

    backbone: Backbone
    names: Iterable[str]
    parameters: Iterable[nn.Parameter]


def require_model(model: object) -> None:
    """Refuse objects that are not modules or only wrap a model.

    `check_model` refuses compiled models.

    Raises:
        AttachError: not a usable module; the error suggests a command instead.
    """
    if is_transformers(model) or isinstance(model, torch._dynamo.OptimizedModule):
        return
    if is_pipeline(model) or (isinstance(model, nn.Module) and not _only_wraps(model)):
        return
    wraps = ", but wraps one" if isinstance(model, nn.Module) else ", nor another module"
    raise AttachError(
        f"{type(model).__name__} is not a model of transformers{wraps}",
        expected="a model of transformers, or another torch.nn.Module",
        hint=remedy(model),
    )


def required_backbone(model: nn.Module) -> Backbone:
    """Return the backbone of a model of transformers or another module; refuse other objects.

    Raises:
        AttachError: as `require_model`.
    """
    require_model(model)
    return Backbone.of(model)


def _only_wraps(module: nn.Module) -> bool:
    """Return whether a module contains a model of transformers and no other parameters."""
    inside = next((m for m in module.modules() if is_transformers(m)), None)
    if inside is None or _defined_in("peft", type(module)):
        return inside is not None
    own = set(map(id, inside.parameters()))
    return all(id(parameter) in own for parameter in module.parameters())


def check_model(backbone: Backbone) -> None:
    """Refuse objects that are not modules, and compiled, sharded or adapted models.

    Adapters of another library would change the outputs, but not the backbone's identity.

    Raises:
        AttachError: one of these; the error names it.
    """
    own = backbone.module
    if isinstance(own, PipelineParts) and own.compiled:
        first = f"pipe.{own.compiled[0]}"
        raise AttachError(
            "parts of the pipeline are compiled: they would silently ignore new hooks",
            offenders=own.compiled,
            hint=f"{first} = {first}._orig_mod; attach; torch._dynamo.reset(); then {first} = "
            f"torch.compile({first})",
        )
    if isinstance(own, nn.Module) and backbone.compiled:
        raise AttachError(
            "the model is compiled: it would silently ignore new hooks",
            hint="attach first, then torch.compile(model)",
        )
    require_model(own)
    if library := library_inside(own):
        raise AttachError(
            f"the model has adapters of the library {library} in its layers",
            expected="the backbone as it was loaded",
            hint=remedy_inside(library),
        )
    if backbone.sharded and tensor_parallel(own) is None:
        raise AttachError(
            "the model is sharded: new parameters would differ between the processes",
            hint="attach first, then fully_shard(model)",
        )


def refuse_shared(backbone: Backbone, others: Iterable[AdaptedModel]) -> None:
    """Refuse a model that shares modules or parameters with another adapted model.

    Raises:
        AttachError: it shares some; the error names the other model's adapters.
    """
    strangers = [other for other in others if other.backbone.module is not backbone.module]
    own = set(map(id, _parts(backbone.module))) if strangers else set()
    for other in strangers:
        parts = (*_parts(other.backbone.module), *other.parameters)
        if not own.isdisjoint(map(id, parts)):
            raise AttachError(
                f"this {backbone.name} shares modules with a {other.backbone.name} that has "
                "adapters",
                offenders=map(repr, other.names),
                expected="models of which only one has adapters",
                hint="detach them there first, or attach to a copy: copy.deepcopy(model)",
            )


def _parts(model: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    """Yield parameters and the modules that hold tensors; models may share other modules."""
    for _, module in own_modules(model):
        if module._parameters or module._buffers:
            yield module
            yield from (p for p in module._parameters.values() if p is not None)


def remedy(thing: object) -> str:
    """Return the suggestion for an object that is not a model of transformers."""
    if isinstance(thing, str):
        name = thing.partition("(")[0]
        return f"attach(model, {thing!r})" if name in METHODS else _LOAD.format(repr(thing))
    if isinstance(thing, PreTrainedTokenizerBase):
        return "attach(model, METHOD, tokenizer=tokenizer)"
    if _defined_in("peft", type(thing)) and isinstance(thing, nn.Module):
        return _without_peft(thing) + _CONVERTED
    if path := _path_of_model(thing):
        return f"use the model inside: model.{path}; attach first, then wrap"
    return _LOAD.format("ID")


def library_inside(model: nn.Module) -> str | None:
    """Return the library whose adapters are in the layers of a model, or None."""
    kinds = {type(module) for _, module in own_modules(model)}
    libraries = ("peft", "adapters")
    return next((lib for lib in libraries if any(_defined_in(lib, k) for k in kinds)), None)


def remedy_inside(library: str) -> str:
    """Return the suggestion for a model with another library's adapters in its layers."""
    unload = "model = peft_model.unload(), or " if library == "peft" else ""
    return f"{unload}{_AGAIN}{_CONVERTED}"


def _without_peft(model: Any) -> str:
    if _defined_in("peft", type(model.base_model)):
        return "unwrap it, without its adapters: model = model.unload()"
    if library_inside(model.get_base_model()):  # a wrapped task head
        return _AGAIN
    return "unwrap it, without its adapters: model = model.get_base_model()"


def _defined_in(library: str, kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] == library for cls in kind.__mro__)


def _path_of_model(thing: Any) -> str | None:
    """Return the path of the model in a wrapper, a pipeline or a trainer."""
    if isinstance(thing, nn.Module):
        modules = thing.named_modules()
        return next((name for name, m in modules if is_transformers(m)), None)
    return "model" if is_transformers(getattr(thing, "model", None)) else None


Originals = Mapping[int, nn.Parameter]  # by the ids of the adapter parameters that replace them


def identities_before(
    anatomy: Anatomy, originals: Originals, trained: BackboneIdentity | None = None
) -> ModelIdentities:
    """Return the identities of a backbone: from a sample and from all values.

    `originals` are the parameters that adapters have replaced. `trained` is the identity to compare
    with; its vocabulary may have fewer rows.
    """
    vocabulary = _vocabulary(anatomy.backbone).common(trained.vocabulary if trained else None)
    tensors = _tensors(anatomy, originals)
    # The folder of another library's module is not a checkpoint of transformers.
    origin = None if anatomy.backbone.foreign else anatomy.backbone.origin
    return ModelIdentities(anatomy.model, tensors, origin, vocabulary, trained)


def _tensors(anatomy: Anatomy, originals: Originals) -> dict[str, Tensor]:
    """Map paths to the backbone's tensors, without adapters and new heads."""
    new = anatomy.backbone.fresh
    heads = tuple(f"{name}." for name in anatomy.head())
    own = {
        path: originals.get(id(tensor), tensor)
        for path, tensor in named_tensors(anatomy.model).items()
        if not path.startswith(heads) and path not in new
    }
    return own | dict(_codes(anatomy))


def _codes(anatomy: Anatomy) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor without values for each packed weight."""
    codes = torch.empty(1, 1, device="meta")
    return ((f"{host}.weight", codes) for host in anatomy.packed_hosts())


def _vocabulary(backbone: Backbone) -> Vocabulary:
    """Return the number of rows of the token embedding, and the number the tokenizer uses."""
    if (table := backbone.token_embedding) is None:
        return Vocabulary()
    # Rows may have been added since the backbone was loaded.
    rows = min(backbone.checkpoint_vocabulary_size() or len(table), len(table))
    snapshot = backbone.tokenizer
    return Vocabulary(rows, min(snapshot.size, rows) if snapshot else rows)


_OWN = frozenset(["_parameters", "_buffers", "training"])
_ABSENT = object()


class ModelStructure:
    """A snapshot of the attributes of modules and other objects, with container contents.

    Args:
        model: the model.
        others: further objects.
        parameters: the parameters whose `requires_grad` belongs to the structure.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[object],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        modules = (module for _, module in own_modules(model))
        slots = list(slots_in(model))
        objects = (*modules, *slots, *(slot.patch for slot in slots), *others)
        attributes = [(each, vars(each).copy()) for each in objects]  # a pass may add some
        self.objects = [(each, names, _contents(names)) for each, names in attributes]
        self.flags = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self) -> None:
        """Restore the recorded attributes, containers and flags."""
        for each, attributes, contents in self.objects:
            for name in vars(each).keys() - attributes.keys() - _OWN:
                del vars(each)[name]
            for name in attributes.keys() - _OWN:
                value = attributes[name]
                if vars(each).get(name, _ABSENT) is not value:
                    vars(each)[name] = value
                if isinstance(value, dict | list | set):
                    _refill(value, contents.get(name, ()))
        for parameter, flag in self.flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """Map the names of containers to copies; empty containers are left out."""
    return {
        name: value.copy()
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and value and name not in _OWN
    }


def _refill(container: Any, content: Any) -> None:
    """Restore the content of a container in place, if it has changed."""
    if not content:
        if container:
            container.clear()
    elif isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
    elif isinstance(container, list):
        if not _same(container, content):
            container[:] = content
    elif not (_same(container, content) and _same(container.values(), content.values())):
        container.clear()
        container.update(content)


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether two containers hold the same objects in the same order."""
    return list(map(id, some)) == list(map(id, others))


_STATE = "_adapterhub"
_STATES: weakref.WeakSet[ModelState] = weakref.WeakSet()  # of all models, with adapters or without


@dataclass(eq=False)
class ModelState:
    """The adapters of one model, and the state of the model before the first one."""

    backbone: Backbone
    anatomy: Anatomy
    parameters: list[nn.Parameter]
    adapters: dict[str, Adapter] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)
    routes: list[RouteActivation] = field(default_factory=list)  # open routes of all threads
    patch: Patch = field(default_factory=Patch)  # from the first adapter to the last
    passes: ForwardPasses = field(init=False)
    model: nn.Module = field(init=False)
    known: dict[bool, BackboneIdentity] = field(default_factory=dict)  # see keep_identity
    ends: list[EndTokens] = field(default_factory=list)  # the model's own, while others apply

    def __post_init__(self) -> None:
        self.model = self.backbone.module
        self.passes = ForwardPasses(self.backbone)
        _STATES.add(self)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        _STATES.add(self)  # of a copied or unpickled model

    @property
    def scope(self) -> ModelScope:
        """The identifier of the model in the context of a call."""
        return self.passes.scope

    @property
    def activation(self) -> Activation:
        """The activation that applies outside routes."""
        return self.passes.active

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """The compositions that apply: those of the open route, or else the active one."""
        route = self.open_route()
        return self.activation.compositions if route is None else route.compositions

    def open_route(self) -> RouteActivation | None:
        """Return the innermost route that is open in this context."""
        entry = current_entry(self.scope)
        return None if entry is None or isinstance(entry.owner, BegunPass) else entry.owner

    def activate(self, composition: Composition) -> None:
        """Make a composition active.

        Raises:
            AttachError: a name that is not attached, or adapters that cannot be active together.
                The previous composition stays active.
        """
        require_attached(self, adapter_names(composition))
        with STRUCTURE_LOCK, deferred_interrupts():
            self._make_active(activation_of(self.backbone, self.adapters, composition))

    def deactivate(self, nothing: StackActivation) -> None:
        """Make `nothing`, an empty activation, active."""
        with STRUCTURE_LOCK, deferred_interrupts():
            self._make_active(nothing)

    def _make_active(self, activation: Activation) -> None:
        """Exchange the activation; on an error, the previous one stays."""
        _refuse_exclusive(activation, [each for each in self.routes if each.replaces])
        before = self.activation
        if not self.open_route():
            set_entry(self.scope, None)  # of a pass that was interrupted
        try:
            self._exchange(before, activation)
        except BaseException:
            self._exchange(activation, before)
            raise

    def _exchange(self, before: Activation, activation: Activation) -> None:
        """Exchange the activation. The reverse exchange undoes an incomplete one."""
        if not self.routes:
            self.passes.replace(None)
        activation.prepare()
        for slot in before.table:
            slot.active = NO_MODULES
        for slot, applied in activation.table.items():
            slot.active = applied
        self.passes.active = activation
        before.close()
        self._settle()

    def _settle(self) -> None:
        """Put heads, labels and parameters into the model, and set its chat template."""
        innermost = self.routes[-1] if self.routes else self.activation
        self.passes.replace(innermost if innermost.replaces else None)
        applied = self._applied()
        for tokenizer, template in self.templates():
            tokenizer.show(self.scope, template)
        self._stop_at([i for each in applied for i in _stops(each)])

    def _applied(self) -> Sequence[Activation | RouteActivation]:
        """Return the innermost open route of each thread, or else the activation."""
        outer = [route.outer for route in self.routes]
        applied = [each for each in self.routes if not any(each is one for one in outer)]
        return applied or [self.activation]

    def templates(self) -> list[tuple[TokenizerSnapshot, str | None]]:
        """Return the chat template that applies to each tokenizer; None: the user's own."""
        tokenizers = {a.tokenizer for a in self.adapters.values() if a.tokenizer}
        applied = self._applied()
        return [(t, template_of(self.adapters, applied, t.chat_template())) for t in tokenizers]

    def new_stops(self, stops: Iterable[int]) -> list[int]:
        """Return those `stops` at which the bare model does not stop generating."""
        known = with_stops(self.own_ends, ())
        return [stop for stop in stops if stop not in known]

    @property
    def own_ends(self) -> EndTokens:
        """The tokens at which the bare model stops generating."""
        return self.ends[0] if self.ends else self.backbone.stops

    def _stop_at(self, stops: Sequence[int]) -> None:
        """Stop generation at these tokens and at the model's own end tokens."""
        if stops and not self.ends:
            self.ends.append(self.backbone.stops)
        if self.ends:
            self.backbone.stops = with_stops(self.ends[0], stops) if stops else self.ends[0]
        if not stops:
            self.ends.clear()

    def _routes_of_others(self, route: RouteActivation | None) -> list[RouteActivation]:
        """List the open routes, except one and its outer routes."""
        own = []
        while route is not None:
            own.append(route)
            route = route.outer
        return [each for each in self.routes if not any(each is one for one in own)]

    @contextmanager
    def route(self, activation: RouteActivation) -> Iterator[None]:
        """Apply an activation to the calls inside this context.

        Raises:
            AttachError: an adapter replaces parts of the model while another thread has a route
                open, or the reverse.
        """
        applied = ExitStack()
        try:
            with STRUCTURE_LOCK, deferred_interrupts():
                self._open(activation)
                entry = ContextEntry(activation.table, activation)
                applied.enter_context(applying(self.scope, entry))
            yield
        finally:
            try:
                self._close(activation, applied)
            except KeyboardInterrupt:  # before it was deferred
                self._close(activation, applied)
                raise

    def _open(self, activation: RouteActivation) -> None:
        """Open a route; `_close` also closes a partly opened one."""
        outer = self.open_route()
        if outer is None:
            set_entry(self.scope, None)  # of a pass that was interrupted
        _refuse_exclusive(activation, self._routes_of_others(outer))
        activation.outer = outer
        self.routes.append(activation)
        self._settle()
        activation.prepare()

    def _close(self, activation: RouteActivation, applied: ExitStack) -> None:
        """Close a route; parts that are already closed stay closed."""
        with deferred_interrupts(), STRUCTURE_LOCK:
            applied.close()
            activation.close()
            self.routes = [each for each in self.routes if each is not activation]
            if not self.routes:
                self.passes.restore_labels()
            self._settle()

    def add(self, adapter: Adapter) -> None:
        """Attach a finished adapter, freeze the backbone, and activate the adapter.

        On an error, the model and the tokenizer are restored.

        Raises:
            AttachError: nothing would train.
            SiteError: the attention implementation does not support the adapter's prefix.
            MismatchError: the tokenizer has other tokens at the ids of the new tokens.
        """
        adapter.check_usable()

        def change() -> None:
            adapter.lend()
            self._add(adapter)

        self._change([adapter], change, undo=lambda: self._take_back([adapter]))

    def _change(
        self, adapters: Sequence[Adapter], change: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Change the structure; on an error, restore everything.

        `undo` restores the tokens of tokenizers.
        """
        with STRUCTURE_LOCK, deferred_interrupts():
            active, structure = self.activation, None
            tokenizers = [adapter.tokenizer for adapter in adapters if adapter.tokenizer]
            templates = [(each.tokenizer, each.tokenizer.chat_template) for each in tokenizers]
            bare: list[tuple[Any, Any]] = []
            try:
                self._make_active(StackActivation())  # structure excludes replaced parts
                bare = [(each, each.chat_template) for each, _ in templates]
                structure = ModelStructure(
                    self.model,
                    [self, self.patch, *(each.borrowed for each in tokenizers)],
                    self.parameters,
                )
                change()
            except BaseException:
                if structure is not None:
                    undo()
                    self._make_active(StackActivation())
                    structure.restore()
                for tokenizer, template in bare:
                    tokenizer.chat_template = template
                if self.activation is not active:
                    self._make_active(active)
                for tokenizer, template in templates:
                    tokenizer.chat_template = template
                raise

    def _add(self, adapter: Adapter) -> None:
        if not self.adapters:
            self._change_model()
        if adapter.tokenizer:
            self.backbone.tokenizer = adapter.tokenizer
        if any(type(parameter) is not nn.Parameter for parameter in self.parameters):
            prepare_quantized(self.model, self.patch)  # packed codes subclass nn.Parameter
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        self.adapters[adapter.name] = adapter
        adapter.inject()
        self.activate((adapter.name,))

    def _change_model(self) -> None:
        """Apply the changes to the model that all adapters need."""
        model, patch = self.model, self.patch
        patch.override(model, _STATE, self)
        patch.push(partial(setattr, self.backbone, "tokenizer", self.backbone.tokenizer))
        replace_methods(self, patch)
        require_input_gradients(self.anatomy, patch)
        self.backbone.keep_states_whole(patch)
        self.passes.watch(self.anatomy, patch)
        for parameter in self.parameters:
            patch.set(parameter, "requires_grad", False)

    def _take_back(self, adapters: Sequence[Adapter]) -> None:
        """Remove the tokens that only these adapters use from their tokenizers."""
        for adapter in adapters:
            if adapter.tokenizer:
                adapter.take_back(_tokens_in_use(adapter.tokenizer, adapters))

    def detach(self, *names: str) -> None:
        """Remove adapters, and the adapters brought along for them; restore them on an error.

        Removing the last adapter restores the model.

        Raises:
            AttachError: no such adapter, others are on it, or it is part of the active average or
                of an open route.
        """
        require_attached(self, names)
        refuse_in_route(self)
        named = [self.adapters[name] for name in dict.fromkeys(names)]
        refuse_below(self.adapters, named)
        removed = with_brought(self.adapters, named)

        def change() -> None:
            for adapter in removed:
                del self.adapters[adapter.name]
                adapter.eject()
            if not self.adapters:
                self.patch.undo()
            self._take_back(removed)
            self._make_active(remaining)

        def undo() -> None:
            for adapter in removed:
                adapter.lend()

        with STRUCTURE_LOCK:
            refuse_routed(self, *(adapter.name for adapter in removed))
            remaining = self._active_without(removed)
            self._change(removed, change, undo)

    def _active_without(self, removed: Sequence[Adapter]) -> Activation:
        if len(removed) == len(self.adapters):
            return StackActivation()
        activation = self.activation
        for adapter in removed:
            activation = activation.without(adapter)
        return activation

    def reattach(self, adapters: Sequence[Adapter], composition: Composition) -> None:
        """Attach adapters that were detached from this model.

        The model is bare; `composition` is active afterwards.
        """
        self.parameters = list(self.model.parameters())
        for adapter in adapters:
            self.add(adapter)
        self.activate(composition)

    def originals(self) -> dict[int, nn.Parameter]:
        """Map the ids of adapter parameters to the backbone parameters that they replace."""
        return {id(c.own): c.original for a in self.adapters.values() for c in a.changed}

    def fingerprint(self) -> str:
        """Compute the fingerprint of the backbone's weights before any adapter."""
        return self.identity(complete=False).fingerprint

    def identity(self, *, complete: bool = True) -> BackboneIdentity:
        """Compute the identity of the backbone before any adapter.

        `complete` reads all values instead of a sample, if that is cheap.
        """
        if complete in self.known:
            return self.known[complete]
        return self.identities().identity(complete=complete)

    def keep_identity(self) -> None:
        """Compute the identity of the backbone now, and keep it while adapters are attached.

        Afterwards its parameters may be sharded, and replaced parameters may be deleted.
        """
        self.known = {complete: self.identity(complete=complete) for complete in (True, False)}

    def identities(self, trained: BackboneIdentity | None = None) -> ModelIdentities:
        """Return the identities of the backbone before any adapter: sampled and complete.

        `trained` is the identity to compare with; its vocabulary may have fewer rows.
        """
        return identities_before(self.anatomy, self.originals(), trained)


def _stops(activation: Activation | RouteActivation) -> Iterator[int]:
    for adapter in activation.adapters:
        yield from adapter.stops


def find_state(model: nn.Module) -> ModelState | None:
    """Return the state of a model, or None if no adapter is attached."""
    return getattr(Backbone.of(model).module, _STATE, None)


def get_state(model: nn.Module) -> ModelState:
    """Return the state of a model.

    Raises:
        AttachError: no adapter is attached, or the object is not a model of transformers.
    """
    state = find_state(model)
    if state is None:
        require_model(model)
        raise AttachError("no adapter is attached to this model", hint='attach(model, "lora")')
    return state


def backbone_fingerprint(model: nn.Module) -> str:
    """Compute the identity of a model's backbone, with or without adapters attached.

    Raises:
        AttachError: not a model of transformers.
    """
    require_model(Backbone.of(model).module)
    return (find_state(model) or new_state(model)).fingerprint()


@contextmanager
def bare(model: nn.Module, head: Sequence[str] = ()) -> Iterator[ModelState]:
    """Prepare a model for a new adapter: no adapter is active inside.

    `head` names the modules of the head, if it is not a model of transformers.

    Enter the context with `STRUCTURE_LOCK` held. It yields the model's state; `add` attaches the
    adapter. If none is added, or on an error, the previous composition is active again.

    Raises:
        AttachError: not a module, a compiled or sharded model, a model that shares modules with
            another adapted model, or inside a route.
    """
    backbone = Backbone.of(model)
    check_model(backbone)
    refuse_shared(backbone, _adapted_models())
    state = find_state(backbone.module) or new_state(backbone.module, head)
    _refuse_other_head(state, head)
    refuse_in_route(state)
    (before,) = state.compositions
    nothing = StackActivation()
    try:
        state.deactivate(nothing)
        # Parameters that are created in inference mode can never train.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            yield state
    finally:
        with deferred_interrupts():
            if state.activation is nothing:
                state.activate(before)


def _refuse_other_head(state: ModelState, head: Sequence[str]) -> None:
    """Refuse a head that differs from the head of the attached adapters.

    Raises:
        AttachError: another head, or a model of transformers, whose head is known.
    """
    known = state.anatomy.named_head
    if head and known is None:
        raise AttachError(
            f"the head of a {type(state.model).__name__} is not to be named: it is known",
            hint="attach(model, METHOD) without `head`",
        )
    if head and set(head) != set(known or ()):
        raise AttachError(
            f"the adapters of this module have the head {list(known or ())}, not {list(head)}",
            hint="detach(module) first, or attach with the same head",
        )


def activated(state: ModelState, composition: Composition) -> AbstractContextManager[None]:
    """Make a composition active inside, and restore the previous one afterwards.

    Enter the context with `STRUCTURE_LOCK` held if other threads must not compute with it.

    Raises:
        AttachError: inside a route; on entering, as `ModelState.activate`.
    """
    refuse_in_route(state)
    return temporarily(state, composition)


def _tokens_in_use(tokenizer: TokenizerSnapshot, removed: Sequence[Adapter]) -> set[str]:
    """Return the new tokens of all other adapters that share a tokenizer, on any model."""
    return {
        token.content
        for state in list(_STATES)
        for adapter in list(state.adapters.values())
        if adapter.tokenizer and adapter.tokenizer.tokenizer is tokenizer.tokenizer
        if adapter not in removed
        for token in (adapter.new_tokens.tokens if adapter.new_tokens else ())
    }


def require_attached(state: ModelState, names: Iterable[str]) -> None:
    """Refuse names of adapters that are not attached.

    Raises:
        AttachError: names are missing; the error lists them and the attached ones.
    """
    missing = [name for name in dict.fromkeys(names) if name not in state.adapters]
    if missing:
        near = [f"{name!r}{did_you_mean(name, state.adapters)}" for name in missing]
        raise AttachError(
            f"no adapter named {', '.join(near)} is attached to this model",
            expected=f"one of {', '.join(map(repr, state.adapters)) or 'none: the model is bare'}",
        )


def refuse_in_route(state: ModelState) -> None:
    """Refuse to attach, activate or detach while a route is open.

    Raises:
        AttachError: a route is open.
    """
    if state.open_route():
        raise AttachError(
            "cannot attach, activate or detach adapters inside route(...) or disabled(...)",
            hint="leave the `with` block first",
        )


def refuse_routed(state: ModelState, *names: str) -> None:
    """Refuse adapters that an open route of any thread uses.

    Raises:
        AttachError: adapters are in use; the error names them.
    """
    used = {adapter.name for route in state.routes for adapter in route.adapters}
    if busy := sorted(used.intersection(names)):
        raise AttachError(
            f"{', '.join(map(repr, busy))} is in use: another thread has a route open",
            hint="detach it when no route uses it",
        )


def _refuse_exclusive(
    activation: Activation | RouteActivation, others: Sequence[RouteActivation]
) -> None:
    """Refuse an activation next to other threads' routes if one of them replaces model parts."""
    replacing = [each for each in (activation, *others) if each.replaces]
    if others and replacing:
        names = [repr(adapter.name) for each in replacing for adapter in each.adapters]
        raise AttachError(
            f"a route through {', '.join(names)} replaces parts of the model, which all threads "
            "share, and another thread has a route open",
            expected="one thread at a time",
        )


def new_state(model: nn.Module, head: Sequence[str] = ()) -> ModelState:
    """Return the state of a model without adapters; `head` names the modules of its head."""
    anatomy = anatomy_of(model, head)
    return ModelState(anatomy.backbone, anatomy, list(anatomy.backbone.module.parameters()))


def _adapted_models() -> list[AdaptedModel]:
    """List all models that have adapters."""
    return [
        AdaptedModel(state.backbone, list(state.adapters), state.parameters)
        for state in list(_STATES)
        if state.adapters
    ]
