"""The state of a model with adapters: what is attached, what is active, what was before.

Several threads may share a model. What changes is changed under `STRUCTURE_LOCK`.

On an error the structure of the model is restored: modules, hooks, attributes and what trains.
Tensors are not part of it: activations exchange them, and undo it on their own. Nor are the modules
that slots hold, which no change touches. Other threads may compute meanwhile, so that only what
differs is touched.
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    """A model with adapters: their names, and its parameters as they were before."""

    backbone: Backbone
    names: Iterable[str]
    parameters: Iterable[nn.Parameter]


def require_model(model: object) -> None:
    """Refuse what is no module, or only wraps a model; `check_model` refuses a compiled one.

    Raises:
        AttachError: something else; the error says what to type instead.
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
    """Return the backbone of a model of transformers, or of another module; refuse other things.

    Raises:
        AttachError: as `require_model`.
    """
    require_model(model)
    return Backbone.of(model)


def _only_wraps(module: nn.Module) -> bool:
    """Return whether a module has a model of transformers inside, and no parameters beside it."""
    inside = next((m for m in module.modules() if is_transformers(m)), None)
    if inside is None or _defined_in("peft", type(module)):
        return inside is not None
    own = set(map(id, inside.parameters()))
    return all(id(parameter) in own for parameter in module.parameters())


def check_model(backbone: Backbone) -> None:
    """Refuse what is not a model of transformers, and a compiled, sharded or adapted one.

    Adapters of another library would be part of the outputs, and not of the backbone's identity.

    Raises:
        AttachError: which of them it is.
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
    """Refuse a model that shares modules or parameters with another one that has adapters.

    Raises:
        AttachError: which adapters the other one has.
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
    """Yield parameters, and the modules that hold tensors; models share others, as activations."""
    for _, module in own_modules(model):
        if module._parameters or module._buffers:
            yield module
            yield from (p for p in module._parameters.values() if p is not None)


def remedy(thing: object) -> str:
    """Return what to type instead, for something that is not a model of transformers."""
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
    """Return the library that has put its own adapters into the layers of a model, or None."""
    kinds = {type(module) for _, module in own_modules(model)}
    libraries = ("peft", "adapters")
    return next((lib for lib in libraries if any(_defined_in(lib, k) for k in kinds)), None)


def remedy_inside(library: str) -> str:
    """Return what to type for a model with the adapters of another library in its layers."""
    unload = "model = peft_model.unload(), or " if library == "peft" else ""
    return f"{unload}{_AGAIN}{_CONVERTED}"


def _without_peft(model: Any) -> str:
    if _defined_in("peft", type(model.base_model)):
        return "unwrap it, without its adapters: model = model.unload()"
    if library_inside(model.get_base_model()):  # a task head that it has wrapped
        return _AGAIN
    return "unwrap it, without its adapters: model = model.get_base_model()"


def _defined_in(library: str, kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] == library for cls in kind.__mro__)


def _path_of_model(thing: Any) -> str | None:
    """Return where a wrapper, a pipeline or a trainer has its model."""
    if isinstance(thing, nn.Module):
        modules = thing.named_modules()
        return next((name for name, m in modules if is_transformers(m)), None)
    return "model" if is_transformers(getattr(thing, "model", None)) else None


Originals = Mapping[int, nn.Parameter]  # by the ids of the adapters' parameters in their place


def identities_before(
    anatomy: Anatomy, originals: Originals, trained: BackboneIdentity | None = None
) -> ModelIdentities:
    """Return the identities of a backbone, of a sample and of all values.

    `originals` are the parameters that adapters have replaced; `trained` is the identity to compare
    with, whose vocabulary may have fewer rows.
    """
    vocabulary = _vocabulary(anatomy.backbone).common(trained.vocabulary if trained else None)
    tensors = _tensors(anatomy, originals)
    # The folder of another library's module is no checkpoint of transformers.
    origin = None if anatomy.backbone.foreign else anatomy.backbone.origin
    return ModelIdentities(anatomy.model, tensors, origin, vocabulary, trained)


