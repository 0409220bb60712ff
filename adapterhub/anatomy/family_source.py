"""Python source of a Family row."""

from __future__ import annotations

from collections.abc import Iterable

from adapterhub.anatomy.family import Family, Stack

UNKNOWN = "..."


def row_text(row: Family, required: Iterable[str] = ()) -> str:
    """Write a row as Python source; missing `required` roles are written as `...`."""
    stacks = row.stacks or (Stack("encoder", UNKNOWN, {}),)
    lines = ["Family("]
    lines.append(f"    {_text(row.model_types)},")
    lines.append("    stacks=(")
    for stack in stacks:
        lines += [f"        {line}" for line in _stack_lines(stack, tuple(required))]
    lines.append("    ),")
    lines.append(f"    below={_text(row.below) if row.below else UNKNOWN},")
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


def _stack_lines(stack: Stack, required: tuple[str, ...]) -> list[str]:
    sites = dict(stack.sites)
    parts = {"attn.q", "attn.k", "attn.v"} if "attn.qkv" in sites else set()
    parts |= {"ffn.up"} if "ffn.gate_up" in sites else set()
    parts |= {"ffn.up", "ffn.down"} if "ffn" in sites else set()
    sites |= {role: UNKNOWN for role in required if role not in sites and role not in parts}
    lines = ["Stack(", f"    {_text(stack.name)},", f"    {_text(stack.layers)},", "    {"]
    lines += [f"        {_text(role)}: {_text(path)}," for role, path in sorted(sites.items())]
    lines.append("    },")
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
    return [*lines, "),"]


def _text(value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        inside = ", ".join(map(_text, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return UNKNOWN if value == UNKNOWN else f'"{value}"'
