"""Python source of a Family row."""

from __future__ import annotations

from collections.abc import Mapping

from adapterhub.anatomy.family import Family, Stack


def row_text(row: Family) -> str:
    """Write a row as Python source."""
    lines = ["Family("]
    lines.append(f"    {_text(row.model_types)},")
    lines.append("    stacks=(")
    for stack in row.stacks:
        lines += [f"        {line}" for line in _stack_lines(stack)]
    lines.append("    ),")
    lines.append(f"    below={_text(row.below)},")
    if row.positions_from_padding:
        lines.append("    positions_from_padding=True,")
    if row.constants:
        lines.append(f"    constants={_text(row.constants)},")
    if row.batch_dim:
        lines.append(f"    batch_dim={row.batch_dim},")
    if row.positions_follow_mask:
        lines.append("    positions_follow_mask=True,")
    if row.query_stream:
        lines.append(f"    query_stream={_text(row.query_stream)},")
    return "\n".join([*lines, ")"])


def _stack_lines(stack: Stack) -> list[str]:
    lines = ["Stack(", f"    {_text(stack.name)},", f"    {_text(stack.layers)},"]
    lines += [f"    {line}" for line in _site_lines(stack.sites, "{", "},")]
    if stack.root:
        lines.append(f"    root={_text(stack.root)},")
    if stack.body:
        lines.append(f"    body={_text(stack.body)},")
    if stack.norms:
        lines.append(f"    norms={_text(stack.norms)},")
    if stack.bias:
        lines.append(f"    bias={_text(stack.bias)},")
    if stack.fused:
        layouts = ", ".join(f"{_text(role)}: {_text(v)}" for role, v in stack.fused.items())
        lines.append(f"    fused={{{layouts}}},")
    if stack.own:
        lines.append("    own={")
        for number, sites in stack.own.items():
            lines += [f"        {line}" for line in _site_lines(sites, f"{number}: {{", "},")]
        lines.append("    },")
    return [*lines, "),"]


def _site_lines(sites: Mapping[str, str], start: str, end: str) -> list[str]:
    return [
        start,
        *(f"    {_text(role)}: {_text(path)}," for role, path in sorted(sites.items())),
        end,
    ]


def _text(value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        inside = ", ".join(map(_text, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return f'"{value}"'
