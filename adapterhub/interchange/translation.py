"""A translation in progress: what an importer collects, and the steps that all importers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.newly_initialized import newly_initialized
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
    """The methods and tensors of a checkpoint, collected for one backbone.

    `values` are new values of the model's own parameters by path; `problems` are what cannot be
    expressed; `notes` tell the user what was changed.
    """

    anatomy: Anatomy
    methods: list[Mapping[str, Mapping[str, Any]]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: tuple[str, ...] = ()
    head: bool = False

    def note_dropout(self, rate: float) -> None:
        """Note that a method without a dropout option drops the one of training."""
        if rate:
            self.notes.append(f"dropout {rate} of training is not carried over")

    def raise_problems(self, source: str) -> None:
        """Refuse the checkpoint if anything cannot be expressed.

        Raises:
            MismatchError: there are problems; lists all of them.
        """
        if self.problems:
            model_type = self.anatomy.model.config.model_type
            raise MismatchError(
                f"{source} cannot be imported on this {model_type} backbone",
                offenders=shorten(sorted(set(self.problems))),
                expected="modules and shapes of this backbone, and supported options",
                hint="load the backbone that it was trained on, with the same task",
            )

    def finalize(self) -> None:
        """Turn the new parameter values into a task head and into methods for the rest."""
        heads = tuple(f"{name}." for name in self.anatomy.head())
        head_values = {p: v for p, v in self.values.items() if heads and p.startswith(heads)}
        values = {p: v for p, v in self.values.items() if p not in head_values}
        self._finalize_head(head_values)
        parameters = self.anatomy.parameters()
        values = self._without_ties(values)
        self.problems += [
            f"{path}: this model has no such parameter"
            for path in sorted(values.keys() - parameters.keys())
        ]
        self._finalize_parameters({p: v for p, v in values.items() if p in parameters})
        if not self.methods and not self.problems:
            self.methods += dump_methods([Head()])

    def _finalize_head(self, values: Mapping[str, Tensor]) -> None:
        if not values:
            return
        self.head = True
        new = newly_initialized(self.anatomy.model)
        model_head = {
            f"{child}.{name}": p
            for child, module in self.anatomy.head().items()
            for name, p in module.state_dict().items()
        }
        self.problems += [
            f"{path}: the head has no such tensor"
            for path in sorted(values.keys() - model_head.keys())
        ]
        for path, model_value in model_head.items():
            if path not in values:
                line = f"{path}: part of the task head, missing from the files"
                (self.problems if path in new else self.notes).append(line)
            value = values.get(path, model_value)
            self.tensors[f"{HEAD}.{path}"] = value.detach().to(torch.float32)
        self.labels = self._labels(model_head, values)

    def _labels(
        self, model_head: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> tuple[str, ...]:
        """Name the outputs of the checkpoint's head: as in the model, if it has as many."""
        config = self.anatomy.model.config
        count = outputs = config.num_labels or 0
        for path, model_value in model_head.items():
            value = values.get(path, model_value)
            same_width = (
                model_value.ndim and value.ndim and value.shape[1:] == model_value.shape[1:]
            )
            if same_width and model_value.shape[0] == count != value.shape[0]:
                outputs = value.shape[0]
        if outputs == 1:
            return ()
        names: dict[Any, str] = dict(config.id2label or {}) if outputs == count else {}
        return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(outputs))

    def _without_ties(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep one path of tied parameters, the anatomy's; refuse ties with different values."""
        by_path = dict(self.anatomy.model.named_parameters(remove_duplicate=False))
        parameters = self.anatomy.parameters()
        untied: dict[str, Tensor] = {}
        for path, value in values.items():
            ties = [n for n, p in by_path.items() if p is by_path.get(path)] or [path]
            if not all(n in values and torch.equal(values[n], value) for n in ties):
                others = ", ".join(n for n in ties if n != path)
                self.problems.append(
                    f"{path}: tied to {others} in this model, but not in the checkpoint"
                )
            untied[next((n for n in ties if n in parameters), path)] = value
        return untied

    def _finalize_parameters(self, values: Mapping[str, Tensor]) -> None:
        if not values:
            return
        parameters = self.anatomy.parameters()
        self.problems += [
            f"{path}: shape {tuple(v.shape)}, the backbone needs {tuple(parameters[path].shape)}"
            for path, v in values.items()
            if v.shape != parameters[path].shape
        ]
        method = _method_for(self.anatomy, values)
        self.methods += dump_methods([method])
        for path, value in values.items():
            site, _, name = self.anatomy.key(path).rpartition(".")
            self.tensors[f"{site}.{method.name}.{name}"] = value


def _method_for(anatomy: Anatomy, paths: Iterable[str]) -> Method:
    """Return the method that trains exactly these parameters."""
    trained = set(paths)
    for method in (BitFit(), Norms(), Norms(outside=False)):
        try:
            plan = {step.path for step in method.plan(anatomy) if isinstance(step, Unfrozen)}
        except AdapterhubError:
            continue
        if plan == trained:
            return method
    return SelectedParameters(names=tuple(sorted(anatomy.key(path) for path in trained)))
