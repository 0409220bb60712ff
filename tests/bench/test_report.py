"""report.html and report.md of a study: the recommendation first, then every method."""

import base64
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from adapterhub.bench import report, tables
from adapterhub.bench.report import study_markdown, study_page
from adapterhub.bench.tables import task_table
from adapterhub.pages.figures import COLOURS

pytestmark = pytest.mark.usefixtures("charts")
COMMANDS = {("mine", 100): "adapterhub train --method 'lora(rank=2)'"}


def test_the_recommendation_comes_first_then_the_table_then_charts(made_study, made_results):
    page = study_page(made_study, made_results, COMMANDS)
    places = [page.index(text) for text in ("Take lora", "adapterhub train --method", "<table",
                                            "Scores on the test", "Learning rates, on",
                                            "does not know")]  # fmt: skip
    assert places == sorted(places)
    assert page.count("<svg") == 1 + 3
    assert "mam: 5 of 5 runs diverged" in page
    assert page == study_page(made_study, made_results, COMMANDS)
    (row,) = re.findall(r"<tr class=taken>.*?</tr>", page)  # has the numbers that sort it
    assert f'data-value="{made_results[0].find("lora").estimate.value}"' in row
    assert 'data-value="10010"' in row
    assert 'data-value=""' in page  # of what diverged: it is sorted last
    assert "recorded by another program" not in page
    assert "3 methods · 3 learning rates and 3 seeds each" in page
    recorded = replace(made_study, bench=replace(made_study.bench, recorded=("theirs",)))
    page = study_page(recorded, made_results, {})
    assert "recorded by another program" in page
    assert "3 methods and 1 recorded" in page


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(made_study, made_results):
    page = study_page(made_study, made_results, {})
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_markdown_has_the_advice_the_command_and_the_whole_table(made_study, made_results):
    text = study_markdown(made_study, made_results, COMMANDS)
    lines = text.splitlines()
    assert lines[0] == "# mine"
    assert any(line.startswith("Take lora: accuracy") for line in lines)
    others = made_results[0].advice.reasons[1:]
    assert others
    assert sum(line.startswith("- ") for line in lines[: lines.index("```bash")]) == len(others)
    assert "```bash\nadapterhub train --method 'lora(rank=2)'\n```" in text
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert [line.split("|")[1].strip() for line in table] == [
        "method", "---", "head", "lora", "mam", "majority class",
    ]  # fmt: skip
    assert "mam: 5 of 5 runs diverged: the loss is nan" in text
    assert all(limit in text for limit in report.LIMITS)


def test_names_are_no_markup(made_study, made_results):
    name = "a|b*<img>\n# c"
    methods = tuple(replace(each, method=name) for each in made_results[0].methods)
    text = study_markdown(made_study, [replace(made_results[0], methods=methods)], {})
    assert "<img" not in text.replace("\\<img", "")
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "\n# c" not in text


def texts(svg):
    tree = ElementTree.fromstring(svg)
    assert not any(colour in svg for colour in COLOURS)
    return [text.strip() for text in tree.itertext() if text.strip()]


def test_charts_have_the_names_of_methods_and_short_numbers(made_results):
    (task,) = made_results
    found = texts(report.seeds_chart(task))
    assert {"head", "lora", "majority class", "accuracy"} <= set(found)
    assert "mam" not in found  # it has no score
    assert {"1e-4", "1e-3", "1e-2"} <= set(texts(report.rates_chart(task, "lora")))
    assert texts(report.rates_chart(task, "mam"))  # its runs diverged: crosses
    assert report.rates_chart(task, "majority class") is None
    assert report.rows_chart([task]) is None
    found = texts(report.rows_chart([task, replace(task, rows=1000)]))
    assert {"100", "1k", "lora", "head"} <= set(found)
    numbers = {300: "300", 3000: "3k", 2e6: "2M", 1e9: "1G", 0.001: "0.001", 1e-4: "1e-4"}
    assert [*map(report.count_words, numbers)] == [*numbers.values()]


