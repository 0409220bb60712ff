"""A drawing of where a method sits: one layer of a transformer, drawn from the method's plan.

The drawing is of an encoder with a task head. Boxes are the backbone's modules, named as sites
are; what a method adds is drawn at its site, and a box whose own parameters train is filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from adapterhub.anatomy.sites import SUBLAYERS, Anatomy
from adapterhub.methods import Method, Placement
from adapterhub.methods.common.site_module import InputModule, OutputModule
from adapterhub.methods.norms import norm_parameters
from reference import _backbones

WIDTH, CENTER, BOX = 360, 145, 24
LEFT, RIGHT = 16, 276  # the frame of the layer
STYLE = """<style>
.where {--quiet: var(--md-default-fg-color--light); --accent: var(--md-accent-fg-color);
  --page: var(--md-default-bg-color); --tint: color-mix(in srgb, var(--accent) 30%, var(--page))}
.where svg {display: block; width: 100%; max-width: 26rem; margin: 0 auto; height: auto}
.where text {fill: var(--md-default-fg-color); font: 11px var(--md-text-font-family, sans-serif);
  text-anchor: middle; dominant-baseline: central}
.where .box rect, .where .bar {fill: var(--page); stroke: var(--quiet)}
.where .line {fill: none; stroke: var(--quiet); stroke-width: 1.2}
.where .tip {fill: var(--quiet)}
.where .frame {fill: none; stroke: var(--md-default-fg-color--lighter); stroke-dasharray: 4 3}
.where .own rect, .where .bar.on {fill: var(--tint); stroke: var(--accent)}
.where .added rect {fill: var(--accent); stroke: none}
.where .added text {fill: var(--page); font-size: 10px; font-weight: 600}
.where .added .line {stroke: var(--accent)}
.where text.small {font-size: 9px}
.where text.quiet {fill: var(--quiet); font-size: 10px; font-weight: 400}
.where figcaption {max-width: 26rem; margin: .6em auto}
.where .key {display: inline-block; width: .9em; height: .9em; vertical-align: -.1em;
  margin: 0 .3em 0 .9em; border: 1px solid var(--quiet)}
.where .key.own {background: var(--tint); border-color: var(--accent)}
.where .key.added {background: var(--accent); border-color: var(--accent)}
</style>"""


@dataclass
class Where:
    """Where a method sits in a backbone.

    `added` maps (role, way into the forward pass) to the names of the methods there; `own` maps the
    boxes of the drawing to what trains of them, "all" or "bias"; `stages` has the stage from which
    each layer is trained or adapted, by number; `depth` is the number of layers.
    """

    depth: int
    added: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)

    @property
    def roles(self) -> list[str]:
        """The highlighted places: roles of sites with a module, and boxes that train."""
        return sorted({*(role for role, _ in self.added), *self.own})


def where(method: Method, model: PreTrainedModel) -> Where:
    """Return where a method sits in an encoder."""
    anatomy = _backbones.anatomy(model)
    (stack,) = anatomy.stacks
    found = Where(anatomy.depth(stack))
    trained: dict[str, set[str]] = defaultdict(set)
    boxes = box_of_parameters(anatomy)
    for part, step in _backbones.steps(method, model):
        if isinstance(step, Placement):
            names = found.added.setdefault((step.site.role, _way(step)), [])
            names += [part.name] if part.name not in names else []
            layers = range(found.depth) if step.site.role == "mix" else [step.site.layer]
            stage = 0
        else:
            trained[boxes[step.path]].add(step.path)
            layer = anatomy.layer_of(step.path)
            layers, stage = [None if isinstance(layer, str) else layer[1]], step.stage
        for number in layers:
            if number is not None:
                found.stages[number] = min(stage, found.stages.get(number, stage))
    found.own = {box: _extent(box, paths, boxes) for box, paths in trained.items()}
    return found


def _way(step: Placement) -> str:
    """Return how a module enters: at the input of its host, at its output, or parallel to it."""
    if isinstance(step.module, InputModule):
        return "input"
    if isinstance(step.module, OutputModule) and step.site.role in SUBLAYERS:
        return "after" if step.module.source in ("output", "block") else "parallel"
    return "output"


def box_of_parameters(anatomy: Anatomy) -> dict[str, str]:
    """Map the backbone's parameters to the boxes of the drawing."""
    roles = {s.host: s.role for s in anatomy.sites.values() if s.kind in ("linear", "norm")}
    norms = set(norm_parameters(anatomy))
    outside = {"below": "embed", "above": "pooler"}
    boxes = {}
    for path in anatomy.parameters():
        layer = anatomy.layer_of(path)
        if isinstance(layer, str):
            boxes[path] = outside[layer] + (".norm" if path in norms else "")
        else:
            boxes[path] = roles[path.rpartition(".")[0]]
    return boxes


