"""report.html: one file without network and scripts, of a run or of several, and what it shows."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages import comparison
from adapterhub.pages import page as run_page
from adapterhub.pages.figures import ChartGroup
from adapterhub.pages.page import page_html, read_run
from adapterhub.pages.row_scores import KINDS
from tests.kit.runs import predictions, run_folder
from tests.kit.selection import cases_of
from tests.kit.web_servers import ParsedPage

OF_RUNS = [*KINDS, None]


@pytest.mark.parametrize("kind", OF_RUNS)
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
    if kind in cases_of(OF_RUNS):
        assert page == page_html(read_run(folder)), "it is drawn again"


def test_a_page_of_a_run_that_goes_on_reloads_itself(tmp_path):
    run = read_run(run_folder(tmp_path))
    assert 'http-equiv="refresh"' in page_html(run, live=True)
    assert "this is step 4" in page_html(run, live=True)
    assert 'http-equiv="refresh"' not in page_html(run)


def test_a_table_is_in_the_page_with_its_numbers():
    rows = [("a<b", TableCell("1,000", 1000.0), TableCell("-"))]
    table = ShownTable(("name", "n", "m"), rows, meanings=("", "a number", ""), taken=[0])
    group = ChartGroup("Speed", "a note", [])  # without charts only a title
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
