"""Texts of strangers in report.html and in a card: none becomes markup, an address or a formula.

Every text of a run folder or a manifest is replaced by hostile ones. The page must have the same
elements and attributes as a page with harmless texts, and show the hostile ones as text. The card
has, by a Markdown parser, the same blocks and metadata, and only the HTML that adapterhub writes.
"""

import ast
import html.parser
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forge import harmless_text
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adapterhub.bench.baselines import Constant
from adapterhub.bench.report import study_page
from adapterhub.bench.results import TaskResult, study_results
from adapterhub.bench.study import Study, read_study
from adapterhub.errors import printable
from adapterhub.files.card import InPeft, card, export_card, split_card
from adapterhub.files.manifest import BackboneRef, Manifest, to_json
from adapterhub.pages.comparison import runs_page
from adapterhub.pages.page import RunFiles, page_html, read_run
from adapterhub.pages.row_scores import KINDS, PredictionFile
from adapterhub.registry.hub_writer import hub_card
from adapterhub.registry.version_files import entry_of
from tests.kit.registries import CLASSIFIER, IDENTITY
from tests.kit.runs import ROWS, predictions, run_folder
from tests.kit.selection import ALL, long_table
from tests.kit.studies import made_records

pytestmark = pytest.mark.usefixtures("charts")

MARKUP = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "'\"><svg onload=alert(1)>",
    "</style><style>*{background:url(http://x)}", "</svg></bdi></main><iframe src=//x>",
    "--></title><meta http-equiv=refresh content=0;url=//x>", "$\\frac{1}{2$ \\input{x}",
    "{{ 7 * 7 }}{% include 'x' %}", "&lt;script&gt; &#60;b&#62;", "]]><!--",
    "\x1b]0;owned\x07\u202egpj.exe\u200b\x00", "javascript:alert(1)", '#010203 url(#x) href="#y"',
)  # fmt: skip
STUDY = read_study(
    None, (), {"backbone": "x", "data": {"train": "mine.tsv"}}, {"methods": ("head", "lora", "mam")}
)
DRAWN = {"g", "path", "use", "defs", "clippath", "rect", "text", "style", "svg"}


