"""The backbone: a uniform view of any model and the facts recorded about it.

The base case is any `torch.nn.Module`: hooks, slots and files need modules, parameters and paths,
which every module has. `TransformersBackbone` adds the configuration, tokens, head and stop tokens
of transformers models; `PipelineBackbone` adds the parts of a diffusers pipeline. `Backbone.of`
accepts a module or a pipeline. A backbone is not a copy and holds no state: facts recorded when a
model is loaded are stored on the model and travel with its copies. Code that only fits a
transformers model uses `backbone.pretrained`.

A pipeline is not a module but contains modules:

    unet, transformer, prior, decoder    the denoisers
    text_encoder, ...                    the prompt encoders

`parts_of` returns the modules that the pipeline's class lists as loadable, in one `ModuleDict`.
Their paths begin with the name of the part, as in diffusers files. A class that lists no parts
(PixArt, DiT), or no denoiser (PRX), has the parts above. The pipeline itself is not changed. Other
modules are not parts: a VAE, a ControlNet, or a T5 that no such file contains. They are not adapted
by default and may be exchanged. A saved adapter is tied to the weights of all parts. Each part can
have separate adapters.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar, overload

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from transformers import PreTrainedConfig, PreTrainedModel

from adapterhub.config.user_folders import NO_WEIGHTS, expanded, is_folder, is_hub_id
from adapterhub.errors import BackboneError
from adapterhub.patch import Patch

if TYPE_CHECKING:
    from adapterhub.anatomy.family import Family

# Buffers that training changes, by their usual names.
_STATISTICS = frozenset({"cluster_size", "embed_avg", "embedding_avg", "num_batches_tracked"})
_AVERAGES = ("running_", "ema_", "moving_")
CHILD = "adapterhub"  # the one child module of a host while adapters are attached


def own_modules(model: nn.Module, *, every_use: bool = False) -> list[tuple[str, nn.Module]]:
    """List the modules of a model with their paths, as `named_modules` does, without slots.

    `every_use` lists a module that has several paths under each of them.
    """
    modules: list[tuple[str, nn.Module]] = []
    _collect(model, "", every_use, set(), modules)
    return modules


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the direct parameters of a module, without its children's parameters."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module changes buffers while it trains.

    Such buffers are the averages of a batch norm or a codebook, or the vectors of a spectral norm.
    torch keeps those vectors in a parametrization (in a hook, in the older form).
    """
    buffers = (name for name, buffer in module._buffers.items() if buffer is not None)
    if any(name in _STATISTICS or name.startswith(_AVERAGES) for name in buffers):
        return True
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Keep buffers unchanged inside: reading a weight with a spectral norm changes them."""
    training = [m for m in model.modules() if m.training and has_statistics(m)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def parameter_at(module: nn.Module, path: str) -> nn.Parameter | None:
    """Return the parameter of a module at a path, or None if it does not exist."""
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner)._parameters.get(name)


def copy_with(module: Any, parameters: Mapping[str, Any], cls: type | None = None) -> Any:
    """Return a shallow copy of a module with some parameters replaced by other objects.

    The module itself is not changed, since other threads may compute with it. A path such as
    `out_proj.weight` names a parameter of a child; the child is also copied. `cls` is the class of
    the copy, by default the module's class.
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
    modules: list[tuple[str, nn.Module]],
) -> None:
    """Append a module and its descendants, each before its children."""
    if not every_use and id(module) in seen:
        return
    seen.add(id(module))
    modules.append((path, module))
    for name, child in module._modules.items():
        if child is not None and name != CHILD:
            _collect(child, f"{path}.{name}" if path else name, every_use, seen, modules)


def join(*parts: str) -> str:
    """Join parts into a module path; parts may be empty."""
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
    """Return the AutoModel classes for a configuration; empty for an unknown one."""
    return _classes(transformers.AutoModel, config)


