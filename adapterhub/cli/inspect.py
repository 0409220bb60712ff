"""`adapterhub inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from adapterhub.cli._format import (
    print_facts,
    print_json,
    print_table,
    say_text,
)
from adapterhub.cli._options import as_json_option, revision_option
from adapterhub.files.shown_table import ShownTable
from adapterhub.status import doing


@click.command("inspect")
@click.argument("backbone")
@revision_option
@as_json_option
@click.option("--family", metavar="FILE", help="Use the row of sites in a YAML file, and check it.")
@click.option("--draft-family", is_flag=True, help="Print a row as discovered, for --family.")
@click.option("--python", is_flag=True, help="With --draft-family: as Python, for families/.")
def command(
    backbone: str,
    revision: str | None,
    as_json: bool,
    family: str | None,
    draft_family: bool,
    python: bool,
) -> None:
    """Show the sites and parameters of a backbone and the methods that fit it.

    BACKBONE is a Hub id or a folder.
    """
    from adapterhub.backbones.early_checks import check_backbone_options

    check_backbone_options(backbone)
    with doing("loading torch"):
        from adapterhub.anatomy import anatomy_of
        from adapterhub.anatomy.layer_groups import layer_groups
        from adapterhub.backbones.fingerprint import fingerprint
        from adapterhub.backbones.load import load_backbone

    if draft_family:
        say_text(_draft(backbone, revision, python))
        return
    with doing(f"loading {backbone}"):
        model, _ = load_backbone(backbone, revision=revision, family=family)
        identity = fingerprint(backbone, revision=revision)
    anatomy, kind = anatomy_of(model), model.config.model_type
    sites = _roles(anatomy)
    methods = _methods(anatomy)
    total = sum(p.numel() for p in anatomy.parameters().values())
    if as_json:
        facts = {"backbone": backbone, "type": kind, "parameters": total, "fingerprint": identity}
        groups = [group._asdict() for group in layer_groups(anatomy)]
        print_json(facts | {"groups": groups, "sites": sites, "methods": methods}, indent=2)
        return
    summary = {
        "backbone": f"{backbone} ({kind})",
        "parameters": f"{total:,}",
        "layers": ", ".join(f"{anatomy.depth(stack)} ({stack})" for stack in anatomy.stacks),
        "fingerprint": identity,
    }
    print_facts(summary, width=11)
    _print_groups(anatomy)
    columns = ["site", "kind", "in", "out", "host", "layers"]
    print_table(ShownTable(columns, [[*map(str, s.values())] for s in sites]))
    columns = ["method", "parameters", "of the backbone"]
    print_table(ShownTable(columns, _method_rows(methods, total)))


def _print_groups(anatomy: Any) -> None:
    """Print for each group of layers what was found, and what was not."""
    from adapterhub.anatomy.layer_groups import layer_groups
    from adapterhub.anatomy.layer_selection import number_ranges

    for group in layer_groups(anatomy):
        whole = len(group.layers) == anatomy.depth(group.stack)
        layers = "all layers" if whole else f"layers {number_ranges(group.layers)}"
        say_text("")
        say_text(f"{group.stack}, {layers}")
        facts = {
            "found": _compact(group.found) or "nothing",
            "not found": ", ".join(group.missing) or "-",
            "other weights": ", ".join(group.other_weights) or "-",
        }
        if group.experts:
            facts["experts"] = (
                f"{group.experts} routed experts, fused as tensors of 3 dimensions; "
                "lora(sites=[ffn.experts.*]) reaches them"
            )
        print_facts(facts, width=15)


def _compact(roles: Sequence[str]) -> str:
    """Write roles by sublayer: `attn (k, o, q, v), ffn (down, up)`."""
    sublayers: dict[str, list[str]] = {}
    for role in roles:
        sublayer, _, name = role.partition(".")
        sublayers.setdefault(sublayer, []).extend([name] if name else [])
    return ", ".join(f"{s} ({', '.join(names)})" if names else s for s, names in sublayers.items())


def _draft(backbone: str, revision: str | None, python: bool) -> str:
    """Return the row of a backbone as discovered; its configuration is enough."""
    from adapterhub.anatomy.discovery import discover
    from adapterhub.anatomy.family_file import family_yaml, row_text
    from adapterhub.backbones.load import meta_model

    row = discover(meta_model(backbone, revision=revision))
    return row_text(row) if python else family_yaml(row).rstrip()


def _roles(anatomy: Any) -> list[dict[str, Any]]:
    """List one row per stack and role: the first layer that has it, and which layers do."""
    from adapterhub.anatomy.layer_selection import number_ranges

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    layers: dict[tuple[str, str], list[int]] = {}
    for site in anatomy.sites.values():
        if site.layer is not None:
            layers.setdefault((site.stack, site.role), []).append(site.layer)
        name = f"{site.stack}.{site.role}"
        row = {
            "site": name,
            "kind": site.kind,
            "in": site.d_in,
            "out": site.d_out,
            "host": site.host,
        }
        rows.setdefault((site.stack, site.role), row)
    for (stack, role), row in rows.items():
        found = layers.get((stack, role), [])
        depth = anatomy.depth(stack)
        some = f"{len(found)} of {depth}: {number_ranges(found)}"
        row["layers"] = "" if not found else "all" if len(found) == depth else some
    return list(rows.values())


def _methods(anatomy: Any) -> dict[str, Any]:
    """Map each method to its parameter count on a backbone, or to why it does not fit."""
    from adapterhub.errors import AdapterhubError
    from adapterhub.methods import METHODS

    counts: dict[str, Any] = {}
    for name, method in sorted(METHODS.items()):
        try:
            counts[name] = method.example().count(anatomy)
        except AdapterhubError as error:
            counts[name] = error.problem
    return counts


def _method_rows(methods: dict[str, Any], total: int) -> list[tuple[str, ...]]:
    return [
        (name, f"{count:,}", f"{count / total:.2%}")
        if isinstance(count, int)
        else (name, count, "")
        for name, count in methods.items()
    ]
