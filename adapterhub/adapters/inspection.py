"""Inspect a model: its parts and sites, the effect of each method, and parameters at no site.

`inspect` accepts any module in memory; the command of the same name prints the same facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from adapterhub.adapters.attach import refuse_untrainable
from adapterhub.adapters.state import required_backbone
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.overview import (
    Part,
    Rest,
    SiteRow,
    class_at,
    parts_in,
    site_rows,
    without_sites,
)
from adapterhub.anatomy.sites import (
    Anatomy,
    LayerGroup,
    Site,
    layer_groups,
    number_ranges,
    sites_option,
)
from adapterhub.backbones.meta_model import skeleton
from adapterhub.errors import AdapterhubError, SiteError, one_line
from adapterhub.files.shown_table import ShownTable
from adapterhub.hooks.weight_host import check_matrix
from adapterhub.methods.common.base import METHODS, Method, Placement
from adapterhub.methods.common.site_module import skip_init, undrawn

_SHOWN = 4  # names in a table cell; `facts` lists all
_SITES = "sites"


class MethodFit(NamedTuple):
    """The effect of a method with its defaults.

    Attributes:
        parameters: the number of trainable values; None if the method does not fit.
        sites: patterns of the method's sites; () if it trains parameters of the model.
        problem: the reason the method does not fit; "" if it does.
        details: the missing parts.
        named: module classes that the method can be at, if its option `sites` names them.
    """

    parameters: int | None
    sites: tuple[str, ...] = ()
    problem: str = ""
    details: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """The sites found in a model and the parameters at no site; it prints as a few tables.

    Attributes:
        kind: the type of a model of transformers, or the class of another module.
        parameters: the number of parameter values, without a head.
        layers: the number of layers of each stack.
        parts: the parts of a pipeline; () for other models.
        groups: groups of layers with the same sites, for a model of transformers; else ().
        rows: the sites.
        not_found: the parameters at no site.
        methods: the effect of each method with its defaults, by name.
    """

    kind: str
    parameters: int
    layers: Mapping[str, int]
    parts: tuple[Part, ...]
    groups: tuple[LayerGroup, ...]
    rows: tuple[SiteRow, ...]
    not_found: tuple[Rest, ...]
    methods: Mapping[str, MethodFit]

    def facts(self) -> dict[str, Any]:
        """Return all facts in the form that the command prints with --json."""
        fits = self.methods.items()
        return {
            "type": self.kind,
            "parameters": self.parameters,
            "groups": [_facts(group) for group in self.groups],
            "sites": [_row_facts(row) for row in self.rows],
            "methods": {n: f.problem if f.parameters is None else f.parameters for n, f in fits},
            "parts": [part._asdict() for part in self.parts],
            "default_sites": {n: list(f.sites) for n, f in fits if f.sites},
            "named_sites": {n: list(f.named) for n, f in fits if f.named},
            "not_found": [_facts(rest) for rest in self.not_found],
        }

    def summary(self) -> dict[str, str]:
        """Return the main facts as text, by name."""
        layers = ", ".join(f"{depth} ({stack})" for stack, depth in self.layers.items())
        apart = sum(rest.parameters for rest in self.not_found)
        return {
            "parameters": f"{self.parameters:,}, {apart:,} of them at no site",
            **({"layers": layers} if self.groups else {}),
        }

    def group_lines(self) -> Iterator[str]:
        """Yield lines on each group of layers, with found and missing sites."""
        for group in self.groups:
            whole = len(group.layers) == self.layers[group.stack]
            yield ""
            yield f"{group.stack}, {'all layers' if whole else _numbered(group.layers)}"
            yield f"{'found':15} {_compact(group.found) or 'nothing'}"
            yield f"{'not found':15} {', '.join(group.missing) or '-'}"
            yield f"{'other weights':15} {', '.join(group.other_weights) or '-'}"
            if group.experts:
                yield (
                    f"{'experts':15} {group.experts} routed experts, fused as tensors of 3 "
                    "dimensions; lora(sites=[ffn.experts.*]) reaches them"
                )

    def tables(self) -> list[ShownTable]:
        """Return the printed tables; empty tables are left out."""
        tables = [self._parts(), self._sites(), self._not_found(), *self._methods()]
        return [table for table in tables if table.rows]

    def __str__(self) -> str:
        summary = {"module": self.kind, **self.summary()}
        lines = [f"{name:11} {one_line(text)}" for name, text in summary.items()]
        lines += map(one_line, self.group_lines())
        return "\n".join(lines) + "".join(f"\n\n{table.text()}" for table in self.tables())

    __repr__ = __str__

    def _parts(self) -> ShownTable:
        rows = [(p.part, p.module, f"{p.parameters:,}", str(p.sites)) for p in self.parts]
        return ShownTable(["part", "module", "parameters", "sites"], rows)

    def _sites(self) -> ShownTable:
        if self.groups:
            columns = ["site", "kind", "in", "out", "host", "layers"]
            rows = [
                (r.site, r.kind, str(r.d_in), str(r.d_out), r.host, r.layers) for r in self.rows
            ]
            return ShownTable(columns, rows)
        columns = ["site", "module", "number", "in", "out"]
        return ShownTable(columns, [(r.site, *_hosts(r), *_ranges(r)) for r in self.rows])

    def _not_found(self) -> ShownTable:
        columns = ["not found: at no site", "number", "parameters", "names", "first"]
        rows = [
            (r.module, str(len(r.paths)), f"{r.parameters:,}", _some(r.names), r.paths[0] or "-")
            for r in self.not_found
        ]
        return ShownTable(columns, rows)

    def _methods(self) -> Iterator[ShownTable]:
        whole = self.parameters or 1  # 0 if it only has codes
        fitting = [
            (name, f"{count:,}", f"{count / whole:.2%}", _some(fit.sites))
            for name, fit in self.methods.items()
            if (count := fit.parameters) is not None
        ]
        yield ShownTable(["method", "parameters", "share", "sites by default"], fitting)
        refused = [(name, fit) for name, fit in self.methods.items() if fit.parameters is None]
        nameable = [(name, _some(fit.named)) for name, fit in refused if fit.named]
        yield ShownTable(["method", "fits only with sites= at"], nameable)
        others = [(name, _reason(fit)) for name, fit in refused if not fit.named]
        yield ShownTable(["method", "why it does not fit"], others)


def inspect(model: nn.Module, head: Sequence[str] = ()) -> Inspection:
    """Inspect a model: its parts and sites, the effect of each method, and parameters at no site.

    No weights are read, so the model may be on the meta device.

    Args:
        model: a model of transformers, any other module, or a pipeline of diffusers.
        head: the paths of the head's modules, as for `attach`.

    Raises:
        AttachError: the object is not a module.
        SiteError: the model has no sites, or no such head.
    """
    required_backbone(model)
    anatomy = anatomy_of(model, head)
    backbone, foreign = anatomy.backbone, anatomy.backbone.foreign
    empty = dataclasses.replace(anatomy, backbone=Backbone.of(skeleton(backbone.module)))
    stacks = anatomy.layers if foreign else anatomy.stacks
    return Inspection(
        backbone.model_type,
        sum(parameter.numel() for parameter in anatomy.parameters().values()),
        {stack: anatomy.depth(stack) for stack in stacks},
        tuple(parts_in(anatomy)),
        () if foreign else tuple(layer_groups(anatomy)),
        tuple(site_rows(anatomy)),
        tuple(without_sites(anatomy)),
        {name: _fit(method, anatomy, empty) for name, method in sorted(METHODS.items())},
    )


def _fit(cls: type[Method], anatomy: Anatomy, empty: Anatomy) -> MethodFit:
    """Return the effect of a method with its defaults; `empty` is the anatomy of a skeleton."""
    method = cls.example()
    try:
        count = method.count(anatomy)
        sites = _sites_of(method, empty)
        for part in (p for p in method.parts() if p.trains_backbone):
            refuse_untrainable(part, part.plan(anatomy), anatomy)
        if not count and anatomy.backbone.foreign and not anatomy.head():
            raise SiteError("nothing would train without a head", offenders=["attach(head=[...])"])
    except AdapterhubError as error:
        missing = tuple(each.partition(";")[0] for each in error.offenders)
        return MethodFit(None, (), error.problem, missing, _fitting_classes(method, empty))
    return MethodFit(count, tuple(sites_option(anatomy, sites)) if sites else ())


def _sites_of(method: Method, empty: Anatomy) -> list[Site]:
    """Return the sites of a method.

    Raises:
        AdapterhubError: the method does not fit, as in `attach`.
    """
    sites: dict[str, Site] = {}
    with skip_init(), undrawn(), torch.device("meta"):
        for step in (step for part in method.parts() for step in part.plan(empty)):
            if isinstance(step, Placement):
                if step.site.matrix is not None:
                    host = empty.model.get_submodule(step.site.host)
                    check_matrix(host, step.site, step.module)
                sites[step.site.id] = step.site
    return list(sites.values())


def _fitting_classes(method: Any, empty: Anatomy) -> tuple[str, ...]:
    """Return the module classes that a method can be at, if its option `sites` names them.

    One of the largest matrices of each class is tried, since ranks may be too large for others.
    """
    if _SITES not in method.options() or method.trains_backbone:
        return ()
    largest: dict[str, Site] = {}
    for site in empty.every():
        hosted = site.kind in ("linear", "norm")
        name = class_at(empty, site.host) if hosted else site.kind
        largest[name] = max(largest.get(name, site), site, key=lambda s: min(s.d_in, s.d_out))
    return tuple(name for name, site in largest.items() if _can_be_at(method, site, empty))


def _can_be_at(method: Any, site: Site, empty: Anatomy) -> bool:
    try:
        return bool(_sites_of(dataclasses.replace(method, sites=(site.id,)), empty))
    except AdapterhubError:
        return False


def _facts(row: LayerGroup | Rest) -> dict[str, Any]:
    """Return the fields of a row as JSON types."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in row._asdict().items()}