def new_base_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the base model of a configuration; a type without one gets a task model's base model.

    Raises:
        ValueError: no auto class of transformers supports the configuration.
    """
    if classes := base_classes(config):
        return classes[0](config)
    for name in dir(transformers):
        if name.startswith("AutoModelFor"):
            for each in _classes(getattr(transformers, name), config):
                return each(config).base_model  # type: ignore[return-value]
    raise ValueError(f"no auto class of transformers has a {type(config).__name__}")


def _classes(auto: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    classes = auto._model_mapping.get(type(config), ())
    return classes if isinstance(classes, tuple) else (classes,)


def token_table(module: nn.Module) -> Any | None:
    """Return the module that embeds tokens, or None if it is absent or cannot be determined.

    It is a table with one row per token, or the module that embeds pixels or audio instead.
    """
    find = getattr(module, "get_input_embeddings", None)
    try:
        table = find() if find is not None else getattr(module, "embed_tokens", None)
    except (NotImplementedError, AttributeError):
        return None
    return table


def position_module(root: nn.Module) -> nn.Module | None:
    """Return the module of a stack that accepts token positions, or None.

    This is the stack's root if its forward takes `position_ids`. Otherwise it is the position
    table, if that takes `position_ids` and `past_key_values_length`, as in BART.
    """
    if "position_ids" in _parameters(root):
        return root
    names = {"position_ids", "past_key_values_length"}
    return next((m for m in root.children() if names <= _parameters(m)), None)


def padding_table(root: nn.Module) -> nn.Module | None:
    """Return the table of a stack that counts positions from padding ids, as in M2M-100, or None.

    Without ids it takes embeddings, where it cannot detect padding.
    """
    names = {"input_ids", "inputs_embeds", "past_key_values_length"}
    return next((m for m in root.children() if names == _parameters(m)), None)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


_PARTS: weakref.WeakKeyDictionary[Any, PipelineParts] = weakref.WeakKeyDictionary()
_LOADABLE = "_lora_loadable_modules"  # a class attribute of pipelines
_INSIDE = "_orig_mod"  # the attribute of a compiled module that holds the original
_TEXT = "text_encoder"
_USUAL = re.compile(rf"(unet|transformer|prior|decoder|{_TEXT})(_\d)?")


class PipelineParts(nn.ModuleDict):
    """The modules of a pipeline that can have adapters.

    Args:
        pipeline: the pipeline.

    Attributes:
        kind: the class of the pipeline.
        compiled: the names of the parts that the pipeline holds as `torch.compile(part)`.
        others: the names of the pipeline's other modules.
        compute: the function that runs when the parts are called as a model; None if the pipeline
            itself is called.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(_modules_of(pipeline))
        self.kind = type(pipeline)
        self.compiled: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.compute: Callable[..., Any] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(p.device for p in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter that holds floating point numbers."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, **inputs: Any) -> Any:
        """Call `compute`."""
        if self.compute is None:
            raise TypeError(f"call the {self.kind.__name__} itself: its parts have no forward")
        return self.compute(**inputs)

    def __reduce__(self) -> tuple[Callable[[type], PipelineParts], tuple[type], dict[str, Any]]:
        # The contents refer to these parts: copying them needs the kind first.
        return _without_modules, (self.kind,), vars(self)


def is_pipeline(thing: object) -> TypeGuard[Any]:
    """Return whether an object is a diffusers pipeline."""
    if isinstance(thing, nn.Module | type):
        return False
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(thing).__mro__}
    return "diffusers.DiffusionPipeline" in kinds


