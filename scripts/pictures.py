"""Draw the pictures of README and docs: docs/assets/NAME.svg, and NAME-dark.svg.

    python scripts/pictures.py

One style for all: frozen parts are grey with a snowflake, trained parts are green, a second adapter
is amber. Colours are names that each theme translates. Widths suit a phone, where a picture is
three quarters of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ASSETS = Path(__file__).parents[1] / "docs/assets"
WIDTH, SHOWN = 460, 540  # of the drawing, and in a page on a desktop
_SANS = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_LIGHT = {
    "ink": "#1f2a44", "muted": "#566078", "line": "#8390a8", "ice": "#6b7a99",
    "frozen": "#e9ecf2", "frozen-edge": "#b4bdcd", "panel": "#f7f8fa", "panel-edge": "#d5dae3",
    "trained": "#ccefe9", "trained-edge": "#0f766e", "trained-ink": "#0b524c",
    "second": "#fde9c8", "second-edge": "#b45309", "second-ink": "#7c3a06", "no": "#b42318",
}  # fmt: skip
_DARK = {
    "ink": "#e6eaf2", "muted": "#a3adc2", "line": "#7d89a3", "ice": "#9fb2d6",
    "frozen": "#2c3446", "frozen-edge": "#56627c", "panel": "#20273a", "panel-edge": "#3a445a",
    "trained": "#0f4742", "trained-edge": "#2dd4bf", "trained-ink": "#a7f3e6",
    "second": "#4a3410", "second-edge": "#fbbf24", "second-ink": "#fde7ad", "no": "#fca5a5",
}  # fmt: skip
_INK = {"trained": "trained-ink", "second": "second-ink"}


class Drawing:
    """Collects the elements of a picture."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title, self.elements = height, title, list[str]()

    def text(
        self, x: float, y: float, words: str, *, size: float = 14, colour: str = "ink",
        anchor: str = "start", mono: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """Write words, their baseline at y."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{_MONO}"' if mono else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{{{colour}}}"{weight}{family}>{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, words: str, *, step: float = 20, size: float = 14) -> None:
        """Write lines of a folder, separated by bars; the first one at y."""
        for i, line in enumerate(words.split("|")):
            if line:
                self.text(x, y + step * i, line, size=size, colour="trained-ink")

    def box(
        self, x: float, y: float, w: float, h: float, kind: str = "frozen", words: str = "", *,
        size: float = 14, mono: bool = False, snow: bool = False, dashed: bool = False,
        radius: float = 6,
    ) -> None:  # fmt: skip
        """Draw a box with words in its middle; a frozen one may have a snowflake."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" '
            f'fill="{{{kind}}}" stroke="{{{kind}-edge}}" stroke-width="1.5"{dash}/>'
        )
        if words:
            middle = x + w / 2 - (8 if snow else 0)
            colour = _INK.get(kind, "ink")
            bold = kind in _INK
            self.text(
                middle, y + h / 2 + size * 0.35, words,
                size=size, colour=colour, anchor="middle", mono=mono, bold=bold,
            )  # fmt: skip
        if snow:
            self.snow(x + w - 13, y + h / 2)

    def snow(self, x: float, y: float, r: float = 6) -> None:
        """Draw a snowflake: frozen."""
        arms = " ".join(
            f"M{x - dx * r:.1f} {y - dy * r:.1f}L{x + dx * r:.1f} {y + dy * r:.1f}"
            for dx, dy in ((0, 1), (0.866, 0.5), (0.866, -0.5))
        )
        tips = " ".join(
            f"M{x + sx * r * 0.42:.1f} {y + sy * r * 0.95:.1f}L{x:.1f} {y + sy * r * 0.45:.1f}"
            for sx in (-1, 1)
            for sy in (-1, 1)
        )
        self.path(f"{arms} {tips}", "ice", width=1.3)

    def path(
        self, data: str, colour: str = "line", *, width: float = 1.5, dashed: bool = False,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        """Draw a line."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        end = f' marker-end="url(#{colour})"' if arrow else ""
        self.elements.append(
            f'<path d="{data}" fill="none" stroke="{{{colour}}}" stroke-width="{width:g}" '
            f'stroke-linecap="round" stroke-linejoin="round"{dash}{end}/>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = "line") -> None:
        """Draw an arrow through some points."""
        self.path("M" + " L".join(f"{x:g} {y:g}" for x, y in points), colour, arrow=True)

    def folder(self, x: float, y: float, w: float, h: float, name: str) -> None:
        """Draw a folder with its name: trained parts as files."""
        tab = f"M{x:g} {y + 20:g} v-26 a6 6 0 0 1 6 -6 h34 a6 6 0 0 1 5 3 l7 9"
        self.path(tab, "trained-edge")
        self.box(x, y, w, h, "trained", radius=6)
        self.text(x + 12, y + 24, name, size=15, mono=True, bold=True, colour="trained-ink")

    def mark(self, x: float, y: float, good: bool) -> None:
        """Draw a tick or a cross."""
        tick, cross = "M-6 0 L-2 5 L6 -5", "M-5 -5 L5 5 M5 -5 L-5 5"
        colour = "trained-edge" if good else "no"
        data = tick if good else cross
        self.elements.append(f'<g transform="translate({x:g} {y:g})">')
        self.path(data, colour, width=2.5)
        self.elements.append("</g>")

    def svg(self, theme: dict[str, str]) -> str:
        """Return the picture in the colours of a theme."""
        arrows = "".join(
            f'<marker id="{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{{{c}}}"/></marker>'
            for c in ("line", "trained-edge", "second-edge")
        )
        height = round(self.height * SHOWN / WIDTH)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{SHOWN}" height="{height}" font-family="{_SANS}" role="img">'
        )
        lines = [f"<title>{escape(self.title)}</title>", f"<defs>{arrows}</defs>", *self.elements]
        text = "\n".join([head, *lines, "</svg>"]) + "\n"
        for name in sorted(theme, key=len, reverse=True):
            text = text.replace(f"{{{name}}}", theme[name])
        return text


def method_at_a_site() -> Drawing:
    """A LoRA and a bottleneck adapter in a layer of a frozen model, and the file they become."""
    d = Drawing(424, "Small trained modules at sites of a frozen model, saved as a small folder")
    d.snow(21, 16.5, 7)
    d.text(34, 22, "your model, frozen", size=16, bold=True)
    d.text(379, 104, "trained, saved", size=16, bold=True, colour="trained-edge", anchor="middle")
    for shift in (12, 6, 0):
        d.box(12 + shift, 46 - shift, 258, 300, "panel", radius=10)
    d.text(256, 64, "layer", size=13, colour="muted", anchor="end")
    for x, role, name in ((26, "q", "query"), (106, "k", "key"), (186, "v", "value")):
        d.text(x + 35, 84, f"attn.{role}", size=12.5, mono=True, colour="muted", anchor="middle")
        d.box(x, 91, 70, 34, "frozen", name, snow=True, size=13.5)
        below = 160 if role != "k" else 125
        if role != "k":
            d.box(x, 128, 70, 30, "trained", "LoRA")
        d.arrow((x + 35, below), (x + 35, 182))
    d.box(26, 184, 230, 34, "frozen", "attention", snow=True)
    d.arrow((141, 219), (141, 241))
    d.box(26, 243, 230, 34, "frozen", "feed-forward", snow=True)
    d.text(44, 300, "ffn", size=12.5, mono=True, colour="muted")
    d.box(76, 280, 180, 30, "trained", "bottleneck adapter")
    d.arrow((141, 311), (141, 366))
    d.box(86, 368, 110, 34, "trained", "task head")
    saves = "trained-edge"
    for data in (
        "M257 143 C 290 143, 275 186, 310 186",
        "M257 295 C 288 295, 280 216, 310 216",
        "M197 385 C 290 385, 270 246, 310 246",
    ):
        d.path(data, saves, dashed=True, arrow=True)
    d.folder(312, 140, 134, 196, "adapter/")
    d.lines(324, 190, "tensors|task head|labels|options|identity of|the model", step=21)
    d.text(324, 322, "319 kB", size=16, bold=True, colour="trained-ink")
    d.text(379, 358, "for a 91 MB model,", size=13, colour="muted", anchor="middle")
    d.text(379, 375, "here with LoRA alone", size=13, colour="muted", anchor="middle")
    return d


def anatomy() -> Drawing:
    """One name for a place, whatever its module is called."""
    d = Drawing(318, "The same sites in BERT, T5 and GPT-2, whose modules have other names")
    roles = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down")
    left, step, width = 12, 73, 68
    d.text(12, 20, "lora: attn.q, attn.v", size=14, bold=True, mono=True, colour="trained-edge")
    for column in (0, 2):
        d.box(left - 4 + column * step, 32, width + 8, 276, "trained", radius=8)
    for column, role in enumerate(roles):
        d.text(
            left + column * step + width / 2, 52, role, size=13, mono=True, anchor="middle",
            colour="trained-ink" if column in (0, 2) else "muted", bold=column in (0, 2),
        )  # fmt: skip
    rows = {
        "BERT": ("query", "key", "value", "dense", "dense", "dense"),
        "T5": ("q", "k", "v", "o", "wi", "wo"),
        "GPT-2": ("c_attn", "c_proj", "c_fc", "c_proj"),
    }
    for row, (name, modules) in enumerate(rows.items()):
        y = 78 + row * 84
        d.text(left + 3, y + 2, name, size=14, bold=True)
        column = 0
        for module in modules:
            span = 3 if module == "c_attn" else 1
            x = left + column * step
            d.box(x, y + 10, width + (span - 1) * step, 38, "frozen", module, mono=True, size=13)
            column += span
    y = 78 + 2 * 84
    for column in (1, 2):
        x = left + column * step - 2.5
        d.path(f"M{x:g} {y + 10:g} v38", "line", dashed=True)
    return d


def slots() -> Drawing:
    """A host before and after attach: one child module and one hook."""
    d = Drawing(336, "A host gets one child module and a hook; its class and its keys stay")
    d.text(60, 24, "before", size=15, bold=True, anchor="middle")
    d.text(206, 24, "attached", size=15, bold=True, anchor="middle")
    for middle in (60, 206):
        d.text(middle, 60, "x", size=15, mono=True, anchor="middle")
        d.arrow((middle, 67), (middle, 88))
        d.box(middle - 50, 90, 100, 40, "frozen", "query", mono=True, snow=True)
    d.arrow((60, 131), (60, 290))
    d.text(60, 310, "y", size=15, mono=True, anchor="middle")
    d.arrow((206, 131), (206, 157))
    d.text(216, 149, "y", size=15, mono=True)
    d.path("M206 74 H 274 V 200", "line", dashed=True)
    d.arrow((274, 190), (274, 197), (268, 197))
    d.box(136, 159, 150, 100, "panel", radius=8, dashed=True)
    d.text(146, 177, "slot", size=13, colour="muted")
    d.box(146, 184, 118, 30, "trained", "polite")
    d.box(146, 220, 118, 30, "second", "urgent")
    d.arrow((206, 260), (206, 290))
    d.text(206, 310, "y'", size=15, mono=True, anchor="middle")
    notes = (
        (98, "the host is called,", "never replaced"),
        (150, "a forward hook", "calls the slot"),
        (202, "active: changes y", ""),
        (238, "waits, not active", ""),
    )
    for y, first, second in notes:
        d.text(306, y, first, size=14)
        d.text(306, y + 17, second, size=14)
    d.path("M260 110 H 300 M288 200 H 300 M288 235 H 300", "line")
    return d


def routes() -> Drawing:
    """The rows of a batch at one site: sorted, sliced, put back."""
    d = Drawing(292, "Rows of one batch go through their own adapters and keep their order")
    names = ("polite", "urgent", "polite", "None")
    kinds = ("trained", "second", "trained", "frozen")
    for x, words in ((46, "batch"), (143, "host"), (267, "slot"), (410, "output")):
        d.text(x, 22, words, size=15, bold=True, anchor="middle")
    for row, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        y = 42 + row * 56
        d.box(10, y, 72, 38, kind, name, size=13.5)
        d.box(374, y, 76, 38, kind, f"row {row}", size=13.5)
        d.arrow((83, y + 19), (108, y + 19))
    d.box(110, 42, 66, 206, "frozen")
    d.text(143, 138, "query", size=14, mono=True, anchor="middle")
    d.snow(143, 158, 7)
    groups = (("polite", "trained", (0, 2), 42, 94), ("urgent", "second", (1,), 154, 38))
    for name, kind, rows, top, height in (*groups, ("as it is", "frozen", (3,), 210, 38)):
        d.box(216, top, 102, height, kind, name)
        for i, row in enumerate(rows):
            y, at = 61 + row * 56, top + 19 + i * 56
            edge = {"trained": "trained-edge", "second": "second-edge"}.get(kind, "line")
            d.path(f"M177 {y} C 197 {y}, 197 {at}, 214 {at}", edge, arrow=True)
            d.path(f"M319 {at} C 345 {at}, 345 {y}, 372 {y}", edge, arrow=True)
    d.text(143, 272, "all rows at once", size=13, colour="muted", anchor="middle")
    d.text(267, 272, "a slice for each", size=13, colour="muted", anchor="middle")
    d.text(410, 272, "in their order", size=13, colour="muted", anchor="middle")
    return d


def identity() -> Drawing:
    """Which backbones an adapter accepts."""
    d = Drawing(318, "An adapter accepts its own backbone in every form, and refuses others")
    d.folder(14, 64, 142, 214, "adapter/")
    d.lines(26, 112, "trained on||weights|configuration|tokenizer||sha256 of its|own tensors")
    d.text(26, 132, "v2-4fc049e6…", size=13, mono=True, colour="trained-ink")
    cases = (
        (True, "the same checkpoint"),
        (True, "its bf16 or fp16 copy"),
        (True, "loaded in nf4 or int8"),
        (True, "with another task head"),
        (False, "one value changed"),
        (False, "another configuration"),
        (False, "another tokenizer"),
        (False, "an edited adapter file"),
    )
    for i, (good, words) in enumerate(cases):
        y = 30 + 35 * i + (12 if not good else 0)
        d.box(204, y - 13, 244, 28, "trained" if i == 7 else "frozen", words, snow=i < 7)
        d.mark(182, y + 1, good)
    return d


def training() -> Drawing:
    """The stages of a run, and the files that each writes."""
    d = Drawing(388, "From a recipe to an adapter folder, and which stage writes which file")
    stages = (
        ("recipe", "frozen", "options, checked first"),
        ("data", "frozen", "rows, a part held out"),
        ("backbone", "frozen", "loaded, frozen"),
        ("attach", "trained", "modules at sites"),
        ("loop", "trained", "steps, evaluations"),
        ("adapter", "trained", ""),
    )
    d.text(12, 22, "adapterhub train", size=14, mono=True, bold=True)
    for i, (name, kind, words) in enumerate(stages):
        y = 40 + 58 * i
        d.box(12, y, 96, 36, kind, name, snow=name == "backbone")
        if words:
            d.text(118, y + 23, words, size=13, colour="muted")
        if i:
            d.arrow((60, y - 21), (60, y - 2))
    for i, words in enumerate(("nothing is written", "until all of this", "has been checked")):
        d.text(372, 92 + 19 * i, words, size=13, colour="muted", anchor="middle")
    d.path("M268 46 h8 q6 0 6 6 v192 q0 6 -6 6 h-8 M282 112 h10", "line")
    d.folder(296, 216, 152, 164, "mine/")
    lines = ("recipe.yaml", "metrics.jsonl", "checkpoints/", "report.html", "adapter/")
    for i, line in enumerate(lines):
        last = line == "adapter/"
        y = 266 + 22 * i + (10 if last else 0)
        d.text(308, y, line, size=13.5, mono=True, bold=last, colour="trained-ink")
    d.path("M109 348 H 240 C 275 348, 270 360, 294 360", "trained-edge", dashed=True, arrow=True)
    return d


PICTURES: Sequence[Callable[[], Drawing]] = (
    method_at_a_site, anatomy, slots, routes, identity, training,
)  # fmt: skip


def files() -> dict[str, str]:
    """Return the files under docs/assets, by name."""
    found = {}
    for picture in PICTURES:
        name, drawing = picture.__name__.replace("_", "-"), picture()
        found[f"{name}.svg"] = drawing.svg(_LIGHT)
        found[f"{name}-dark.svg"] = drawing.svg(_DARK)
    return found


if __name__ == "__main__":
    for name, text in files().items():
        (ASSETS / name).write_text(text, encoding="utf-8")
