"""Any model as its modules: without those of adapters, by the paths of a row, of any library.

Hooks, slots and files need modules, parameters and paths, which every `torch.nn.Module` has. A few
questions are asked of models of transformers only: for their configuration, token embeddings, task
head. A `ModuleView` answers them for any module: with what the module says itself, or "none". The
view is no copy. Its attributes are the module's own, one dictionary of both, so that a hook, slot
or mode that the view gets is the module's. Users keep their module, and never see the view.

A pipeline of diffusers is no module, but has modules:

    unet, transformer, prior, decoder    what removes the noise
    text_encoder, ...                    what reads the prompt

`parts_of` returns those of them that the pipeline's class names as loadable, in one `ModuleDict`:
their paths begin with the name of the part, as in the files of diffusers. A class that names none
(PixArt, DiT), or nothing that removes the noise (PRX), has the parts above. The pipeline itself is
not changed. Other modules, such as a VAE, a ControlNet or a T5 that no such file has, are no parts:
they are not adapted by default, may be exchanged, and an adapter is saved for the numbers of all
parts. Each can have adapters of its own.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from transformers import PreTrainedConfig, PreTrainedModel

# Buffers that training changes, by their usual names.
_STATISTICS = frozenset({"cluster_size", "embed_avg", "embedding_avg", "num_batches_tracked"})
_AVERAGES = ("running_", "ema_", "moving_")
CHILD = "adapterhub"  # the name of the one child module that a host has while adapters are attached


def own_modules(model: nn.Module, *, every_use: bool = False) -> list[tuple[str, nn.Module]]:
    """List the modules of a model with their paths, as `named_modules` does, without slots.

    `every_use` lists a module that has several paths under each of them.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", every_use, set(), found)
    return found


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module changes buffers while it trains.

    They are the averages of a batch norm or of a codebook, or the vectors of a spectral norm, which
    torch keeps in a parametrization, and before that in a hook.
    """
    buffers = (name for name, buffer in module._buffers.items() if buffer is not None)
    if any(name in _STATISTICS or name.startswith(_AVERAGES) for name in buffers):
        return True
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Keep buffers as they are inside: to read a weight with a spectral norm changes them."""
    training = [m for m in model.modules() if m.training and has_statistics(m)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def parameter_at(module: nn.Module, path: str) -> nn.Parameter | None:
    """Return the parameter of a module at a path; None if there is none."""
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner)._parameters.get(name)


def copy_with(module: Any, parameters: Mapping[str, Any], cls: type | None = None) -> Any:
    """Return a shallow copy of a module with other objects in place of some parameters.

    The module itself stays as it is, since other threads may compute with it. A path, such as
    `out_proj.weight`, is of a parameter of a child, which is copied likewise. The copy is of the
    class `cls`, by default of the module's own.
    """
    copied: Any = object.__new__(cls or type(module))
    vars(copied).update(vars(module))
    own = {name: value for name, value in parameters.items() if "." not in name}
    vars(copied)["_parameters"] = {**module._parameters, **own}
    inside: dict[str, dict[str, Any]] = {}
    for name in parameters.keys() - own.keys():
        child, _, rest = name.partition(".")
        inside.setdefault(child, {})[rest] = parameters[name]
    changed = {name: copy_with(module._modules[name], each) for name, each in inside.items()}
    vars(copied)["_modules"] = {**module._modules, **changed}
    return copied


def slots_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the slots of a model, without the modules that they hold."""
    for _, module in own_modules(model):
        if (slot := module._modules.get(CHILD)) is not None:
            yield slot


def _collect(
    module: nn.Module,
    path: str,
    every_use: bool,
    seen: set[int],
    found: list[tuple[str, nn.Module]],
) -> None:
    """Append a module and those below it, each before its children."""
    if not every_use and id(module) in seen:
        return
    seen.add(id(module))
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None and name != CHILD:
            _collect(child, f"{path}.{name}" if path else name, every_use, seen, found)


def join(*parts: str) -> str:
    """Join parts, some of which may be empty, into a module path."""
    return ".".join(p for p in parts if p)


def layer_paths(base: nn.Module, spec: str) -> list[str]:
    """List the paths of a stack's layers; empty if the model does not have the stack."""
    paths = [""]
    for name in spec.split(".*."):
        lists = [join(path, name) for path in paths]
        paths = [f"{path}.{number}" for path in lists for number in range(_length(base, path))]
    return paths


