"""report.html: one file without network and scripts, and the files of a run that it shows."""

from __future__ import annotations

import html.parser

import pytest

from adapterhub.errors import FileError
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.figures import ChartGroup
from adapterhub.pages.page import (
    framed_page,
    lower_is_better,
    number_text,
    page_html,
    read_run,
    submapping,
    write_page,
)
from adapterhub.pages.row_scores import KINDS
from tests.kit.runs import predictions, run_folder
from tests.kit.selection import cases_of

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(html.parser.HTMLParser):
    """Collects tags and attributes, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            self.links += [value] if name in ("href", "src", "xlink:href") else []
            self.ids += [value] if name == "id" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


OF_RUNS = [*KINDS, None]


@pytest.mark.parametrize("kind", OF_RUNS)
def test_a_page_is_one_file_that_loads_nothing(kind, tmp_path):
    folder = run_folder(tmp_path, predictions(kind) if kind else None)
    page = write_page(folder).read_text(encoding="utf-8")
    seen = outline(page)
    images = {"img"} if kind == "images" else set()  # inside the file, by data:
    others = {"script", "link", "img", "iframe", "object", "embed", "form"} - images
    assert not seen.tags & others
    assert page.count("<img") == page.count('src="data:image/png;base64,')
    assert all(link.startswith(("#", "data:image/png")) for link in seen.links)
    assert "default-src 'none'" in page
    assert "url(http" not in page
    examples = "images" if images else "worst" if kind else "predictions"
    assert {"curves", "speed", "facts", examples} <= set(seen.ids)
    if kind in cases_of(OF_RUNS):
        assert page == page_html(read_run(folder)), "it is drawn again"


def test_a_page_of_a_run_that_goes_on_reloads_itself(tmp_path):
    run = read_run(run_folder(tmp_path))
    assert 'http-equiv="refresh"' in page_html(run, live=True)
    assert "this is step 4" in page_html(run, live=True)
    assert 'http-equiv="refresh"' not in page_html(run)


def test_the_most_frequent_class_is_shown_beside_the_accuracy(tmp_path):
    page = page_html(read_run(run_folder(tmp_path, predictions("classes"))))
    assert "always &#39;neg&#39;: 0.500" in page


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.3456, "12.35"), (None, "-"), (12345.6, "12,345.60")]
)
def test_numbers(value, text):
    assert number_text(value) == text


def test_a_table_is_in_the_page_with_its_numbers():
    rows = [("a<b", TableCell("1,000", 1000.0), TableCell("-"))]
    table = ShownTable(("name", "n", "m"), rows, meanings=("", "a number", ""), taken=[0])
    page = framed_page("runs.html", name="<x>", subtitle="", table=table, note="", groups=[],
                       facts=[("a", "b")])  # fmt: skip
    assert '<th scope="row"><bdi>a&lt;b</bdi></th><td data-value="1000.0">' in page
    assert '<td data-value=""><bdi>-</bdi></td>' in page
    assert "&lt;x&gt;" in page
    assert page.count("<script>") == 1
    assert "<dt><bdi>a</bdi></dt>" in page


def test_a_group_without_charts_is_only_a_title():
    group = ChartGroup("Speed", "a note", [])
    page = framed_page("runs.html", name="x", subtitle="", table=ShownTable([], []), note="",
                       groups=[group], facts=[])  # fmt: skip
    assert "Speed" in page
    assert "<figure>" not in page


def test_a_run_without_an_adapter_is_read(tmp_path):
    run = read_run(run_folder(tmp_path / "mine", predictions("classes")))
    assert (run.name, run.manifest, run.trained, run.size) == ("mine", None, 0, 0)
    assert run.metrics == pytest.approx({"accuracy": 0.4, "loss": 0.25})
    assert run.best == run.evaluations[-1]
    assert run.main_metric == "accuracy"
    assert run.predictions == predictions("classes")


def test_the_main_metric_is_that_of_the_recipe(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "recipe.yaml").write_text("task: regression\n")
    assert read_run(folder).main_metric == "pearson"
    (folder / "recipe.yaml").write_text("task: regression\ntrain: {best_metric: mse}\n")
    assert read_run(folder).main_metric == "mse"
    (folder / "recipe.yaml").write_text("{}\n")
    assert read_run(run_folder(tmp_path, predictions("losses"))).main_metric == "loss"
    (folder / "predictions.jsonl").unlink()
    (folder / "recipe.yaml").write_text("task: of the future\n")
    assert read_run(folder).main_metric == "accuracy"


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileError, match="no run in"):
        read_run(tmp_path)


def test_a_last_line_that_was_cut_is_left_out(tmp_path):
    folder = run_folder(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    assert len(read_run(folder).training) == 2


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"event": "train"}', '{"event": "x", "step": 1}',
     '{"event": "train", "step": "1"}', '{"event": "eval", "step": 1, "metrics": {"a": "b"}}',
     '{"event": "eval", "step": 1, "metrics": [1]}'],
)  # fmt: skip
def test_a_broken_line_is_named(line, tmp_path):
    path = run_folder(tmp_path) / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(FileError, match=r"metrics\.jsonl, line 1 is broken"):
        read_run(tmp_path)


def test_small_helpers():
    for name, lower in (("loss", True), ("eval_mse", True), ("accuracy", False)):
        assert lower_is_better(name) is lower
    assert [submapping({"a": {"b": 1}, "c": 2}, key) for key in "ac"] == [{"b": 1}, {}]