def _row_facts(row: SiteRow) -> dict[str, Any]:
    return {
        "site": row.site,
        "kind": row.kind,
        "in": row.d_in,
        "out": row.d_out,
        "host": row.host,
        "layers": row.layers,
        "modules": list(row.modules),
        "number": len(row.sites),
        "sizes": [list(sizes) for sizes in row.sizes],
    }


def _hosts(row: SiteRow) -> tuple[str, str]:
    """Format the modules of a row's sites, and the number of sites."""
    modules = "a sublayer" if row.kind == "sublayer" else _some(row.modules)
    return modules, str(len(row.sites))


def _ranges(row: SiteRow) -> tuple[str, str]:
    """Format the input and output sizes of a row: one number, or minimum and maximum."""
    read, written = zip(*row.sizes, strict=True)
    return _range(read), _range(written)


def _range(sizes: Sequence[int]) -> str:
    return str(min(sizes)) if len(set(sizes)) == 1 else f"{min(sizes)}..{max(sizes)}"


def _numbered(layers: Sequence[int]) -> str:
    return f"layers {number_ranges(layers)}"


def _compact(roles: Sequence[str]) -> str:
    """Format roles by sublayer: `attn (k, o, q, v), ffn (down, up)`."""
    sublayers: dict[str, list[str]] = {}
    for role in roles:
        sublayer, _, name = role.partition(".")
        sublayers.setdefault(sublayer, []).extend([name] if name else [])
    return ", ".join(f"{s} ({', '.join(names)})" if names else s for s, names in sublayers.items())


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _reason(fit: MethodFit) -> str:
    return ": ".join(filter(None, (fit.problem, _some(fit.details))))
