"""report.html: one file without network and scripts, of a run or of several, and what it shows."""

import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages import comparison, figures
from adapterhub.pages import page as run_page
from adapterhub.pages.figures import histogram_chart, line_chart, prediction_sections, scatter_chart
from adapterhub.pages.page import page_html, read_run
from adapterhub.pages.row_scores import KINDS, calibration
from tests.kit.runs import ROWS, predictions, run_folder
from tests.kit.selection import long_table
from tests.kit.web_servers import ParsedPage

OF_RUNS = [*KINDS, None]


@long_table("kind", OF_RUNS, parts=3)
def test_a_page_is_one_file_that_loads_nothing(kind, tmp_path):
    folder = run_folder(tmp_path, predictions(kind) if kind else None)
    page = run_page.write_page(folder).read_text(encoding="utf-8")
    seen = ParsedPage(page)
    images = {"img"} if kind == "images" else set()  # inside the file, by data:
    others = {"script", "link", "img", "iframe", "object", "embed", "form"} - images
    assert not {tag for tag, _ in seen.elements} & others
    assert page.count("<img") == page.count('src="data:image/png;base64,')
    links = seen.values("href", "src", "xlink:href")
    assert all(link.startswith(("#", "data:image/png")) for link in links)
    assert "default-src 'none'" in page
    assert "url(http" not in page
    examples = "images" if images else "worst" if kind else "predictions"
    assert {"curves", "speed", "facts", examples} <= {*seen.values("id")}
    if kind == OF_RUNS[0]:
        assert page == page_html(read_run(folder)), "it is drawn again"


def test_a_page_of_a_run_that_goes_on_reloads_itself(tmp_path):
    run = read_run(run_folder(tmp_path))
    assert 'http-equiv="refresh"' in page_html(run, live=True)
    assert "this is step 4" in page_html(run, live=True)
    assert 'http-equiv="refresh"' not in page_html(run)


def test_a_table_is_in_the_page_with_its_numbers():
    rows = [("a<b", TableCell("1,000", 1000.0), TableCell("-"))]
    table = ShownTable(("name", "n", "m"), rows, meanings=("", "a number", ""), taken=[0])
    group = figures.ChartGroup("Speed", "a note", [])  # without charts only a title
    texts = {"name": "<x>", "subtitle": "", "note": "", "facts": [("a", "b")]}
    page = run_page.framed_page("runs.html", table=table, groups=[group], **texts)
    assert "Speed" in page
    assert "<figure>" not in page
    numbers = [run_page.number_text(value) for value in (0.12345, 12.3456, None, 12345.6)]
    assert numbers == ["0.123", "12.35", "-", "12,345.60"]
    assert '<th scope="row"><bdi>a&lt;b</bdi></th><td data-value="1000.0">' in page
    assert '<td data-value=""><bdi>-</bdi></td>' in page
    assert "&lt;x&gt;" in page
    assert page.count("<script>") == 1
    assert "<dt><bdi>a</bdi></dt>" in page