def _tensors(anatomy: Anatomy, originals: Originals) -> dict[str, Tensor]:
    """Map paths to the backbone's tensors, without those of adapters and new heads."""
    new = anatomy.backbone.fresh
    heads = tuple(f"{name}." for name in anatomy.head())
    own = {
        path: originals.get(id(tensor), tensor)
        for path, tensor in named_tensors(anatomy.model).items()
        if not path.startswith(heads) and path not in new
    }
    return own | dict(_codes(anatomy))


def _codes(anatomy: Anatomy) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor without values for each weight that is packed."""
    codes = torch.empty(1, 1, device="meta")
    return ((f"{host}.weight", codes) for host in anatomy.packed_hosts())


def _vocabulary(backbone: Backbone) -> Vocabulary:
    """Return how many rows the token embedding has, and how many of them the tokenizer uses."""
    if (table := backbone.token_embedding) is None:
        return Vocabulary()
    # Some may have been added since the backbone was loaded.
    rows = min(backbone.checkpoint_vocabulary_size() or len(table), len(table))
    snapshot = backbone.tokenizer
    return Vocabulary(rows, min(snapshot.size, rows) if snapshot else rows)


_OWN = frozenset(["_parameters", "_buffers", "training"])
_ABSENT = object()


class ModelStructure:
    """The attributes of a model's modules and of further objects, and what their containers hold.

    Args:
        model: the model.
        others: further objects.
        parameters: those whose `requires_grad` belongs to the structure.
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
        """Make everything as it was."""
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
    """Map the names of containers to copies of them; most are empty, and have none."""
    return {
        name: value.copy()
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and value and name not in _OWN
    }


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, unless it has it; the object stays the same."""
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
    """Return whether two containers have the same objects in the same order."""
    return list(map(id, some)) == list(map(id, others))


_STATE = "_adapterhub"
_STATES: weakref.WeakSet[ModelState] = weakref.WeakSet()  # of all models, with adapters or without


@dataclass(eq=False)
class ModelState:
    """The adapters of one model, and how the model was before the first of them."""

    backbone: Backbone
    anatomy: Anatomy
    parameters: list[nn.Parameter]
    adapters: dict[str, Adapter] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)
    routes: list[RouteActivation] = field(default_factory=list)  # the open ones, of all threads
    patch: Patch = field(default_factory=Patch)  # from the first adapter to the last
    passes: ForwardPasses = field(init=False)
    model: PreTrainedModel = field(init=False)
    known: dict[bool, BackboneIdentity] = field(default_factory=dict)  # see keep_identity
    ends: list[EndTokens] = field(default_factory=list)  # those of the model, while others apply

    def __post_init__(self) -> None:
        self.model = self.backbone.model
        self.passes = ForwardPasses(self.backbone)
        _STATES.add(self)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        _STATES.add(self)  # of a copied or unpickled model

    @property
    def scope(self) -> ModelScope:
        """Identifies the model in the context of a call."""
        return self.passes.scope

    @property
    def activation(self) -> Activation:
        """What is active where no route is open."""
        return self.passes.active

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """What applies: the rows of this context's route, or without one what is active."""
        route = self.open_route()
        return self.activation.compositions if route is None else route.compositions

    def open_route(self) -> RouteActivation | None:
        """Return the innermost route that is open in this context."""
        entry = current_entry(self.scope)
        return None if entry is None or isinstance(entry.owner, BegunPass) else entry.owner

    def activate(self, composition: Composition) -> None:
        """Make a composition active.

        Raises:
            AttachError: a name that is not attached, or adapters that cannot be active together;
                what was active stays active.
        """
        require_attached(self, adapter_names(composition))
        with STRUCTURE_LOCK, deferred_interrupts():
            self._make_active(activation_of(self.model, self.adapters, composition))

    def deactivate(self, nothing: StackActivation) -> None:
        """Make `nothing`, an empty activation, the active one."""
        with STRUCTURE_LOCK, deferred_interrupts():
            self._make_active(nothing)

    def _make_active(self, activation: Activation) -> None:
        """Exchange what is active, or leave it on an error."""
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
        """Exchange what is active. Done in part, it is undone by an exchange the other way."""
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
        """Put heads, labels and parameters into the model, and its chat template in place."""
        innermost = self.routes[-1] if self.routes else self.activation
        self.passes.replace(innermost if innermost.replaces else None)
        applied = self._applied()
        for tokenizer, template in self.templates():
            tokenizer.show(self.scope, template)
        self._stop_at([i for each in applied for i in _stops(each)])

    def _applied(self) -> Sequence[Activation | RouteActivation]:
        """Return the innermost open route of each thread, or without one the activation."""
        outer = [route.outer for route in self.routes]
        applied = [each for each in self.routes if not any(each is one for one in outer)]
        return applied or [self.activation]

    def templates(self) -> list[tuple[TokenizerSnapshot, str | None]]:
        """Return the chat template that applies, of each tokenizer; None: the user's own."""
        tokenizers = {a.tokenizer for a in self.adapters.values() if a.tokenizer}
        applied = self._applied()
        return [(t, template_of(self.adapters, applied, t.chat_template())) for t in tokenizers]

    def new_stops(self, stops: Iterable[int]) -> list[int]:
        """Return the tokens at which the generation of the bare model does not stop itself."""
        known = with_stops(self.own_ends, ())
        return [stop for stop in stops if stop not in known]

    @property
    def own_ends(self) -> EndTokens:
        """The tokens at which the generation of the bare model stops."""
        return self.ends[0] if self.ends else self.backbone.stops

    def _stop_at(self, stops: Sequence[int]) -> None:
        """Let generation stop at the model's own end tokens, and at these."""
        if stops and not self.ends:
            self.ends.append(self.backbone.stops)
        if self.ends:
            self.backbone.stops = with_stops(self.ends[0], stops) if stops else self.ends[0]
        if not stops:
            self.ends.clear()

    def _routes_of_others(self, route: RouteActivation | None) -> list[RouteActivation]:
        """List the open routes but one and those that it is nested in."""
        own = []
        while route is not None:
            own.append(route)
            route = route.outer
        return [each for each in self.routes if not any(each is one for one in own)]

    @contextmanager
    def route(self, activation: RouteActivation) -> Iterator[None]:
        """Apply an activation to the calls of this context inside.

        Raises:
            AttachError: adapters that replace parts of the model, while another thread has a route
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
        """Open a route, of which `_close` may find any part done."""
        outer = self.open_route()
        if outer is None:
            set_entry(self.scope, None)  # of a pass that was interrupted
        _refuse_exclusive(activation, self._routes_of_others(outer))
        activation.outer = outer
        self.routes.append(activation)
        self._settle()
        activation.prepare()

    def _close(self, activation: RouteActivation, applied: ExitStack) -> None:
        """Close a route; what is closed already stays so."""
        with deferred_interrupts(), STRUCTURE_LOCK:
            applied.close()
            activation.close()
            self.routes = [each for each in self.routes if each is not activation]
            if not self.routes:
                self.passes.restore_labels()
            self._settle()

    def add(self, adapter: Adapter) -> None:
        """Attach a finished adapter, freeze the backbone, and make the adapter the active one.

        On an error, the model and the tokenizer are as before.

        Raises:
            AttachError: nothing would train.
            SiteError: the attention implementation does not support its prefix.
            MismatchError: the tokenizer has other tokens under the ids of its new tokens.
        """
        adapter.check_usable()

        def change() -> None:
            adapter.lend()
            self._add(adapter)

        self._change([adapter], change, undo=lambda: self._take_back([adapter]))

    def _change(
        self, adapters: Sequence[Adapter], change: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Change the structure, or leave everything as it was.

        `undo` gives tokenizers the tokens back that they had.
        """
        with STRUCTURE_LOCK, deferred_interrupts():
            active, structure = self.activation, None
            tokenizers = [adapter.tokenizer for adapter in adapters if adapter.tokenizer]
            templates = [(each.tokenizer, each.tokenizer.chat_template) for each in tokenizers]
            bare: list[tuple[Any, Any]] = []
            try:
                self._make_active(StackActivation())  # parts that it replaces are no structure
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
            prepare_quantized(self.model, self.patch)  # codes are parameters of other classes
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        self.adapters[adapter.name] = adapter
        adapter.inject()
        self.activate((adapter.name,))

    def _change_model(self) -> None:
        """Make the changes of the model that all adapters need."""
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
        """Take back from tokenizers what only these adapters need."""
        for adapter in adapters:
            if adapter.tokenizer:
                adapter.take_back(_tokens_in_use(adapter.tokenizer, adapters))

    def detach(self, *names: str) -> None:
        """Remove adapters, and those that were brought along for them; undone on an error.

        With the last one the model is as it was before.

        Raises:
            AttachError: no such adapter, others are on it, or it is part of the active average, or
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
        """Attach adapters again that were detached from this model.

        The model is bare; `composition` is active afterwards.
        """
        self.parameters = list(self.model.parameters())
        for adapter in adapters:
            self.add(adapter)
        self.activate(composition)

    def originals(self) -> dict[int, nn.Parameter]:
        """Map the ids of adapters' parameters to the backbone parameters that they replace."""
        return {id(c.own): c.original for a in self.adapters.values() for c in a.changed}

    def fingerprint(self) -> str:
        """Compute the name of the backbone's weights as they were before any adapter."""
        return self.identity(complete=False).fingerprint

    def identity(self, *, complete: bool = True) -> BackboneIdentity:
        """Compute the identity of the backbone as it was before any adapter.

        `complete` reads all values where that is cheap, rather than a sample.
        """
        if complete in self.known:
            return self.known[complete]
        return self.identities().identity(complete=complete)

    def keep_identity(self) -> None:
        """Compute the identity of the backbone now, for as long as adapters are attached.

        Afterwards its parameters may be sharded, and those that adapters replace may be deleted.
        """
        self.known = {complete: self.identity(complete=complete) for complete in (True, False)}

    def identities(self, trained: BackboneIdentity | None = None) -> ModelIdentities:
        """Return the identities of the backbone before any adapter, of a sample and of all values.

        `trained` is the identity to compare with, whose vocabulary may have fewer rows.
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
        AttachError: no adapter is attached, or not a model of transformers.
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

    `head` are the modules that are its head, if it is not a model of transformers.

    The context is entered with `STRUCTURE_LOCK` held, and returns the model's state, to `add` the
    adapter to. Without one, on an error, what was active is active again.

    Raises:
        AttachError: no model of transformers, a compiled or sharded one, one that shares modules
            with another model with adapters, or inside a route.
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
    """Refuse a head that is not that of the adapters which are attached.

    Raises:
        AttachError: which it is, or the model is of transformers, whose head is known.
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
    """Make a composition active inside, and what was active before again afterwards.

    The context is entered with `STRUCTURE_LOCK` held if other threads shall not compute with it.

    Raises:
        AttachError: inside a route; on entering, as `ModelState.activate`.
    """
    refuse_in_route(state)
    return temporarily(state, composition)


