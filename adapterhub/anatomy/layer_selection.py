"""Layer selections: `all`, `top 4`, `first 2`, `0..3`, a number or several."""

from __future__ import annotations

import re
from collections.abc import Iterable

from adapterhub.errors import SiteError


def layer_numbers(layers: str | int | tuple[int, ...], depth: int) -> range | set[int]:
    """Return the layer numbers of a selection in a stack of `depth` layers.

    Raises:
        SiteError: the selection is malformed, or names a layer that does not exist.
    """
    if isinstance(layers, str):
        return _layer_range(layers.strip(), depth)
    numbers = {layers} if isinstance(layers, int) else set(layers)
    if outside := sorted(n for n in numbers if not 0 <= n < depth):
        raise _bad_layers(f"layers {outside} do not exist", depth)
    return numbers


def number_ranges(numbers: Iterable[int]) -> str:
    """Write layer numbers with runs as ranges, ends included: "0..3, 5, 7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs)


def _layer_range(text: str, depth: int) -> range | set[int]:
    if text == "all":
        return range(depth)
    if match := re.fullmatch(r"(top|first) (\d{1,9})", text):
        count = min(int(match[2]), depth)
        return range(depth - count, depth) if match[1] == "top" else range(count)
    if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text):
        first, last = int(match[1]), int(match[2])
        if last >= depth:
            raise _bad_layers(f"layers {text!r} do not exist", depth)
        return range(first, last + 1)
    if re.fullmatch(r"\d{1,9}", text):
        return layer_numbers(int(text), depth)
    raise _bad_layers(f"cannot parse layers {text!r}", depth)


def _bad_layers(problem: str, depth: int) -> SiteError:
    return SiteError(
        f"{problem} in a stack of {depth} layers",
        expected="all, 'top 4', 'first 2', '0..3' (ends included), 5, [0, 5, 11]; the first is 0",
    )