# The tables: what their cells say, and what they are sorted by.


def cells(task, method):
    table = task_table(task)
    (row,) = [row for row in table.rows if row[0] == method]
    return dict(zip(table.columns[1:], row[1:], strict=True))


def test_every_column_of_a_trained_method(made_results):
    """Columns that nobody has are left out; what diverged or is not trained says so."""
    (task,) = made_results
    found = cells(task, "head")
    assert list(found) == [
        "accuracy", "95 %", "against lora", "seeds", "fit gap", "rate", "trained", "files",
        "training", "peak memory",
    ]  # fmt: skip
    head = task.find("head")
    assert found["accuracy"].number == head.estimate.value
    assert found["accuracy"].text.startswith(f"{100 * head.estimate.value:.1f} ± ")
    assert found["against lora"].text.startswith("-")
    assert ", worse (p < 0.001)" in found["against lora"].text
    texts = {name: cell.text for name, cell in found.items()}
    assert (texts["seeds"], texts["rate"], texts["trained"]) == ("3", "1e-3", "1,010")
    assert (texts["files"], texts["training"], texts["peak memory"]) == ("5.0 kB", "4.0 s", "1 GB")
    mam, majority = cells(task, "mam"), cells(task, "majority class")
    assert (mam["accuracy"].text, mam["accuracy"].number) == ("diverged", None)
    assert mam["against lora"].text == majority["trained"].text == "-"
    assert majority["accuracy"].text == "66.5"
    assert tables.failure_word(task.find("lora")) == "not run"
    methods = tuple(replace(each, gap=None, costs=None) for each in task.methods)
    titles = {*task_table(replace(task, methods=methods)).columns}
    assert found.keys() - titles == {"fit gap", "trained", "files", "training", "peak memory"}


def test_all_tasks_are_in_one_table(made_results):
    other = replace(made_results[0], task="yours")
    table = tables.summary_table([made_results[0], replace(other, methods=other.methods[:1])])
    assert table.columns == ["method", "mine", "yours"]
    found = {name: texts for name, *texts in table.texts()}
    assert found["mam"] == ["diverged", ""]
    assert found["head"][0] == found["head"][1]
    loss = replace(made_results[0], score=replace(made_results[0].score, name="loss"))
    assert tables.score_title(loss) == "loss, lower is better"


def with_result(task, result):
    methods = tuple(result if each.method == result.method else each for each in task.methods)
    return replace(task, methods=methods)


def test_the_baseline_failed_seeds_and_what_is_not_known(made_results):
    (task,) = made_results
    assert cells(task, "lora")["against lora"].text == "baseline"
    head, lora = task.find("head"), task.find("lora")
    unknown = replace(head, comparison=replace(head.comparison, corrected=None))
    assert cells(with_result(task, unknown), "head")["against lora"].text.endswith(", not known")
    even = replace(head, comparison=replace(head.comparison, value=-1e-7))
    assert cells(with_result(task, even), "head")["against lora"].text.startswith("+0.0, ")
    spoiled = replace(lora, finals=(replace(lora.finals[0], status="diverged"), *lora.finals[1:]))
    assert cells(with_result(task, spoiled), "lora")["seeds"].text == "2 of 3 (1 diverged)"
    assert cells(with_result(task, replace(lora, at_edge=True)), "lora")["rate"].text == "1e-3 edge"


def test_several_tasks_have_a_summary_and_a_section_each(made_study, made_results):
    (task,) = made_results
    one = study_page(made_study, made_results, {})
    page = study_page(made_study, [task, replace(task, rows=50), replace(task, task="b")], {})
    assert "All tasks" in page
    assert "All tasks" not in one
    assert "mine, 50 rows" in page
    assert page.count("By number of training rows") == 1
    other = replace(task, task="yours")
    assert "## All tasks" in study_markdown(made_study, [task, other], {})
    assert "## All tasks" not in study_markdown(made_study, made_results, {})