def _length(base: nn.Module, path: str) -> int:
    module = _get(base, path)
    return len(module) if isinstance(module, nn.ModuleList | nn.Sequential) else 0


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def first_existing(layer: nn.Module, spec: str) -> str | None:
    """Return the first of the `|`-separated paths that exists in the layer."""
    return next((path for path in spec.split("|") if has_path(layer, path)), None)


def has_path(layer: nn.Module, path: str) -> bool:
    """Return whether a module exists, or both of `a>b`."""
    return all(_get(layer, end) is not None for end in path.split(">"))


def base_classes(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes that AutoModel has for a configuration; empty if it has none."""
    return _classes(transformers.AutoModel, config)


def new_base_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the base model of a configuration, or that of a task for a type with no other.

    Raises:
        ValueError: no auto class of transformers has the configuration.
    """
    if classes := base_classes(config):
        return classes[0](config)
    for name in dir(transformers):
        if name.startswith("AutoModelFor"):
            for each in _classes(getattr(transformers, name), config):
                return each(config).base_model  # type: ignore[return-value]
    raise ValueError(f"no auto class of transformers has a {type(config).__name__}")


def _classes(auto: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    found = auto._model_mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def token_table(module: nn.Module) -> Any | None:
    """Return the module that embeds tokens; None if there is none or it cannot be determined.

    It is a table with one row per token, or another module in its place (of pixels or sound).
    """
    find = getattr(module, "get_input_embeddings", None)
    try:
        table = find() if find is not None else getattr(module, "embed_tokens", None)
    except (NotImplementedError, AttributeError):
        return None
    return table


def position_module(root: nn.Module) -> nn.Module | None:
    """Return the module of a stack to which token positions can be passed; None if there is none.

    The stack's root, if its forward takes `position_ids`; otherwise its table of positions, if that
    takes `position_ids` and `past_key_values_length`, as in BART.
    """
    if "position_ids" in _parameters(root):
        return root
    names = {"position_ids", "past_key_values_length"}
    return next((m for m in root.children() if names <= _parameters(m)), None)


def padding_table(root: nn.Module) -> nn.Module | None:
    """Return the table of a stack that counts positions from padding ids, as in M2M-100, or None.

    Without ids it takes embeddings, in which it finds no padding.
    """
    names = {"input_ids", "inputs_embeds", "past_key_values_length"}
    return next((m for m in root.children() if names == _parameters(m)), None)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


_PARTS: weakref.WeakKeyDictionary[Any, PipelineParts] = weakref.WeakKeyDictionary()
_LOADABLE = "_lora_loadable_modules"  # of the class of a pipeline
_INSIDE = "_orig_mod"  # of a compiled module: the module
_TEXT = "text_encoder"
_USUAL = re.compile(rf"(unet|transformer|prior|decoder|{_TEXT})(_\d)?")


class PipelineParts(nn.ModuleDict):
    """The modules of a pipeline that adapters can be at.

    Args:
        pipeline: the pipeline.

    Attributes:
        kind: the class of the pipeline.
        compiled: the names of the parts in whose place the pipeline has `torch.compile(part)`.
        others: the names of the pipeline's other modules.
        compute: what calling the parts as a model computes; None: a pipeline is called itself.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(_modules_of(pipeline))
        self.kind = type(pipeline)
        self.compiled: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.compute: Callable[..., Any] | None = None

    def forward(self, **inputs: Any) -> Any:
        """Compute what `compute` does."""
        if self.compute is None:
            raise TypeError(f"call the {self.kind.__name__} itself: its parts have no forward")
        return self.compute(**inputs)

    def __reduce__(self) -> tuple[Callable[[type], PipelineParts], tuple[type], dict[str, Any]]:
        # A copy of what is inside, which knows these parts, asks for their kind first.
        return _without_modules, (self.kind,), vars(self)


def is_pipeline(thing: object) -> TypeGuard[Any]:
    """Return whether an object is a pipeline of diffusers."""
    if isinstance(thing, nn.Module | type):
        return False
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(thing).__mro__}
    return "diffusers.DiffusionPipeline" in kinds


def loadable_in(kind: type, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names of a pipeline's modules that are parts, by the class of it."""
    present = list(names)
    loadable = tuple(getattr(kind, _LOADABLE, ()))
    if any(name in present for name in loadable if not name.startswith(_TEXT)):
        return loadable
    usual = (name for name in present if _USUAL.fullmatch(name))
    return tuple(dict.fromkeys((*loadable, *usual)))


def parts_of(pipeline: Any) -> PipelineParts:
    """Return the parts of a pipeline; the same object as long as it has the same parts.

    A compiled part stands for the one inside, whose hooks it calls.
    """
    modules = _modules_of(pipeline)
    known = _PARTS.get(pipeline) or _of_a_copy(modules)
    if known is None or dict(known.items()) != modules:
        known = PipelineParts(pipeline)
    _PARTS[pipeline] = known
    known.compiled = tuple(name for name in modules if hasattr(getattr(pipeline, name), _INSIDE))
    own = (name for name, value in vars(pipeline).items() if isinstance(value, nn.Module))
    known.others = tuple(name for name in own if name not in modules)
    return known


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    names = loadable_in(type(pipeline), vars(pipeline))
    found = {name: getattr(pipeline, name, None) for name in names}
    found = {name: getattr(module, _INSIDE, module) for name, module in found.items()}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def _without_modules(kind: type) -> PipelineParts:
    made = PipelineParts.__new__(PipelineParts)
    vars(made)["kind"] = kind
    return made


def _of_a_copy(modules: Mapping[str, nn.Module]) -> PipelineParts | None:
    """Return the parts that are copied with the adapters of a pipeline; None without adapters."""
    known = (getattr(m.__dict__.get("save_pretrained"), "owner", None) for m in modules.values())
    return next((parts for parts in known if isinstance(parts, PipelineParts)), None)


def as_module(thing: Any) -> Any:
    """Return the parts of a pipeline, and anything else as it is."""
    return parts_of(thing) if is_pipeline(thing) else thing


class ModuleConfig(PreTrainedConfig):
    """The configuration of a view: the module's class, and its options if it shows them."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.options = dict(options or {})

    def facts(self) -> dict[str, Any]:
        """Return what changes what the module computes, as far as it says."""
        return {"model_type": self.model_type, **self.options}


class ModuleView(PreTrainedModel):
    """A module of any library, as a model without tokens.

    Args:
        module: the module, whose attributes are those of the view.
    """

    __slots__ = ("_known_config", "module")
    config_class = ModuleConfig
    module: nn.Module
    _known_config: ModuleConfig

    def __init__(self, module: nn.Module) -> None:
        options = _options(module)
        config = ModuleConfig({n: v for n, v in options.items() if not n.startswith("_")})
        config.model_type = name_of(module)  # type: ignore[misc]
        config._name_or_path = str(options.get("_name_or_path") or "")
        object.__setattr__(self, "__dict__", vars(module))
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "_known_config", config)

    def __reduce__(self) -> tuple[Callable[[nn.Module], ModuleView], tuple[nn.Module]]:
        return ModuleView, (self.module,)

    @property
    def config(self) -> ModuleConfig:  # type: ignore[override]
        """The configuration."""
        return self._known_config

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The module's own forward."""
        return self.module.forward

    def get_input_embeddings(self) -> nn.Module:
        """Refuse: no module is known to embed tokens."""
        raise NotImplementedError

    def get_output_embeddings(self) -> None:
        """Return None: no module is known to write tokens."""

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return whether texts are generated: no."""
        return False


def as_model(module: nn.Module) -> PreTrainedModel:
    """Return a model of transformers as it is, and a view of any other module.

    A compiled one is refused elsewhere, and is returned as it is. Of a pipeline, it is a view of
    its parts.
    """
    module = as_module(module)
    if isinstance(module, PreTrainedModel | torch._dynamo.OptimizedModule):
        return module  # type: ignore[return-value]
    return ModuleView(module)


def own_module(model: nn.Module) -> nn.Module:
    """Return the user's own object: a model of transformers, or the module of a view."""
    return model.module if is_view(model) else as_module(model)


def is_view(model: nn.Module) -> TypeGuard[ModuleView]:
    """Return whether a model is a view of a module of another library."""
    return isinstance(model, ModuleView)


def name_of(model: nn.Module) -> str:
    """Return the name of the class of the user's own object."""
    own = own_module(model)
    return type(own).__name__ if not isinstance(own, PipelineParts) else own.kind.__name__


def is_same(module: nn.Module, model: nn.Module) -> bool:
    """Return whether two objects are one module: itself, or itself and its view."""
    return own_module(module) is own_module(model)


def _options(module: nn.Module) -> Mapping[str, Any]:
    """Return the options that a module shows in its configuration, as those of diffusers do.

    Names with a dash in front are the library's.
    """
    config = getattr(module, "config", None)
    return config if isinstance(config, Mapping) else {}
