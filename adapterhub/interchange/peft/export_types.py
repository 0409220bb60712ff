"""Types of the exporters to peft: an adapter as input, a part of a checkpoint as output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.task_models import task_kind
from adapterhub.interchange.peft.files import TASK_TYPES
from adapterhub.interchange.peft.targets import ends_with, modules_of
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.site_module import SiteModule


@dataclass(frozen=True)
class ExportedModule:
    """One module of an adapter at its site, and the backbone's module there."""

    method: Method
    site: Site
    module: SiteModule
    host: nn.Module


@dataclass(frozen=True)
class ExportSource:
    """An adapter to export.

    `parts` are its modules at sites; `changed` are the backbone parameters that it replaces, each
    with all paths of the parameter; `head` is the task head; `backbone` and `revision` name the
    backbone; `tokens` tells whether the adapter has new tokens; `pooling` is the pooling of its
    head, None for the choice of the model's class; `below` are the names of the adapters below it;
    `ends` are the tokens that stop generation, if they differ from the backbone's.
    """

    anatomy: Anatomy
    parts: Sequence[ExportedModule]
    changed: Sequence[tuple[tuple[str, ...], Tensor]]
    head: Mapping[str, nn.Module]
    backbone: str | None = None
    revision: str | None = None
    tokens: bool = False
    pooling: str | None = None
    below: tuple[str, ...] = ()
    ends: Sequence[int] = ()

    @cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """The backbone's modules by path."""
        return modules_of(self.anatomy.model)

    @property
    def task_type(self) -> str | None:
        """Peft's task type of the model; None if it does not support the model's class."""
        return TASK_TYPES.get(task_kind(self.anatomy.model) or "")


@dataclass(frozen=True)
class CheckpointPart:
    """Options and tensors of a peft checkpoint; parts are added up.

    `targets` are the paths of the adapted modules; `problems` are features that peft cannot
    express.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Sequence[str] = ()
    problems: Sequence[str] = ()

    def __add__(self, other: CheckpointPart) -> CheckpointPart:
        return CheckpointPart(
            config={**self.config, **other.config},
            tensors={**self.tensors, **other.tensors},
            targets=[*self.targets, *other.targets],
            problems=[*self.problems, *other.problems],
        )


def target_options(source: ExportSource, paths: Iterable[str]) -> dict[str, Any]:
    """Return the options that make exactly these modules peft's targets."""
    paths = sorted(paths)
    return {
        "target_modules": exact_names(paths, source.modules),
        "fan_in_fan_out": any(isinstance(source.modules[path], Conv1D) for path in paths),
    }


def exact_names(paths: Sequence[str], modules: Mapping[str, Any]) -> list[str]:
    """Return names that match exactly these paths: their last components if unique, or the paths.

    peft matches a name with every module path that ends with it.
    """
    short = sorted({path.rpartition(".")[2] for path in paths})
    matches = {path for path in modules if ends_with(path, short)}
    return short if matches == set(paths) else sorted(paths)