def test_a_run_without_an_adapter_is_read(tmp_path):
    run = read_run(run_folder(tmp_path / "mine", predictions("classes")))
    assert (run.name, run.manifest, run.trained, run.size) == ("mine", None, 0, 0)
    assert run.metrics == pytest.approx({"accuracy": 0.4, "loss": 0.25})
    assert run.best == run.evaluations[-1]
    assert run.main_metric == "accuracy"
    assert run.predictions == predictions("classes")
    assert "always &#39;neg&#39;: 0.500" in page_html(run)  # the most frequent class
    with (tmp_path / "mine" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')  # a last line that was cut is left out
    assert len(read_run(tmp_path / "mine").training) == 2
    with pytest.raises(FileError, match="no run in"):
        read_run(tmp_path)


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
    lower = [run_page.lower_is_better(name) for name in ("loss", "eval_mse", "accuracy")]
    assert lower == [True, True, False]


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


# Several runs: different evaluation data are refused


def test_the_same_data_compare_and_others_do_not(tmp_path):
    same, other = predictions("classes"), predictions("classes", data="other")
    files = {"a": same, "b": same, "c": other, "d": None}
    runs = [read_run(run_folder(tmp_path / name, file)) for name, file in files.items()]
    comparison.check_comparable([runs[0], runs[1], runs[3]], ["a", "b", "d"])
    assert [i for i, _ in comparison.pairwise([runs[0], runs[1], runs[3]])] == [1]
    assert comparison.pairwise([runs[3], runs[0]]) == []
    with pytest.raises(ConfigError, match="evaluated on different data") as error:
        comparison.check_comparable(runs[:3], ["a", "b", "c"])
    assert len(error.value.offenders) == 3
    assert "different data" in comparison.runs_page(runs[:3])
    assert "different data" not in comparison.runs_page(runs[:2])


def test_runs_are_named_by_their_folders_and_overlaid(tmp_path):
    folders = [run_folder(tmp_path / name) for name in ("a/one", "a/two", "b/two")]
    path = comparison.write_runs_page(folders)
    page = path.read_text()
    assert path == tmp_path / comparison.RUNS_PAGE
    for name in ("one", "a/two", "b/two"):
        assert f'<th scope="row"><bdi>{name}</bdi></th>' in page
    for title in ("Training loss", "Evaluation: accuracy", "Evaluation: loss", "Learning rate",
                  "Examples per second", "Peak memory so far, GB"):  # fmt: skip
        assert title in page
    assert page.count("<svg") == 6
    assert "lower is better" in page


# Charts and sections of a page: valid SVG of its colours, and what each kind has.


POINTS = [(i, 1 / i if i != 3 else None) for i in range(1, 6)]
CHARTS = {
    "line": lambda: line_chart({"loss": POINTS}, "step", best=4),
    "lines": lambda: line_chart({"a": POINTS, "b": POINTS}, "step", span=3.0, zero=True),
    "one point": lambda: line_chart({"a": POINTS[:1]}, "step", best=1),
    "no value": lambda: line_chart({"a": [(1, None)]}, "step", log=True),
    "logarithmic": lambda: line_chart({"a": [(1, 1e5), (2, 10.0), (3, 1.0)]}, "step", log=True),
    "many": lambda: line_chart({"a": [(i, i % 7) for i in range(100_000)]}, "step"),
    "reliability": lambda: figures.reliability_chart(calibration(ROWS["classes"])[0]),
    "scatter": lambda: scatter_chart([1.0, 2.0], [2.0, 2.0]),
    "many dots": lambda: scatter_chart([float(i) for i in range(9000)], [1.0] * 9000),
    "histogram": lambda: histogram_chart([1.0, 2.0, 2.0], "x", centre=0.0),
    "equal values": lambda: histogram_chart([1.0] * 5, "x"),
    "almost equal": lambda: histogram_chart([0.6931471, 0.6931471000000001], "x"),
    "huge values": lambda: histogram_chart([1e308], "x"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_small_themed_and_the_same_each_time(name):
    """And drawing changes no settings."""
    before = dict(matplotlib.rcParams)
    svg = CHARTS[name]()
    ElementTree.fromstring(svg)
    assert svg == CHARTS[name]()
    assert dict(matplotlib.rcParams) == before
    assert len(svg) < 70_000
    assert "var(--ink)" in svg or "var(--muted)" in svg
    assert not any(colour in svg for colour in figures.COLOURS)
    assert "<metadata" not in svg
    assert "$" not in svg
    assert "width=" not in svg.split(">", 1)[0]


SECTIONS = {
    "sets": ["scores", "worst"],
    "classes": ["confusion", "scores", "calibration", "worst"],
    "choices": ["calibration", "worst"],
    "numbers": ["residuals", "worst"],
    "spans": ["scores", "worst"],
    "texts": ["quality", "worst"],
    "losses": ["quality", "worst"],
    "images": ["quality", "images"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_sections(kind):
    sections = prediction_sections(predictions(kind))
    assert [section.id for section in sections] == SECTIONS[kind]
    assert sections[-1].examples


def test_the_most_confident_mistake_is_first():
    rows = [
        {"label": "a", "prediction": "b" if i % 2 else "a", "score": i / 100} for i in range(100)
    ]
    worst = prediction_sections(predictions("classes", rows))[-1]
    assert len(worst.examples) == figures.WORST
    assert worst.examples[0].facts[-1][1] == "0.990"
    assert worst.note.startswith("50 of 100 examples are wrong")
    right = [{"label": "a", "prediction": "a", "score": 1.0}]
    none = prediction_sections(predictions("classes", right))[-1]
    assert none.note == "There are none in 1 examples."
    assert prediction_sections(predictions("losses", [{"loss": 0.0, "tokens": 0}])) == []


def test_many_classes_have_a_list_in_place_of_a_matrix():
    rows = [
        {"label": f"c{i % 60}", "prediction": f"c{(i + i // 60) % 60}", "score": 0.5}
        for i in range(120)
    ]
    confusion, scores, *_ = prediction_sections(predictions("classes", rows))
    assert confusion.matrix is None
    assert confusion.table is not None
    assert confusion.table.rows[0][0] == "c0 → c1"
    assert "40 of 62" in scores.note


def test_entities_are_marked_in_their_text():
    spans = [["loc", 6, 9], ["per", 0, 2], ["per", 1, 3]]
    assert figures.marked_text("Al in Rome", spans, [["per", 0, 2]]) == [
        ("Al", "per", True), (" in ", "", False), ("Rom", "loc", False), ("e", "", False)
    ]  # fmt: skip


def test_names_are_text_and_not_markup_or_formulas():
    name = '</svg><script>alert(1)</script>$\\frac{1}{2$ "&'
    svg = line_chart({name: POINTS, "b": POINTS}, name)
    tree = ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert name[:30] in "".join(tree.itertext())
    assert name in "".join(tree.itertext())


def test_runs_with_different_metrics_and_gaps_make_a_page(tmp_path):
    one, other = run_folder(tmp_path / "one"), run_folder(tmp_path / "other", metric="f1")
    text = (other / "metrics.jsonl").read_text()
    gaps = re.sub(r'"loss": [\d.]+, "learning_rate"', '"loss": null, "learning_rate"', text)
    assert gaps != text
    (other / "metrics.jsonl").write_text(gaps)
    assert "Evaluation: f1" in comparison.runs_page([read_run(one), read_run(other)])


def test_lines_have_their_names_at_their_ends():
    lines = {f"run {n}": [(1, n), (2, n / 2)] for n in range(9)}
    svg = comparison.overlay_chart({**lines, "none": [(1, None)]}, "step")
    texts = set(ElementTree.fromstring(svg).itertext())
    assert set(lines) <= texts
    assert "none" not in texts


def test_a_comparison_of_another_form_is_none(tmp_path):
    for text, skipped in (("[]", None), ('{"skipped": "few"}', "few"), ('{"score": 3}', None)):
        (tmp_path / run_page.BAG_OF_WORDS).write_text(text)
        found = run_page.recorded_words(tmp_path)
        assert (found and found.skipped) == skipped
