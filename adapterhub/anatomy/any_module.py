"""A module of any library, seen as a model of transformers.

Hooks, slots and files need modules, parameters and paths, which every `torch.nn.Module` has. A few
questions are asked of models of transformers only: for their configuration, token embeddings, task
head. A `ModuleView` answers them for any module: with what the module says itself, or "none".

The view is no copy. Its attributes are the module's own, one dictionary of both, so that a hook,
slot or mode that the view gets is the module's. Users keep their module, and never see the view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from adapterhub.anatomy.pipelines import PipelineParts, as_module


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
