"""The axes of a chart as SVG: lines, dots and bars in the colours of the page, light and dark.

The same values give the same bytes. A chart has the size of a phone; the page scales it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("ink", "muted", "grid", "first", "second", "third")
"""The names of the page's CSS variables."""

_WIDTH, _HEIGHT = 302, 173
_LEFT, _RIGHT, _TOP, _BOTTOM = 47.0, 291.0, 6.0, 138.0  # where the axes end
_TICKS = 5  # intervals at most
_ROW = 13.0  # height of a line of the legend
_LETTER = 5.0  # width that a letter of the legend takes, at least
_SWATCH = 22.0  # width of a colour in the legend, with its gaps
_MARGIN = 0.05  # of the values' range, at both ends of an axis
_NARROW = 1e-6  # ranges that are smaller, relative to their ends, are widened


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, which are drawn at `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    whole: bool = False
    log: bool = False

    def place(self, value: float) -> float:
        """Return the coordinate of a value; of one beyond the ends, that of the end."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """List the values to label, with their labels."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        step = _nice_step(high - low, whole=self.whole or self.log)
        numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if self.log:
            return [(10.0 ** (n * step), f"{10.0 ** (n * step):g}") for n in numbers]
        return [(n * step, _label(n * step, step)) for n in numbers]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def limits(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Return the ends of an axis for some values, with a margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        margin = (high / low) ** _MARGIN
        return low / margin, high * margin
    if high - low < _NARROW * max(abs(low), abs(high), _NARROW):
        margin = abs(low) / 10 or 0.5
    else:
        margin = _MARGIN * (high - low)
    return low - margin, high + margin


def _nice_step(span: float, *, whole: bool) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten with at most `_TICKS` steps."""
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    steps = (factor * power for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)))
    step = next(s for s in steps if s * _TICKS >= span * (1 - 1e-9))
    return max(step, 1.0) if whole else step


def _label(value: float, step: float) -> str:
    """Write a value with the decimals of the step."""
    if step < 1e-6 or abs(value) >= 1e7:
        return f"{value:.4g}"
    decimals = len(f"{step:.7f}".rstrip("0").partition(".")[2])
    return f"{value:.{decimals}f}"


class Axes:
    """A chart with two axes, to which lines, dots and bars are added.

    Args:
        x: the ends of the horizontal axis.
        y: the ends of the vertical axis.
        whole: label whole numbers only on the horizontal axis.
        log: whether the vertical axis is logarithmic.
        legend: (name, colour) of what is drawn.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        whole: bool = False,
        log: bool = False,
        legend: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.parts: list[str] = []
        top = self._legend(legend)
        self.x = Axis(*x, _LEFT, _RIGHT, whole=whole)
        self.y = Axis(*y, _BOTTOM, top, log=log)

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 1.6,
        dashed: bool = False,
    ) -> None:
        """Draw a line.

        Args:
            points: x and y.
            colour: one of `COLOURS`.
            width: of the line.
            dashed: whether it is dashed.
        """
        path = " ".join(f"{self.x.place(x):.1f},{self.y.place(y):.1f}" for x, y in points)
        dashes = ";stroke-dasharray:3 3" * dashed
        style = f"fill:none;stroke:var(--{colour});stroke-width:{width}{dashes}"
        self.parts.append(f'<polyline points="{path}" style="{style}"/>')

    def dots(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        radius: float = 1.5,
        hollow: bool = False,
        opacity: float = 1.0,
    ) -> None:
        """Draw a dot at each point.

        Args:
            points: x and y.
            colour: one of `COLOURS`.
            radius: of each dot.
            hollow: draw circles instead.
            opacity: of each dot.
        """
        fill = f"fill:none;stroke:var(--{colour})" if hollow else f"fill:var(--{colour})"
        circles = "".join(
            f'<circle cx="{self.x.place(x):.1f}" cy="{self.y.place(y):.1f}" r="{radius}"/>'
            for x, y in points
        )
        self.parts.append(f'<g style="{fill};opacity:{opacity}">{circles}</g>')

    def bars(self, bars: Iterable[tuple[float, float, float]], colour: str) -> None:
        """Draw a bar from 0 for each (left, right, value)."""
        rectangles = []
        for left, right, value in bars:
            (a, b), (low, high) = map(self.x.place, (left, right)), map(self.y.place, (0.0, value))
            size = f'width="{b - a:.1f}" height="{low - high:.1f}"'
            rectangles.append(f'<rect x="{a:.1f}" y="{high:.1f}" {size}/>')
        self.parts.append(f'<g style="fill:var(--{colour})">{"".join(rectangles)}</g>')

    def svg(self, x: str, y: str = "") -> str:
        """Return the chart as an SVG element; `x` and `y` are the names of the axes."""
        named = [_text(x, (_LEFT + _RIGHT) / 2, _HEIGHT - 7)]
        if y:
            named.append(_text(y, 11, (self.y.end + _BOTTOM) / 2, turned=True))
        return (
            f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="font-size:9.5px">'
            f"{self._grid()}{''.join(self.parts)}{self._labels()}{''.join(named)}</svg>"
        )

    def _grid(self) -> str:
        across = [f"M{_LEFT},{self.y.place(v):.1f}H{_RIGHT}" for v, _ in self.y.ticks()]
        down = [f"M{self.x.place(v):.1f},{self.y.end}V{_BOTTOM}" for v, _ in self.x.ticks()]
        frame = f"M{_LEFT},{self.y.end}V{_BOTTOM}H{_RIGHT}"
        style = "fill:none;stroke:var(--grid);stroke-width"
        return (
            f'<path d="{"".join(across + down)}" style="{style}:.6"/>'
            f'<path d="{frame}" style="{style}:.8"/>'
        )

    def _labels(self) -> str:
        below = [_text(label, self.x.place(v), _BOTTOM + 13) for v, label in self.x.ticks()]
        left = [_text(t, _LEFT - 4, self.y.place(v) + 3.3, "end") for v, t in self.y.ticks()]
        return "".join(below + left)

    def _legend(self, entries: Iterable[tuple[str, str]]) -> float:
        """Draw the legend above the axes, in as many lines as it needs; return where they begin."""
        left, middle = _LEFT, _TOP + _ROW / 2
        for name, colour in entries:
            width = _SWATCH + _LETTER * len(name)
            if left > _LEFT and left + width > _RIGHT:
                left, middle = _LEFT, middle + _ROW
            style = f"stroke:var(--{colour});stroke-width:1.6"
            self.parts.append(f'<path d="M{left},{middle}h12" style="{style}"/>')
            self.parts.append(_text(name, left + 16, middle + 3.3, "start", "ink"))
            left += width
        return middle + _ROW / 2 if self.parts else _TOP


def _text(
    text: str,
    x: float,
    y: float,
    anchor: str = "middle",
    colour: str = "muted",
    *,
    turned: bool = False,
) -> str:
    place = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)"' * turned
    place = place or f'x="{x:.1f}" y="{y:.1f}"'
    style = f"fill:var(--{colour});text-anchor:{anchor}"
    return f'<text {place} style="{style}">{escape(text)}</text>'