def _extent(box: str, paths: set[str], boxes: dict[str, str]) -> str:
    """Return "bias" if only biases of a module train that has other parameters."""
    everything = {path for path, other in boxes.items() if other == box}
    biases = {path for path in everything if path.endswith("bias")}
    return "bias" if paths <= biases < everything else "all"


def figure(name: str, place: Where) -> str:
    """Return the drawing of a method as HTML, with a caption."""
    return _Drawing(place).html(name)


# The boxes from the top down, with the space below each; some rows have several boxes.
_ROWS: Sequence[tuple[str, int]] = (
    ("head", 12), ("pooler", 34), ("ffn.norm", 32), ("ffn.down", 26), ("ffn.up", 22),
    ("attn.norm", 32), ("attn.o", 14), ("attention", 54), ("qkv", 40), ("embed.norm", 8),
    ("embed", 16), ("tokens", 0),
)  # fmt: skip
_LABELS = {
    "head": "task head", "pooler": "pooler", "ffn.norm": "add, norm", "ffn.down": "down",
    "ffn.up": "up, activation", "attn.norm": "add, norm", "attn.o": "o", "attention": "attention",
    "embed.norm": "norm", "embed": "embedding",
}  # fmt: skip
_WIDTHS = {"attention": 182, "attn.o": 70, "ffn.up": 110, "ffn.down": 110}
_QKV = {"attn.q": CENTER - 65, "attn.k": CENTER, "attn.v": CENTER + 65}