def _tokens_in_use(tokenizer: TokenizerSnapshot, removed: Sequence[Adapter]) -> set[str]:
    """Return the new tokens of all other adapters with a tokenizer, on any model."""
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
        AttachError: the names that are missing, and those attached.
    """
    missing = [name for name in dict.fromkeys(names) if name not in state.adapters]
    if missing:
        near = [f"{name!r}{did_you_mean(name, state.adapters)}" for name in missing]
        raise AttachError(
            f"no adapter named {', '.join(near)} is attached to this model",
            expected=f"one of {', '.join(map(repr, state.adapters)) or 'none: the model is bare'}",
        )


def refuse_in_route(state: ModelState) -> None:
    """Refuse to change what is attached or active while a route is open.

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
        AttachError: which are in use.
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
    """Refuse what is to apply besides other threads' routes if one replaces parts of the model."""
    replacing = [each for each in (activation, *others) if each.replaces]
    if others and replacing:
        names = [repr(adapter.name) for each in replacing for adapter in each.adapters]
        raise AttachError(
            f"a route through {', '.join(names)} replaces parts of the model, which all threads "
            "share, and another thread has a route open",
            expected="one thread at a time",
        )


def new_state(model: nn.Module, head: Sequence[str] = ()) -> ModelState:
    """Return the state of a model without adapters; `head` are the modules that are its head."""
    anatomy = anatomy_of(model, head)
    return ModelState(anatomy.backbone, anatomy, list(anatomy.backbone.module.parameters()))


def _adapted_models() -> list[AdaptedModel]:
    """List all models that have adapters."""
    return [
        AdaptedModel(state.backbone, list(state.adapters), state.parameters)
        for state in list(_STATES)
        if state.adapters
    ]
