"""The state of a model with adapters: what is attached, what is active, what was before."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.activation import Activation, StackActivation, activation_of
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.model_methods import ModelMethod, replace_methods
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.fingerprint import fingerprint_of
from adapterhub.backbones.identity import origin_of
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.quantized_training import prepare_quantized, restore_quantized
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.weights import is_sharded, packed_hosts
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.hooks.attention import check_attention
from adapterhub.hooks.composition import Composition, adapter_names

_STATE = "_adapterhub"
_STATES: weakref.WeakSet[ModelState] = weakref.WeakSet()  # of all models, with adapters or without


@dataclass(eq=False)
class ModelState:
    """The adapters of one model, and how the model was before the first of them."""

    model: PreTrainedModel
    anatomy: Anatomy
    trainable: list[tuple[nn.Parameter, bool]]
    adapters: dict[str, Adapter] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)
    activation: Activation = field(default_factory=StackActivation)
    routes: int = 0
    layouts: list[nn.Module] = field(default_factory=list)
    methods: list[ModelMethod] = field(default_factory=list)

    def __post_init__(self) -> None:
        _STATES.add(self)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        _STATES.add(self)  # of a copied or unpickled model

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """What is active: one composition for each row of a batch, or a single one for all."""
        return self.activation.compositions

    def activate(self, compositions: Sequence[Composition]) -> None:
        """Make compositions active.

        Raises:
            AttachError: a name that is not attached, or adapters that cannot be active together;
                what was active stays active.
        """
        require_attached(self, [n for each in compositions for n in adapter_names(each)])
        activation = activation_of(self.model, self.adapters, compositions)
        self.activation.off()
        self.activation = activation
        activation.on()

    def add(self, adapter: Adapter) -> None:
        """Attach a finished adapter, freeze the backbone, and make the adapter the active one.

        Raises:
            AttachError: nothing would train.
            SiteError: the attention implementation does not support its prefix.
        """
        _check_usable(adapter)
        setattr(self.model, _STATE, self)
        self.methods = self.methods or replace_methods(self)
        self.layouts += prepare_quantized(self.model)
        for parameter, _ in self.trainable:
            parameter.requires_grad_(False)
        self.adapters[adapter.name] = adapter
        adapter.inject()
        self.activate((adapter.name,))

    def detach(self, name: str) -> None:
        """Remove one adapter; with the last one the model is as it was before.

        Raises:
            AttachError: no such adapter, it is part of the active average, or inside a route.
        """
        require_attached(self, [name])
        refuse_in_route(self)
        self.activation = self.activation.without(self.adapters[name])
        adapter = self.adapters.pop(name)
        adapter.eject()
        if not self.adapters:
            for parameter, flag in self.trainable:
                parameter.requires_grad_(flag)
            restore_quantized(self.layouts)
            for method in self.methods:
                method.remove()
            self.methods = []
            delattr(self.model, _STATE)

    def reattach(self, adapters: Sequence[Adapter], compositions: Sequence[Composition]) -> None:
        """Attach adapters again that were detached from this model.

        Args:
            adapters: the adapters; the model is bare.
            compositions: what is active afterwards.
        """
        self.trainable = [(p, p.requires_grad) for p in self.model.parameters()]
        for adapter in adapters:
            self.add(adapter)
        self.activate(compositions)

    def originals(self) -> dict[int, nn.Parameter]:
        """Map the ids of adapters' parameters to the backbone parameters that they replace."""
        return {id(c.own): c.original for a in self.adapters.values() for c in a.changed}

    def fingerprint(self) -> str:
        """Compute the identity of the backbone as it was before any adapter."""
        originals = self.originals()
        new = newly_initialized(self.model)
        embedding, rows = token_embedding(self.model), checkpoint_vocabulary_size(self.model)
        named = (
            # Only the rows of the checkpoint: some may have been added since.
            (path, originals.get(id(p), p)[: rows if p is embedding else None])
            for path, p in self.anatomy.parameters().items()
            if path not in new
        )
        codes = torch.empty(1, 1, device="meta")
        packed = ((f"{host}.weight", codes) for host in packed_hosts(self.anatomy))
        return fingerprint_of(itertools.chain(named, packed), origin_of(self.model))


def find_state(model: PreTrainedModel) -> ModelState | None:
    """Return the state of a model, or None if no adapter is attached."""
    return getattr(model, _STATE, None)


