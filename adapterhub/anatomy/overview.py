"""Overview of a module: its sites in rows, and its parameters without a site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from adapterhub.anatomy.backbone import PipelineParts, join
from adapterhub.anatomy.sites import Anatomy, Kind, Site, number_ranges


class Part(NamedTuple):
    """A part of a pipeline.

    Attributes:
        part: its name: `unet`, `text_encoder`.
        module: the name of its class.
        parameters: the number of parameters.
        sites: the number of sites.
    """

    part: str
    module: str
    parameters: int
    sites: int


class SiteRow(NamedTuple):
    """The sites of one role.

    Attributes:
        site: a pattern that matches them, for `sites=`; in a transformers model, stack and role.
        kind: the kind of the first site.
        d_in: the input size of the first site.
        d_out: the output size of the first site.
        host: the path of the first site's module.
        layers: the layers that have such a site, as text: all, `1 of 4: 3`; "" outside layers.
        modules: the class names of their modules.
        sites: all sites of the row.
    """

    site: str
    kind: Kind
    d_in: int
    d_out: int
    host: str
    layers: str
    modules: tuple[str, ...]
    sites: tuple[Site, ...]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The input and output sizes that occur, in ascending order."""
        return sorted({(site.d_in, site.d_out) for site in self.sites})


class Rest(NamedTuple):
    """Parameters without a site, in modules of one class.

    Attributes:
        module: the name of the class.
        parameters: the total size of the parameters.
        names: their names in the modules.
        paths: the paths of the modules; "" is the outermost one.
    """

    module: str
    parameters: int
    names: tuple[str, ...]
    paths: tuple[str, ...]


def parts_in(anatomy: Anatomy) -> list[Part]:
    """List the parts of a pipeline; [] for other modules."""
    root = anatomy.backbone.module
    if not isinstance(root, PipelineParts):
        return []
    sizes = {path: parameter.numel() for path, parameter in anatomy.parameters().items()}
    return [
        Part(
            name,
            type(module).__name__,
            sum(size for path, size in sizes.items() if path.startswith(f"{name}.")),
            sum(site.host.startswith(f"{name}.") for site in anatomy.sites.values()),
        )
        for name, module in root.items()
    ]


def site_rows(anatomy: Anatomy) -> list[SiteRow]:
    """List the sites in rows: by stack and role, or by part if sites are named by paths."""
    parts, foreign = parts_in(anatomy), anatomy.backbone.foreign
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in anatomy.every():
        by_path = foreign or site.id in anatomy.by_path
        part = site.host.partition(".")[0] if parts else ""
        key = (part, site.role, site.kind) if by_path else (site.stack, site.role)
        groups.setdefault(key, []).append(site)
    rows = []
    for (within, role, *kind), sites in groups.items():
        first, classes = sites[0], (class_at(anatomy, site.host) for site in sites)
        rows.append(
            SiteRow(
                _pattern(anatomy, within, role, sites) if kind else f"{within}.{role}",
                first.kind,
                first.d_in,
                first.d_out,
                first.host,
                _layers(anatomy, sites),
                tuple(dict.fromkeys(classes)),
                tuple(sites),
            )
        )
    return rows


def without_sites(anatomy: Anatomy) -> list[Rest]:
    """List the parameters without a site, by the class of their module, largest total first.

    The parameters of a head and constants are excluded.
    """
    whole: set[str] = set()
    single: set[str] = set()
    for site in anatomy.every():
        if site.matrix is not None:
            single |= {join(site.host, site.matrix.weight), join(site.host, site.matrix.bias)}
        elif site.held is not None:
            single.add(join(site.host, site.held.parameter))
        elif site.kind in ("linear", "norm"):
            whole.add(site.host)
    groups: dict[str, list[tuple[str, str, int]]] = {}
    for path, parameter in anatomy.parameters().items():
        owner, _, name = path.rpartition(".")
        if path not in single and owner not in whole:
            group = groups.setdefault(class_at(anatomy, owner), [])
            group.append((owner, name, parameter.numel()))
    rests = [
        Rest(
            module,
            sum(size for *_, size in group),
            tuple(dict.fromkeys(name for _, name, _ in group)),
            tuple(dict.fromkeys(owner for owner, *_ in group)),
        )
        for module, group in groups.items()
    ]
    return sorted(rests, key=lambda rest: -rest.parameters)


def class_at(anatomy: Anatomy, path: str) -> str:
    """Return the class name of a module."""
    module: nn.Module = anatomy.backbone.module.get_submodule(path)
    return type(module).__name__


def _pattern(anatomy: Anatomy, within: str, role: str, sites: Sequence[Site]) -> str:
    """Return a pattern that matches only these sites, if one exists; otherwise their role.

    For a single site, the pattern is its id.
    """
    ids = {site.id for site in sites}
    patterns = [role, f"*.{role}"]
    if within:
        patterns = [f"{within}.{role}", f"{within}.*.{role}", f"{within}.*{role}"]
    for pattern in patterns:
        if {site.id for site in anatomy.matching(pattern)} == ids:
            return pattern
    return role if len(sites) > 1 else sites[0].id


def _layers(anatomy: Anatomy, sites: Iterable[Site]) -> str:
    """Describe the layers of a stack that have some sites; "" if some sites are elsewhere."""
    layers = {(site.stack, site.layer) for site in sites}
    numbers = sorted(layer for _, layer in layers if layer is not None)
    if len({stack for stack, _ in layers}) > 1 or len(numbers) < len(layers):
        return ""
    depth = anatomy.depth(next(stack for stack, _ in layers))
    return (
        "all" if len(numbers) == depth else f"{len(numbers)} of {depth}: {number_ranges(numbers)}"
    )