class Elements(html.parser.HTMLParser):
    """Lists the elements of a page with their attributes' names, and its texts.

    Those of charts depend on the lengths of names; they must be shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.text = ""
        self.in_chart = False

    def handle_endtag(self, tag) -> None:
        self.in_chart &= tag != "svg"

    def handle_starttag(self, tag, attrs) -> None:
        names = [name for name, _ in attrs]
        assert not [name for name in names if name.startswith("on")]
        if self.in_chart:
            assert tag in DRAWN, tag
        else:
            self.elements.append((tag, *names))
        self.in_chart |= tag == "svg"
        for name, value in attrs:
            if name == "style":
                assert "http" not in value
                assert "url(" not in value.replace("url(#", "")

    def handle_data(self, data) -> None:
        self.text += data


def hostile_predictions(kind: str, text: str) -> PredictionFile:
    """Put a text in every field of predictions that holds one."""
    rows = []
    for row in ROWS[kind]:
        # A picture with anything else is refused when it is read.
        texts = {n for n, v in row.items() if isinstance(v, str)} - {"picture"}
        changed = {n: f"{v}{text}" if n in texts else v for n, v in row.items()}
        for name in ("label", "prediction"):
            if isinstance(row.get(name), list):
                changed[name] = [
                    f"{one}{text}" if isinstance(one, str) else [f"{one[0]}{text}", *one[1:]]
                    for one in row[name]
                ]
        rows.append({**changed, "texts": [text, f"x{text}"]})
    file = predictions(kind, rows)
    return replace(file, labels=tuple(f"{name}{text}" for name in file.labels), task=text)


def hostile_run(folder: Path, kind: str, text: str) -> RunFiles:
    """Make a run whose texts all are, or contain, a hostile one."""
    run = read_run(
        run_folder(folder, hostile_predictions(kind, text), metric=f"m{text}", rate=f"r{text}")
    )
    manifest = Manifest(
        name=f"n{text}",
        methods=({f"lora{text}": {f"o{text}": text}},),
        backbone=BackboneRef(f"b{text}", None, f"f{text}", "bert", identity=IDENTITY),
        labels=(f"l{text}",),
        metrics={f"m{text}": 0.5},
        versions={f"v{text}": text},
        training={
            "recipe": {
                "task": {f"t{text}": {"x": text}},
                "method": [{f"lora{text}": {f"o{text}": text}}],
                "train": {"batch_size": text, "schedule": text, "max_length": text},
                "seed": text,
            },
            "data": {"sha256": text},
        },
    )  # fmt: skip
    return replace(run, manifest=manifest)


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    parser.close()
    return parser


def hostile_study(text: str) -> tuple[Study, tuple[TaskResult, ...]]:
    """Make a study whose names, errors and origins all contain a hostile text."""
    record = made_records(STUDY, {"head": 0.6, "lora": 0.9, "mam": float("nan")})
    named = {"head": f"head{text}", "lora": f"lora{text}", "mam": f"mam{text}"}
    records = [
        replace(
            each,
            cell=replace(each.cell, method=named[each.cell.method], task=f"t{text}"),
            error=f"e{text}" if each.error else "",
            origin={"data": {"train": text, "test": text}, "backbone": text, "device": text,
                    "recipe": {"dtype": text}, "versions": {text: text}},
        )
        for each in record
    ]  # fmt: skip
    recipe = replace(STUDY.recipe, backbone=text, output=f"out/{text}")
    bench = replace(
        STUDY.bench, methods=tuple(named.values()), baseline=named["lora"], tasks={f"t{text}": {}}
    )
    study = Study(recipe, bench)
    constants = {f"t{text}": Constant(f"c{text}", "classes", "pos", 0.6)}
    return study, study_results(study, records, constants)


def without_charts(folder: Path, text: str) -> RunFiles:
    return replace(hostile_run(folder, "classes", text), training=[], evaluations=[], timings=[])


# By name: a page of which all texts are hostile, made in a folder.
PAGES: dict[str, Callable[[Path, str], str]] = {
    **{
        kind: lambda folder, text, kind=kind: page_html(hostile_run(folder, kind, text))
        for kind in KINDS
    },
    "no charts": lambda folder, text: page_html(without_charts(folder, text)),
    "several runs": lambda folder, text: runs_page(
        [hostile_run(folder / n, "classes", text) for n in "12"]
    ),
    "a study": lambda _, text: study_page(*hostile_study(text), {(f"t{text}", 100): text}),
}


@long_table(
    ("page", "text"),
    [
        *((page, "".join(MARKUP)) for page in PAGES),
        *(("no charts", text) for text in (*MARKUP, "\ud800")),
    ],
    8,
    nightly=2,
)
def test_a_page_has_the_same_elements_whatever_the_texts_are(page, text, tmp_path) -> None:
    # As long as the hostile one, since long texts are folded.
    plain = elements(PAGES[page](tmp_path / "a", "x" * len(printable(text))))
    made = PAGES[page](tmp_path / "b", text)
    found = elements(made)
    assert found.elements == plain.elements
    assert len(found.elements) > 60
    assert harmless_text(made)
    assert made.count("<script>") == (page == "a study") or page != "a study"
    made.encode()
    if page in KINDS:
        for shown in ("alert(1)</script>", "{{ 7 * 7 }}", "\\u202egpj.exe"):
            assert shown in found.text


def test_numbers_out_of_range_make_a_page(tmp_path) -> None:
    huge = [{"label": 1e308, "prediction": -1e308}, {"label": 0.0, "prediction": 5e-324}]
    for kind, rows in {
        "numbers": huge,
        "losses": [{"loss": 1e308, "tokens": 10**30}, {"loss": -1.0, "tokens": -1}],
    }.items():
        run = read_run(run_folder(tmp_path / kind, predictions(kind, rows)))
        assert elements(page_html(run)).elements


def test_a_stranger_s_lines_are_broken_files_and_no_crash(tmp_path) -> None:
    folder = run_folder(tmp_path)
    for value in ("NaN", "1e999", "null"):
        line = json.dumps({"event": "train", "step": 1, "epoch": 1, "loss": 0})
        (folder / "metrics.jsonl").write_text(line.replace('"loss": 0', f'"loss": {value}') + "\n")
        assert page_html(read_run(folder))


# Cards


HARMLESS = replace(
    CLASSIFIER,
    training={"recipe": {"note": "plain"}, "seed": 3, "steps": 9, "data": {"train": 1, "eval": 2}},
    versions={"torch": "2.6.0"},
    description="plain",
    license="mit",
    language=("en",),
    tags=("t",),
)
MARKS = (
    *MARKUP, "```\n<script>\n```", "  ```\n# x", "a\n---\nb: c", "---\nlicense: gpl\n---\n",
    "<!-- /adapterhub -->\n# x", "<!-- adapterhub -->", "a | b | c\n|---|---|", "<https://evil>",
    "[x](javascript:alert(1))", "![x](https://x/y.png)", "[x]: https://evil\n\n[x]", "# heading",
    "1. a\n2. b", "- a\n- b", "> quote", "\tcode", "    code", "a\n===", "***", "~~~\nx",
    "a  \nb", "\\<b>", "\\`a`", "**b** _c_ __d__", "</details>", "<![CDATA[x]]>", "<?php ?>",
    "`", "``", "````", "%0a", "'''\"\"\"", "'); import os; ('", "\x1b[2J\x85\u2028", "&a *a",
    "a: b", "!!python/object:x", "@x #y", "\\", "\\|", "https://evil.example/x", "<b", "<!-- x",
    "www.evil.example", "\n\n\n", " ",
)  # fmt: skip
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False, "html": True})


def shape(text: str) -> list[tuple[str, str, str]]:
    """Return the blocks and inline elements of a card, without the values of texts and code."""
    _, body = split_card(text)
    tokens = [t for block in MARKDOWN.parse(body) for t in (block, *(block.children or ()))]
    kept = ("html_block", "html_inline")
    return [
        (t.type, t.tag, t.content if t.type in kept else str(sorted(t.attrs.items())))
        for t in tokens if t.type not in ("text", "softbreak", "text_special")
    ]  # fmt: skip


def planted(text: str) -> Manifest:
    """Put `text` into each field that has a free text."""
    return replace(
        HARMLESS,
        labels=(text, "yes"),
        description=text[:2000] or "x",
        training={
            "recipe": {"note": text, f"k{text}": [text, {text: text}]},
            "seed": text, "steps": [text],
            "data": {"train": text, "eval": {"a": text}, "sha256": text},
        },
    )  # fmt: skip


def same_shape(text: str) -> None:
    manifest = planted(text)
    peft = InPeft("classification", (text,))
    for reference in ("hf:me/polite", "THIS FOLDER"):
        made = card(manifest, reference=reference, peft=peft)
        harmless = card(
            planted("plain"), reference=reference, peft=InPeft("classification", ("p",))
        )
        assert shape(made) == shape(harmless), made
        front = metadata_of(made)
        assert front == metadata_of(harmless)
        assert card(manifest, made, reference=reference, peft=peft) == made, "not idempotent"
        assert printable(made) == made
        (block,) = [t for t in MARKDOWN.parse(split_card(made)[1]) if t.info == "python"]
        calls = [n for n in ast.walk(ast.parse(block.content)) if isinstance(n, ast.keyword)]
        (labels,) = [ast.literal_eval(k.value) for k in calls if k.arg == "labels"]
        assert labels == [text, "yes"]
        (code,) = [t for t in MARKDOWN.parse(split_card(made)[1]) if t.info == "yaml"]
        assert yaml.safe_load(code.content)["note"] == text


pieces = st.sampled_from([*MARKS, "\n", " ", "a", "_", "*", "<", ">", "`", "|", "-", "#", "\\"])
texts = st.one_of(st.lists(pieces, max_size=6).map("".join), st.text(max_size=40))


@settings(max_examples=25 if ALL else 10)
@given(texts)
@example("a_b*c`d")
@example("=")
@example("no")
@example("12:30")
def test_no_text_changes_a_block_of_a_card(text) -> None:
    same_shape(text)


@settings(max_examples=25 if ALL else 10)
@given(st.lists(texts, min_size=1, max_size=3, unique=True), st.sampled_from(MARKS))
def test_an_exported_card_is_inert(labels, name) -> None:
    plain = [f"l{i}" for i in range(len(labels))]
    assert shape(export_card(name, ["lora"], labels)) == shape(export_card("n", ["lora"], plain))


def metadata_of(text: str) -> Any:
    block = REGEX_YAML_BLOCK.search(text)
    assert block
    assert yaml.safe_load(block[2]) == split_card(text)[0], "the Hub reads it as adapterhub does"
    return yaml.safe_load(block[2])


@long_table("text", MARKS, ids=ascii)
def test_a_hostile_text_changes_no_block_of_a_card_nor_its_metadata(text) -> None:
    same_shape(text)
    manifest = replace(planted(text), files={"adapter.safetensors": "0" * 64})
    entry = entry_of(to_json(manifest), reference="hf:me/polite@v1", name="me/polite", version="v1")
    made = hub_card(card(manifest, reference="hf:me/polite").encode(), entry).decode()
    front = metadata_of(made)
    assert front["adapterhub"]["description"] == manifest.description
    assert front["adapterhub"]["digest"] == entry.digest
    assert front["license"] == "mit"
    assert shape(made) == shape(card(planted("plain"), reference="hf:me/polite"))