def loadable_in(kind: type, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a pipeline's modules that are parts, according to its class."""
    present = list(names)
    loadable = tuple(getattr(kind, _LOADABLE, ()))
    if any(name in present for name in loadable if not name.startswith(_TEXT)):
        return loadable
    usual = (name for name in present if _USUAL.fullmatch(name))
    return tuple(dict.fromkeys((*loadable, *usual)))


def parts_of(pipeline: Any) -> PipelineParts:
    """Return the parts of a pipeline; the same object as long as the parts are the same.

    A compiled part is represented by the original module, because it calls that module's hooks.
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
    parts = {name: getattr(pipeline, name, None) for name in names}
    parts = {name: getattr(module, _INSIDE, module) for name, module in parts.items()}
    return {name: module for name, module in parts.items() if isinstance(module, nn.Module)}


def _without_modules(kind: type) -> PipelineParts:
    made = PipelineParts.__new__(PipelineParts)
    vars(made)["kind"] = kind
    return made


def _of_a_copy(modules: Mapping[str, nn.Module]) -> PipelineParts | None:
    """Return the parts copied together with a pipeline's adapters; None without adapters."""
    known = (getattr(m.__dict__.get("save_pretrained"), "owner", None) for m in modules.values())
    return next((parts for parts in known if isinstance(parts, PipelineParts)), None)


T = TypeVar("T")
EndTokens = int | list[int] | None
"""The tokens at which generation stops, in the form of a generation config."""
_CACHED = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
LABEL_FIELDS = ("id2label", "label2id", "problem_type")  # of a transformers configuration
_DRAWN = "_is_hf_initialized"  # transformers marks initialized parameters with it


class RecordedFact(Generic[T]):
    """A fact recorded about a backbone: an attribute of the user's module, kept by its copies.

    Args:
        name: the end of the attribute's name.
        default: the value for a model without a record; setting None removes the record.
    """

    def __init__(self, name: str, default: T) -> None:
        self.attribute = f"_adapterhub_{name}"
        self.default = default

    @overload
    def __get__(self, backbone: None, owner: type) -> RecordedFact[T]: ...

    @overload
    def __get__(self, backbone: Backbone, owner: type) -> T: ...

    def __get__(self, backbone: Backbone | None, owner: type) -> RecordedFact[T] | T:
        if backbone is None:
            return self
        value: T = getattr(backbone.module, self.attribute, self.default)
        return value

    def __set__(self, backbone: Backbone, value: T | None) -> None:
        if value is None:
            vars(backbone.module).pop(self.attribute, None)
        else:
            vars(backbone.module)[self.attribute] = value


class Backbone:
    """A model of any library, as adapters see it.

    Args:
        module: the user's module, or the parts of a pipeline.

    Attributes:
        module: the user's module, or the parts of a pipeline.
        foreign: whether the module comes from a library other than transformers.
        folder: the folder the model was loaded from.
        fresh: the paths of parameters missing from its checkpoint, such as a new task head.
        rows: the number of rows of its checkpoint's token embedding.
        pooling: the pooling for the heads of new adapters, chosen by the user at loading.
        trained_pooling: the pooling used in training.
        tokenizer: the tokenizer used with the model, and its state at first use.
        processor: the processor that prepares its inputs.
        family: the row for this model, which overrides the row of its type.
    """

    foreign = True
    folder: RecordedFact[str | None] = RecordedFact("origin", None)
    fresh: RecordedFact[frozenset[str]] = RecordedFact("fresh", frozenset())
    rows: RecordedFact[int | None] = RecordedFact("rows", None)
    pooling: RecordedFact[str | None] = RecordedFact("pooling", None)
    trained_pooling: RecordedFact[str | None] = RecordedFact("trained_pooling", None)
    tokenizer: RecordedFact[Any] = RecordedFact("tokenizer", None)
    processor: RecordedFact[Any] = RecordedFact("processor", None)
    family: RecordedFact[Family | None] = RecordedFact("family", None)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @staticmethod
    def of(thing: Any) -> Backbone:
        """Return the backbone of a module or a diffusers pipeline."""
        if is_pipeline(thing):
            thing = parts_of(thing)
        if isinstance(thing, PreTrainedModel | torch._dynamo.OptimizedModule):
            return TransformersBackbone(thing)
        return (PipelineBackbone if isinstance(thing, PipelineParts) else Backbone)(thing)

    @property
    def pretrained(self) -> PreTrainedModel:
        """The module as a transformers model.

        Raises:
            BackboneError: the module comes from another library.
        """
        raise BackboneError(f"{self.name} is not a model of transformers")

    @property
    def name(self) -> str:
        """The class name of the user's object."""
        return type(self.module).__name__

    @property
    def model_type(self) -> str:
        """The type of a transformers model; the class name of any other object."""
        return self.name

    @property
    def config(self) -> PreTrainedConfig | None:
        """The configuration of a transformers model; None for any other module."""
        return None

    @property
    def text_config(self) -> Any:
        """The part of the configuration for texts, in most models all of it; None without one."""
        return None if self.config is None else self.config.get_text_config()

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that a module exposes in its configuration, as diffusers modules do.

        Names with a leading underscore belong to the library.
        """
        config = getattr(self.module, "config", None)
        return config if isinstance(config, Mapping) else {}

    @property
    def source(self) -> str:
        """The folder or the Hub id that the module was loaded from; "" if unknown."""
        return str(self.options.get("_name_or_path") or "")

    @property
    def labels(self) -> dict[str, Any]:
        """The label fields of a transformers model's configuration; all are None without one."""
        return {name: getattr(self.config, name, None) for name in LABEL_FIELDS}

    # Identity

    @property
    def origin(self) -> Path | None:
        """The folder the model was loaded from, if it still exists; makes no network requests."""
        name = self.source
        for folder in (self.folder, name):
            if folder and is_folder(folder):
                return Path(folder)
        if not is_hub_id(name):
            return None
        commit = getattr(self.config, "_commit_hash", None)
        cached = try_to_load_from_cache(name, "config.json", revision=commit)
        return Path(cached).parent if isinstance(cached, str) else None

    def name_and_revision(self, fingerprint: Callable[[], str]) -> tuple[str, str | None]:
        """Return a name that is valid on any machine, and the commit.

        The name is a Hub id, also for a folder in the Hub's cache. For any other folder it is a
        local name: the folder's last component and the start of the fingerprint, as in
        `bert--0123456789ab`. Hub ids cannot contain `--`. Different weights in a folder of the same
        name get a different local name. The name in a folder's config.json is not used: it is often
        the name of the parent model.
        """
        name = self.source
        if cached := _CACHED.search(name.replace("\\", "/")):
            return cached[1].replace("--", "/"), cached[2]
        revision: str | None = getattr(self.config, "_commit_hash", None)
        if not is_folder(name) and is_hub_id(name):
            return name, revision
        last = expanded(name.replace("\\", "/")).resolve().name if name else ""
        plain = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", last).strip("-.")[:100]
        return local_name(plain or f"unnamed-{self.model_type}", fingerprint), revision

    # Tokens: modules outside transformers are not known to embed or generate tokens

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder reads what an encoder returns."""
        return False

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens."""
        return False

    @property
    def input_embedding(self) -> nn.Module | None:
        """The module that embeds tokens, pixels or audio, or None."""
        return None

    @property
    def token_embedding(self) -> nn.Parameter | None:
        """The weight of the token embedding, (vocabulary, d), or None."""
        return None

    @property
    def output_embedding(self) -> nn.Module | None:
        """The layer that returns a value for each token of the vocabulary; None without one."""
        return None

    @property
    def stops(self) -> EndTokens:
        """The tokens at which generation stops: `eos_token_id` of its generation config."""
        return None

    @stops.setter
    def stops(self, tokens: EndTokens) -> None:
        """Let generation stop at these tokens."""

    def token_tables(self) -> list[tuple[nn.Module, str]]:
        """Return the modules that have a row for each token, and the names of their parameters.

        These are the token embedding, other embeddings tied to it, and an output layer.
        """
        if (table := self.token_embedding) is None:
            return []
        output = self.output_embedding
        own = (module for _, module in own_modules(self.module))
        modules = [m for m in own if m is output or m._parameters.get("weight") is table]
        return [(m, "weight") for m in modules if m._parameters.get("weight") is not None]

    def remember_vocabulary_size(self) -> None:
        """Record the current number of token embedding rows as the checkpoint's number."""
        if (table := self.token_embedding) is not None:
            self.rows = table.shape[0]

    def checkpoint_vocabulary_size(self) -> int | None:
        """Return the number of rows of the checkpoint's token embedding, if known.

        The model's embedding may have been resized since.
        """
        rows = self.rows
        origin = self.origin
        if rows is None and origin is not None and (origin / "config.json").is_file():
            config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
            rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        return rows

    def keep_states_whole(self, patch: Patch) -> None:
        """Pass whole tensors to a language model's frozen head, not views of the last position.

        With a frozen weight, torch multiplies such a view, (batch, 1, d), row by row. On a CPU it
        copies the weight for each row: batch * vocabulary * d numbers. In bf16 this takes hundreds
        of times as long.
        """
        if isinstance(head := self.output_embedding, nn.Linear):
            patch.hook(head.register_forward_pre_hook, whole_states)

    def initialize_again(self) -> None:
        """Draw the newly initialized parameters of a transformers model again."""

    # Storage

    @property
    def compiled(self) -> bool:
        """Whether `torch.compile` has compiled the model, or a module inside it."""
        own = own_modules(self.module)
        return any(m._compiled_call_impl is not None for _, m in own)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter that holds floating point numbers."""
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def sharded(self) -> bool:
        """Whether this process may hold only a shard of a parameter."""
        own = (module._parameters.values() for _, module in own_modules(self.module))
        return any(p is not None and is_sharded(p) for parameters in own for p in parameters)

    @property
    def divided(self) -> bool:
        """Whether transformers, rather than FSDP2, has split its projections over processes."""
        size, fsdp = (getattr(self.module, name, None) for name in ("_tp_size", "_fsdp_size"))
        meshed = getattr(self.module, "_device_mesh", None) is not None
        return bool(size) and size != 1 and meshed and (fsdp or 1) <= 1

    @property
    def quantization(self) -> str | None:
        """The kind of quantization, as in `quantization_kind`; None if it is not quantized."""
        config = getattr(self.config, "quantization_config", None)
        if config is None:
            return None
        return quantization_kind(config if isinstance(config, dict) else config.to_dict())

    def dtype_and_quantization(
        self, originals: Mapping[int, nn.Parameter]
    ) -> tuple[str | None, str | None]:
        """Return the dtype of the weights, a key of DTYPES, and their kind of quantization.

        `originals` maps the id of an adapter's parameter to the backbone parameter it replaces.
        """
        first = next(p for p in self.module.parameters() if p.is_floating_point())
        stored = originals.get(id(first), first).dtype
        dtype = next((name for name, dtype in DTYPES.items() if dtype == stored), None)
        return dtype, self.quantization

    def offloaded(self, paths: Iterable[str]) -> list[str]:
        """List the parameters, among `paths`, that accelerate offloads."""
        hosts = ((path, self.module.get_submodule(path.rpartition(".")[0])) for path in paths)
        return [path for path, host in hosts if is_offloaded(host)]


class PipelineBackbone(Backbone):
    """The parts of a diffusers pipeline that can have adapters."""

    module: PipelineParts

    @property
    def name(self) -> str:
        """The name of the pipeline's class."""
        return self.module.kind.__name__


class TransformersBackbone(Backbone):
    """A transformers model, which has tokens, a head and stop tokens."""

    foreign = False
    module: PreTrainedModel

    @property
    def pretrained(self) -> PreTrainedModel:
        """The module itself."""
        return self.module

    @property
    def model_type(self) -> str:
        """The model's type, the key of its family."""
        return self.module.config.model_type

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration."""
        return self.module.config

    @property
    def source(self) -> str:
        """The folder or the Hub id that the model was loaded from; "" if unknown."""
        return str(self.module.config._name_or_path or "")

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder reads what an encoder returns."""
        return bool(self.module.config.is_encoder_decoder)

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens."""
        return self.module.can_generate()

    @property
    def input_embedding(self) -> nn.Module | None:
        """The module that embeds tokens, pixels or audio, or None."""
        return token_table(self.module)

    @property
    def compiled(self) -> bool:
        """Whether `torch.compile` has compiled the model, or a module inside it."""
        return isinstance(self.module, torch._dynamo.OptimizedModule) or super().compiled

    @property
    def token_embedding(self) -> nn.Parameter | None:
        """The weight of the token embedding, (vocabulary, d), or None."""
        try:
            weight = self.module.get_input_embeddings().weight
        except (NotImplementedError, AttributeError):
            return None
        return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None

    @property
    def output_embedding(self) -> nn.Module | None:
        """The layer that returns a value for each token of the vocabulary; None without one."""
        output: nn.Module | None = self.module.get_output_embeddings()
        return output

    @property
    def stops(self) -> EndTokens:
        """The tokens at which generation stops: `eos_token_id` of its generation config."""
        config = getattr(self.module, "generation_config", None)
        stops: EndTokens = getattr(config, "eos_token_id", None)
        return stops

    @stops.setter
    def stops(self, tokens: EndTokens) -> None:
        """Let generation stop at these tokens."""
        if (config := getattr(self.module, "generation_config", None)) is not None:
            config.eos_token_id = tokens

    def initialize_again(self) -> None:
        """Draw the newly initialized parameters again, with the numbers that loading would draw.

        The model must not have adapters.
        """
        model, new = self.module, self.fresh
        for name, tensor in model.state_dict(keep_vars=True).items():
            setattr(tensor, _DRAWN, name not in new)
        for path, module in model.named_modules():
            inside = f"{path}." if path else ""
            setattr(module, _DRAWN, not any(name.startswith(inside) for name in new))
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in new}
        devices = {name: model.get_parameter(name).device for name in new}
        for owner in owners.values():  # loading draws on the CPU
            owner.to("cpu")
        with torch.no_grad():
            model.initialize_weights()
        for name, owner in owners.items():
            owner.to(devices[name])


def is_transformers(thing: object) -> TypeGuard[PreTrainedModel]:
    """Return whether an object is a transformers model."""
    return isinstance(thing, PreTrainedModel)


def local_name(name: str, fingerprint: Callable[[], str]) -> str:
    """Return the name of a backbone that is not on the Hub."""
    try:
        return f"{name}--{fingerprint().rpartition('-')[2][:12]}"
    except BackboneError:  # it has no weights
        return f"{name}{NO_WEIGHTS}"


def whole_states(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Pass states that are contiguous: a forward pre-hook."""
    whole = bool(args) and isinstance(args[0], Tensor) and not args[0].is_contiguous()
    return (args[0].contiguous(), *args[1:]) if whole else None


# Storage of any module

_TORCHAO = {"Int8WeightOnlyConfig": "int8-weight", "Float8WeightOnlyConfig": "fp8-weight"}


def quantization_kind(config: Mapping[str, Any]) -> str:
    """Return the name of the quantization that a transformers configuration describes.

    It is one of QUANTIZATIONS, or else the name of the quantization method.
    """
    if config.get("load_in_4bit"):
        return str(config.get("bnb_4bit_quant_type", "int4"))
    if config.get("quant_method") == "torchao":
        name = config["quant_type"]["default"]["_type"]
        return _TORCHAO.get(name, f"torchao-{name}")
    method = config.get("quant_method", "unknown")
    return "int8" if config.get("load_in_8bit") else str(getattr(method, "value", method))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor: this process may hold only a shard of it."""
    return hasattr(tensor, "full_tensor")


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate offloads the module's own weights."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module computes; None if it has no weights."""
    for part in module.modules():
        if is_offloaded(part):
            return torch.device(part._hf_hook.execution_device)  # type: ignore[union-attr, arg-type]
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            return tensor.device
    return None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def storage_problem(parameter: object) -> str:
    """Describe why a parameter cannot be overwritten with only a rounding error.

    Returns "" for a plain floating point parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        return "it is not stored as one parameter"
    if is_sharded(parameter):
        return "each process holds a share of it"
    # Quantized weights are a subclass of Parameter or Tensor, or hold integers.
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"it is quantized: {type(parameter).__name__}"
    if parameter.dtype not in DTYPES.values():
        return f"it is stored as {str(parameter.dtype).removeprefix('torch.')}"
    return ""


def storage_problems(
    parameters: Mapping[str, nn.Parameter], paths: Iterable[str], shown: int = 3
) -> list[str]:
    """List the storage problems of parameters, one per line; the first `shown` of them in full."""
    problems = [
        f"{path}: {problem}" for path in paths if (problem := storage_problem(parameters[path]))
    ]
    more = len(problems) - shown
    return problems[:shown] + ([f"and {more} more"] if more > 0 else [])


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers rather than quantization codes."""
    has_codes = hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor)
    # Counters, positions and masks among the buffers; codes have 4, 8 or 32 bits.
    has_numbers = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.bool)
    return has_numbers and not tensor.is_meta and not has_codes


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded: all processes must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shared_like(live: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor, or this process's shard if `live`, of the same shape, is sharded."""
    if not is_sharded(live) or is_sharded(tensor) or live.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # torch without distributed

    assert isinstance(live, DTensor)
    mesh, tensor = live.device_mesh, tensor.to(live.device)
    return distribute_tensor(tensor, mesh, live.placements, src_data_rank=None)


def with_whole_parameters(module: nn.Module) -> Any:
    """Return a module with whole parameters: a copy if some are sharded.

    All processes must call this together.
    """
    sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
    if not sharded:
        return module
    return copy.deepcopy(module, {id(p): nn.Parameter(whole(p.detach())) for p in sharded})