class _Drawing:
    """Draws boxes at fixed places, and what a method adds."""

    def __init__(self, place: Where) -> None:
        self.place = place
        self.y: dict[str, int] = {}
        top = 6
        for name, gap in _ROWS:
            self.y[name] = top
            top += BOX + gap
        self.height = top + 8

    def html(self, name: str) -> str:
        """Return the figure."""
        text = ", ".join(self.place.roles) or "nowhere: only the task head trains"
        parts = [
            f'<figure class="where" data-method="{name}">{STYLE}',
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{name}: {text}">',
            *self._lines(), *self._boxes(), *self._layers(), *self._additions(), "</svg>",
            "<figcaption>", *self._caption(), "</figcaption></figure>",
        ]  # fmt: skip
        return "\n".join(parts)

    def _lines(self) -> Iterator[str]:
        """Yield the paths of the hidden states, from the bottom up."""
        y = self.y
        yield (
            '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
            'markerHeight="6" orient="auto"><path class="tip" d="M0 0 L6 3 L0 6 z"/></marker>'
        )
        yield (
            f'<rect class="frame" x="{LEFT}" y="{y["ffn.norm"] - 14}" rx="6" '
            f'width="{RIGHT - LEFT}" height="{y["qkv"] + BOX + 26 - y["ffn.norm"] + 14}"/>'
        )
        yield _line((CENTER, y["tokens"]), (CENTER, y["qkv"] + BOX))
        for name in ("attn.o", "attn.norm", "ffn.up", "ffn.down", "ffn.norm", "pooler", "head"):
            below = list(y)[list(y).index(name) + 1]
            yield _line((CENTER, y[below]), (CENTER, y[name] + BOX), tip=True)
        fork, join = y["qkv"] + BOX + 10, y["attention"] + BOX
        for x in (_QKV["attn.q"], _QKV["attn.v"]):
            yield _line((CENTER, fork), (x, fork), (x, y["qkv"] + BOX))
        for x in _QKV.values():
            yield _line((x, y["qkv"]), (x, join))
        for start, norm in ((fork + 9, "attn.norm"), (y["ffn.up"] + BOX + 11, "ffn.norm")):
            middle = y[norm] + BOX // 2
            points = (
                (CENTER, start),
                (LEFT + 12, start),
                (LEFT + 12, middle),
                (CENTER - 55, middle),
            )
            yield _line(*points, tip=True)

    def _boxes(self) -> Iterator[str]:
        """Yield the modules of the backbone."""
        for name, label in _LABELS.items():
            yield self._box(name, CENTER, _WIDTHS.get(name, 110), label)
        for name, x in _QKV.items():
            yield self._box(name, x, 52, name.rpartition(".")[2])
        for number in range(4):
            x = CENTER - 42 + 28 * number
            yield f'<g class="box">{_rect(x - 11, self.y["tokens"], 22, 14)}</g>'
        yield _text(CENTER, self.y["tokens"] + 23, "tokens of the text", "quiet")

    def _box(self, name: str, x: int, width: int, label: str) -> str:
        y = self.y["qkv" if name in _QKV else name]
        extent = "all" if name == "head" else self.place.own.get(name, "")
        style = {"all": "box own", "bias": "box"}.get(extent, "box")
        on = f' data-on="{name}"' if extent and name != "head" else ""
        text = f'<g class="{style}"{on}>{_rect(x - width // 2, y, width)}'
        text += _text(x, y + BOX // 2, label)
        if extent == "bias":
            left = x + width // 2 - 18
            text += f'<g class="own">{_rect(left, y + 3, 15, BOX - 6)}</g>'
            text += _text(left + 7, y + BOX // 2, "b", "small")
        return f"{text}</g>"

    def _layers(self) -> Iterator[str]:
        """Yield one bar for each layer, with the stage from which it trains."""
        top, bottom = self.y["ffn.norm"] - 14, self.y["qkv"] + BOX + 26
        step = (bottom - top) / self.place.depth
        for number in range(self.place.depth):
            y = bottom - step * (number + 1)
            on = ' class="bar on"' if number in self.place.stages else ' class="bar"'
            yield (
                f'<rect{on} data-layer="{number}" x="304" y="{y:.1f}" width="34" '
                f'height="{step - 4:.1f}" rx="2"/>'
            )
            stage = f" s{self.place.stages[number]}" if self._staged() else ""
            yield _text(321, round(y + step / 2 - 2), f"{number}{stage}", "small")
        yield _text(321, bottom + 10, "layers", "quiet")

    def _staged(self) -> bool:
        return any(self.place.stages.values())

    def _additions(self) -> Iterator[str]:
        """Yield what the method adds, each at its site."""
        for (role, way), names in self.place.added.items():
            yield f'<g class="added" data-on="{role}">'
            yield from self._addition(role, way, " + ".join(names))
            yield "</g>"

    def _addition(self, role: str, way: str, label: str) -> Iterator[str]:
        y = self.y
        if role == "embed":
            for number in range(3):
                yield _rect(LEFT - 8 + 26 * number, y["embed"] + 5, 22, 14)
            yield f"</g>{_text(LEFT + 29, y['embed'] + 28, label, 'quiet')}<g>"
        elif role == "mix":
            middle = y["ffn.norm"] - 26
            yield _line((304, middle), (CENTER, middle))
            yield _line((321, middle + 12), (321, middle), (304, middle))
            yield _tag(CENTER, middle, label, 96)
        elif role == "input":
            yield _tag(CENTER, y["embed.norm"] - 12, label, 76)
        elif role == "layer":
            yield _tag(CENTER, y["ffn.norm"] - 20, label, 62)
        elif role == "attn.kv":
            for name in ("attn.k", "attn.v"):
                x, middle = _QKV[name] + 33, y["attention"] + BOX + 15
                yield _line((x, middle), (x, y["attention"] + BOX))
                yield _tag(x, middle, label, 46)
        elif role in SUBLAYERS:
            yield from self._at_sublayer(role, way, label)
        elif role in _QKV:
            yield _tag(_QKV[role], y["qkv"] - 10, label, 56)
        elif way == "input":
            yield _tag(CENTER, y[role] + BOX + 13, label, 56)
        else:
            yield _tag(CENTER + _WIDTHS.get(role, 110) // 2 + 32, y[role] + BOX // 2, label, 56)

    def _at_sublayer(self, role: str, way: str, label: str) -> Iterator[str]:
        y = self.y
        output, inner = {"attn": ("attn.o", "qkv"), "ffn": ("ffn.down", "ffn.up")}[role]
        after = y[output] - 15
        if way == "after":
            yield _tag(CENTER, after, label, 96)
            return
        before, x = y[inner] + BOX + 6, RIGHT - 34
        yield _line((CENTER, before), (x, before), (x, after), (CENTER, after))
        yield _tag(x, (before + after) // 2, label, 62)

    def _caption(self) -> Iterator[str]:
        place = self.place
        yield '<span class="key"></span>frozen'
        if place.added:
            yield '<span class="key added"></span>added'
        own = "the backbone's own, and the head" if place.own else "the head"
        yield f'<span class="key own"></span>trained: {own}'
        if "bias" in place.own.values():
            yield "(b: only the bias)"
        if self._staged():
            yield "<br>s0, s1, ...: the stage from which a layer trains"


def _line(*points: tuple[int, int], tip: bool = False) -> str:
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    end = ' marker-end="url(#tip)"' if tip else ""
    return f'<path class="line" d="{path}"{end}/>'


def _rect(x: int, y: int, width: int, height: int = BOX) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>'


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={style!r}" if style else ""}>{text}</text>'


def _tag(x: int, y: int, label: str, width: int) -> str:
    """Return a small filled box around a point, wide enough for its label."""
    words = label.split("-") if len(label) > 9 and width < 70 and "-" in label else [label]
    height = 8 + 10 * len(words)
    lines = [_rect(x - width // 2, y - height // 2, width, height)]
    for number, word in enumerate(words):
        middle = y - 5 * (len(words) - 1) + 10 * number
        lines.append(_text(x, middle, word))
    return "".join(lines)
