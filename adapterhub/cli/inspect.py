"""`adapterhub inspect`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from adapterhub.cli._format import count_text, print_table


@click.command("inspect")
@click.argument("backbone")
@click.option("--revision", help="Branch, tag or commit of a Hub backbone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(backbone: str, revision: str | None, as_json: bool) -> None:
    """Show the anatomy of BACKBONE (a Hub id or a folder): its sites and parameters, and which
    methods fit."""
    from adapterhub.anatomy import anatomy_of
    from adapterhub.backbones import fingerprint, load_backbone

    model, _ = load_backbone(backbone, revision=revision)
    identity = fingerprint(backbone, revision=revision)
    anatomy = anatomy_of(model)
    sites = _roles(anatomy)
    methods = _methods(anatomy)
    total = sum(p.numel() for p in anatomy.parameters().values())
    if as_json:
        facts = {"backbone": backbone, "type": model.config.model_type, "parameters": total}
        facts["fingerprint"] = identity
        click.echo(json.dumps(facts | {"sites": sites, "methods": methods}, indent=2))
        return
    depths = ", ".join(f"{name} of {anatomy.depth(name)} layers" for name in anatomy.stacks)
    click.echo(f"{backbone}: {model.config.model_type}, {count_text(total)} parameters, {depths}")
    click.echo(f"fingerprint: {identity}")
    _print(Table("site", "kind", "in", "out", "host"), [tuple(map(str, s.values())) for s in sites])
    _print(Table("method", "parameters", "of the backbone"), _method_rows(methods, total))


def _roles(anatomy: Any) -> list[dict[str, Any]]:
    """One row a stack and role: the sites of one layer stand for all."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for site in anatomy.sites.values():
        name = f"{site.stack}.{site.role}"
        row = {
            "site": name,
            "kind": site.kind,
            "in": site.d_in,
            "out": site.d_out,
            "host": site.host,
        }
        rows.setdefault((site.stack, site.role), row)
    return list(rows.values())


def _methods(anatomy: Any) -> dict[str, Any]:
    from adapterhub.errors import AdapterhubError
    from adapterhub.methods import METHODS

    found: dict[str, Any] = {}
    for name, method in sorted(METHODS.items()):
        try:
            found[name] = method.example().count(anatomy)
        except AdapterhubError as error:
            found[name] = error.problem
    return found


def _method_rows(methods: dict[str, Any], total: int) -> list[tuple[str, ...]]:
    return [
        (name, count_text(count), f"{count / total:.2%}")
        if isinstance(count, int)
        else (name, count, "")
        for name, count in methods.items()
    ]


def _print(table: Table, rows: list[tuple[str, ...]]) -> None:
    for row in rows:
        table.add_row(*row)
    print_table(table)