def get_state(model: PreTrainedModel) -> ModelState:
    """Return the state of a model.

    Raises:
        AttachError: no adapter is attached.
    """
    state = find_state(model)
    if state is None:
        raise AttachError("no adapter is attached to this model", hint='attach(model, "lora")')
    return state


def backbone_fingerprint(model: PreTrainedModel) -> str:
    """Compute the identity of a model's backbone, with or without adapters attached.

    Raises:
        AttachError: not a model of transformers.
    """
    require_model(model)
    return (find_state(model) or _new_state(model)).fingerprint()


@contextmanager
def bare(model: PreTrainedModel) -> Iterator[ModelState]:
    """Prepare a model for a new adapter: no adapter is active inside.

    On an error, what was active is active again.

    Yields:
        The state of the model, to `add` the adapter to.

    Raises:
        AttachError: not a model of transformers, a compiled or sharded one, one that shares modules
            with another model with adapters, or inside a route.
    """
    _refuse_wrapped(model)
    require_model(model)
    _refuse_shared(model)
    state = find_state(model) or _new_state(model)
    refuse_in_route(state)
    before = state.compositions
    state.activate(((),))
    try:
        # Parameters that are created in inference mode can never train.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            yield state
    except BaseException:
        state.activate(before)
        raise


@contextmanager
def activated(state: ModelState, compositions: Sequence[Composition]) -> Iterator[None]:
    """Make compositions active inside, and what was active before again afterwards.

    Raises:
        AttachError: as `ModelState.activate`.
    """
    before = state.compositions
    state.activate(compositions)
    try:
        yield
    finally:
        state.activate(before)


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
    if state.routes:
        raise AttachError(
            "cannot attach, activate or detach adapters inside route(...)",
            hint="leave the `with route(...)` block first",
        )


def require_model(model: object) -> None:
    """Refuse what is not a model of transformers; `bare` refuses a compiled one.

    Raises:
        AttachError: something else; if it is a wrapper of a model, the error says where that is.
    """
    if isinstance(model, PreTrainedModel | torch._dynamo.OptimizedModule):
        return
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    path = next((name for name, module in named if isinstance(module, PreTrainedModel)), None)
    raise AttachError(
        f"{type(model).__name__} is not a model of transformers",
        expected="a PreTrainedModel",
        hint=f"attach(model.{path}, ...)" if path else "model, tokenizer = load_backbone(FOLDER)",
    )


def _refuse_shared(model: PreTrainedModel) -> None:
    """Refuse a model that shares modules or parameters with another one that has adapters."""
    own = set(map(id, (*_with_tensors(model), *model.parameters())))
    for other in list(_STATES):
        parts = (*_with_tensors(other.model), *(parameter for parameter, _ in other.trainable))
        if other.model is not model and other.adapters and not own.isdisjoint(map(id, parts)):
            raise AttachError(
                f"this {type(model).__name__} shares modules with a "
                f"{type(other.model).__name__} that has adapters",
                offenders=map(repr, other.adapters),
                expected="models of which only one has adapters",
                hint="detach them there first, or attach to a copy: copy.deepcopy(model)",
            )


def _with_tensors(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold tensors; models share some others, such as activations."""
    return (module for module in model.modules() if module._parameters or module._buffers)


def _new_state(model: PreTrainedModel) -> ModelState:
    return ModelState(model, anatomy_of(model), [(p, p.requires_grad) for p in model.parameters()])


def _refuse_wrapped(model: PreTrainedModel) -> None:
    compiled = isinstance(model, torch._dynamo.OptimizedModule) or any(
        m._compiled_call_impl is not None for m in model.modules()
    )
    if compiled:
        raise AttachError(
            "the model is compiled: it would silently ignore new hooks",
            hint="attach first, then torch.compile(model)",
        )
    if any(map(is_sharded, model.parameters())):
        raise AttachError(
            "the model is sharded: new parameters would differ between the processes",
            hint="attach first, then fully_shard(model)",
        )


def _check_usable(adapter: Adapter) -> None:
    if not adapter.parameters():
        raise AttachError(
            f"nothing would train: {', '.join(m.name for m in adapter.methods)} without a head",
            hint='load_backbone(..., task="classification", labels=[...])',
        )
    sites = [placed.site for placed in adapter.placed if placed.site.kind == "keyvalue"]
    check_attention(adapter.model, sites)
