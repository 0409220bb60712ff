"""Translation of another library's checkpoint for one backbone: the state and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.backbone import join
from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.files.schema import shorten
from adapterhub.methods.bitfit import BitFit
from adapterhub.methods.common.base import Method, Unfrozen, dump_methods
from adapterhub.methods.head import Head
from adapterhub.methods.norms import Norms
from adapterhub.methods.selected_parameters import SelectedParameters


@dataclass(frozen=True, kw_only=True)
class ImportedAdapter:
    """Another library's checkpoint, translated for one backbone.

    `methods` is a method spec, one `{name: {option: value}}` each; `tensors` have the names of
    native files (`encoder.0.attn.q.lora.A`, `head.classifier.weight`); `head` tells whether they
    include a task head. `labels` are the names of its outputs, () if the checkpoint lacks them;
    `task` is the model's task, if recorded; `activation` is the activation of a head with its own
    layers, None for the head of the model's class. `backbone` and `revision` are recorded in the
    checkpoint. `notes` list the changes of the translation, for the user.
    """

    format: str
    name: str
    methods: tuple[Mapping[str, Mapping[str, Any]], ...]
    tensors: Mapping[str, Tensor]
    head: bool = False
    labels: tuple[str, ...] = ()
    task: str | None = None
    activation: str | None = None
    backbone: str | None = None
    revision: str | None = None
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class CheckpointInfo:
    """Records of a checkpoint about its backbone, readable before the backbone is loaded.

    `backbone` and `revision` name it, `task` is the task of the model it was trained on, and
    `outputs` the number of outputs of its task head, 0 without one.
    """

    backbone: str | None = None
    revision: str | None = None
    task: str | None = None
    outputs: int = 0
    labels: tuple[str, ...] = ()


HEAD = "head"


@dataclass
class Translation:
    """The methods and tensors of a checkpoint, collected for one backbone.

    `values` are new values of the model's own parameters by path; `problems` are the features that
    cannot be expressed; `notes` list changes for the user; `activation` is the activation of a head
    with its own layers.
    """

    anatomy: Anatomy
    methods: list[Mapping[str, Mapping[str, Any]]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: tuple[str, ...] = ()
    head: bool = False
    activation: str | None = None

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
            model_type = self.anatomy.backbone.model_type
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
        named = dict(self.anatomy.model.named_parameters(remove_duplicate=False))
        own = set(map(id, self.anatomy.parameters().values()))
        known = {p: v for p, v in values.items() if p in named and id(named[p]) in own}
        self.problems += [
            f"{path}: this model has no such parameter"
            for path in sorted(values.keys() - known.keys())
        ]
        tied, untied = self._split_ties(known)
        self._finalize_parameters(tied, _method_for(self.anatomy, tied))
        names = tuple(sorted(map(self.anatomy.key, untied)))
        self._finalize_parameters(untied, SelectedParameters(names=names, untied=True))
        if not self.methods and not self.problems:
            self.methods += dump_methods([Head()])

    def _finalize_head(self, values: Mapping[str, Tensor]) -> None:
        if not values:
            return
        self.head = True
        new = self.anatomy.backbone.fresh
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
        """Return the names of the head's outputs: as in the model, if their number is equal."""
        config = self.anatomy.backbone.pretrained.config
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

    def _split_ties(
        self, values: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Split values into those for whole parameters and for single uses of tied ones.

        Whole parameters have one path, the anatomy's. An unchanged use keeps the backbone's value.
        """
        named = dict(self.anatomy.model.named_parameters(remove_duplicate=False))
        first = {id(p): path for path, p in self.anatomy.parameters().items()}
        uses: dict[int, list[str]] = {}
        for path, parameter in named.items():
            uses.setdefault(id(parameter), []).append(path)
        tied: dict[str, Tensor] = {}
        untied: dict[str, Tensor] = {}
        for path, value in values.items():
            parameter = named[path]
            if _all_equal(uses[id(parameter)], values, value):
                tied[first[id(parameter)]] = value
            elif not torch.equal(parameter.detach().float().cpu(), value):
                paths = self._paths_of_module(path)
                if not _all_equal(paths, values, value):
                    self.problems.append(
                        f"{path}: the same module as {', '.join(p for p in paths if p != path)} in "
                        "this model, but not in the checkpoint"
                    )
                untied[paths[0]] = value
        return tied, untied

    def _paths_of_module(self, path: str) -> list[str]:
        """Return all paths of the parameter at a path, through the same module."""
        host, _, name = path.rpartition(".")
        model = self.anatomy.model
        module = model.get_submodule(host)
        modules = model.named_modules(remove_duplicate=False)
        return [join(other, name) for other, m in modules if m is module]

    def _finalize_parameters(self, values: Mapping[str, Tensor], method: Method) -> None:
        if not values:
            return
        parameters = self.anatomy.parameters(every_use=True)
        self.problems += [
            f"{path}: shape {tuple(v.shape)}, the backbone needs {tuple(parameters[path].shape)}"
            for path, v in values.items()
            if v.shape != parameters[path].shape
        ]
        self.methods += dump_methods([method])
        for path, value in values.items():
            site, _, name = self.anatomy.key(path).rpartition(".")
            self.tensors[f"{site}.{method.name}.{name}"] = value


def _all_equal(paths: Iterable[str], values: Mapping[str, Tensor], value: Tensor) -> bool:
    return all(path in values and torch.equal(values[path], value) for path in paths)


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


def size_options(option: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the options for one size per site id, such as `rank` and `ranks`.

    `option` is the most common size; its plural maps the other sites' ids to their sizes.
    """
    (common, _), *_ = Counter(sizes.values()).most_common(1)
    others = {site_id: size for site_id, size in sorted(sizes.items()) if size != common}
    return {option: common, f"{option}s": others}
