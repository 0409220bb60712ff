"""A translation in the making: what an importer gathers, and what is common to all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.load import NEWLY_INITIALIZED
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.files.schema import shorten
from adapterhub.methods._base import Method, Unfrozen
from adapterhub.methods._spec import dump_methods
from adapterhub.methods.bitfit import BitFit
from adapterhub.methods.head import Head
from adapterhub.methods.norms import Norms
from adapterhub.methods.selected_parameters import SelectedParameters

HEAD = "head"


@dataclass
class Translation:
    """Methods, tensors, and new `values` of the model's own parameters by their paths; `problems`
    are what cannot be expressed, `notes` what the user should know."""

    anatomy: Anatomy
    methods: list[Mapping[str, Mapping[str, Any]]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: tuple[str, ...] = ()
    head: bool = False

    def raise_problems(self, source: str) -> None:
        """Refuse what cannot be expressed.

        Raises:
            MismatchError: there are problems; all of them.
        """
        if self.problems:
            kind = self.anatomy.model.config.model_type
            raise MismatchError(
                f"{source} cannot be imported on this {kind} backbone",
                offenders=shorten(sorted(set(self.problems))),
                expected="modules and sizes that this backbone has, and options known here",
                hint="load the backbone that it was trained on, with the same task",
            )

    def finalize(self) -> None:
        """Turn the new values of parameters into a task head and into methods that hold
        parameters."""
        heads = tuple(f"{name}." for name in self.anatomy.head())
        inside = {p: v for p, v in self.values.items() if heads and p.startswith(heads)}
        rest = {p: v for p, v in self.values.items() if p not in inside}
        self._finalize_head(inside)
        known = self.anatomy.parameters()
        rest = self._without_ties(rest)
        self.problems += [
            f"{path}: this model has no such parameter"
            for path in sorted(rest.keys() - known.keys())
        ]
        self._finalize_parameters({p: v for p, v in rest.items() if p in known})
        if not self.methods and not self.problems:
            self.methods += dump_methods([Head()])

    def _finalize_head(self, saved: Mapping[str, Tensor]) -> None:
        if not saved:
            return
        self.head = True
        fresh: frozenset[str] = getattr(self.anatomy.model, NEWLY_INITIALIZED, frozenset())
        own = {
            f"{child}.{name}": p
            for child, module in self.anatomy.head().items()
            for name, p in module.state_dict().items()
        }
        self.problems += [
            f"{path}: the head has no such tensor" for path in sorted(saved.keys() - own.keys())
        ]
        for path, value in own.items():
            if path not in saved:
                note = f"{path}: a part of the task head that the files do not hold"
                (self.problems if path in fresh else self.notes).append(note)
            self.tensors[f"{HEAD}.{path}"] = saved.get(path, value).detach().to(torch.float32)
        self.labels = self._labels(own, saved)

    def _labels(self, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> tuple[str, ...]:
        config = self.anatomy.model.config
        count = outputs = config.num_labels or 0
        for path, value in own.items():
            other = saved.get(path, value)
            fits = value.ndim and other.ndim and other.shape[1:] == value.shape[1:]
            if fits and value.shape[0] == count != other.shape[0]:
                outputs = other.shape[0]
        if outputs == 1:
            return ()
        known: dict[Any, str] = dict(config.id2label or {}) if outputs == count else {}
        return tuple(str(known.get(i, f"LABEL_{i}")) for i in range(outputs))

    def _without_ties(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tied parameters the name that the anatomy knows; refused where only some were
        changed."""
        named = dict(self.anatomy.model.named_parameters(remove_duplicate=False))
        known = self.anatomy.parameters()
        kept: dict[str, Tensor] = {}
        for path, value in values.items():
            ties = [n for n, p in named.items() if p is named.get(path)] or [path]
            if not all(n in values and torch.equal(values[n], value) for n in ties):
                others = ", ".join(n for n in ties if n != path)
                self.problems.append(f"{path}: it is tied to {others} here, and was not there")
            kept[next((n for n in ties if n in known), path)] = value
        return kept

    def _finalize_parameters(self, values: Mapping[str, Tensor]) -> None:
        if not values:
            return
        anatomy = self.anatomy
        parameters = anatomy.parameters()
        self.problems += [
            f"{path}: shape {tuple(v.shape)}, the backbone needs {tuple(parameters[path].shape)}"
            for path, v in values.items()
            if v.shape != parameters[path].shape
        ]
        method = _holder(anatomy, values)
        self.methods += dump_methods([method])
        for path, value in values.items():
            site, _, name = anatomy.key(path).rpartition(".")
            self.tensors[f"{site}.{method.name}.{name}"] = value


def _holder(anatomy: Anatomy, paths: Iterable[str]) -> Method:
    """The method that trains exactly these parameters."""
    wanted = set(paths)
    for method in (BitFit(), Norms(), Norms(outside=False)):
        try:
            plan = {step.path for step in method.plan(anatomy) if isinstance(step, Unfrozen)}
        except AdapterhubError:
            continue
        if plan == wanted:
            return method
    return SelectedParameters(names=tuple(sorted(anatomy.key(path) for path in wanted)))
