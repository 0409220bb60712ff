"""report.html of a study: all of it in one file, the recommendation first."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

from adapterhub.bench.study_page import study_page, write_study_reports

COMMANDS = {("mine", 100): "adapterhub train --method 'lora(rank=2)'"}


def test_the_recommendation_comes_first_then_the_table_then_charts(made_study, made_results):
    page = study_page(made_study, made_results, COMMANDS)
    places = [page.index(text) for text in ("Take lora", "adapterhub train --method", "<table",
                                            "Against trained parameters", "Learning rates, on",
                                            "Learning curves, on", "does not know")]  # fmt: skip
    assert places == sorted(places)
    assert page.count("<svg") == 4 + 3 + 2
    assert "mam: 5 of 5 runs diverged" in page
    assert page == study_page(made_study, made_results, COMMANDS)


def test_recorded_methods_are_named_as_such(made_study, made_results):
    recorded = replace(made_study, bench=replace(made_study.bench, recorded=("theirs",)))
    assert "recorded by another program" in study_page(recorded, made_results, {})
    assert "recorded by another program" not in study_page(made_study, made_results, {})


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(made_study, made_results):
    page = study_page(made_study, made_results, {})
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_cells_have_the_numbers_that_they_are_sorted_by(made_study, made_results):
    page = study_page(made_study, made_results, {})
    (row,) = re.findall(r"<tr class=taken>.*?</tr>", page)
    value = made_results[0].find("lora").estimate.value
    assert f'data-value="{value}"' in row
    assert 'data-value="10010"' in row
    assert 'data-value=""' in page  # of what diverged: it is sorted last


def test_several_tasks_have_a_summary_and_a_section_each(made_study, made_results):
    (task,) = made_results
    one = study_page(made_study, made_results, {})
    page = study_page(made_study, [task, replace(task, rows=50), replace(task, task="b")], {})
    assert "All tasks" in page
    assert "All tasks" not in one
    assert "mine, 50 rows" in page
    assert page.count("By number of training rows") == 1


def test_both_files_are_written(made_study, made_results, tmp_path):
    page, markdown = write_study_reports(tmp_path, made_study, made_results, COMMANDS)
    assert (page.name, markdown.name) == ("report.html", "report.md")
    assert "Take lora" in markdown.read_text()
    assert page.read_text().startswith("<!doctype html>")
