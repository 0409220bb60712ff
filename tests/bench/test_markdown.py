"""report.md: every method and column, as a table that Markdown reads."""

from __future__ import annotations

from dataclasses import replace

from adapterhub.bench.markdown import (
    LIMITS,
    comparison_lines,
    failure_lines,
    result_title,
    study_markdown,
    study_subtitle,
    study_title,
    summary_note,
    summary_rows,
)

COMMANDS = {("mine", 100): "adapterhub train --method lora"}


def test_the_report_has_the_advice_the_command_and_the_whole_table(made_study, made_results):
    text = study_markdown(made_study, made_results, COMMANDS)
    lines = text.splitlines()
    assert lines[0] == "# mine"
    assert any(line.startswith("Take lora: accuracy") for line in lines)
    advice = made_results[0].advice
    others = [*advice.reasons, *advice.unknown][1:]
    assert others
    assert sum(line.startswith("- ") for line in lines[: lines.index("```bash")]) == len(others)
    assert "```bash\nadapterhub train --method lora\n```" in text
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert [line.split("|")[1].strip() for line in table] == [
        "method", "---", "head", "lora", "mam", "majority class",
    ]  # fmt: skip
    assert "mam: 5 of 5 runs diverged: the loss is nan" in text
    assert all(limit in text for limit in LIMITS)
    assert "cannot be merged" in text


def test_the_number_of_recorded_methods_is_said(made_study, made_results):
    recorded = replace(made_study, bench=replace(made_study.bench, recorded=("a", "b")))
    assert "3 methods and 2 recorded" in study_subtitle(recorded, made_results)
    assert "recorded" not in study_subtitle(made_study, made_results)


def test_names_are_no_markup(made_study, made_results):
    name = "a|b*<img>\n# c"
    methods = tuple(replace(each, method=name) for each in made_results[0].methods)
    text = study_markdown(made_study, [replace(made_results[0], methods=methods)], {})
    assert "<img" not in text.replace("\\<img", "")
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "\n# c" not in text


def test_several_tasks_have_a_summary(made_study, made_results):
    other = replace(made_results[0], task="yours")
    text = study_markdown(made_study, [made_results[0], other], {})
    assert "## All tasks" in text
    rows = dict(summary_rows([made_results[0], other]))
    assert rows["mam"] == ["diverged", "diverged"]
    assert all(cell.endswith("*") for cell in rows["lora"])  # the best
    assert summary_note().startswith("*")
    assert dict(summary_rows([replace(other, methods=other.methods[:1])])).keys() == {"head"}


def test_titles_name_rows_only_where_there_are_several(made_study, made_results):
    (task,) = made_results
    assert result_title(task, made_results) == "mine"
    assert result_title(task, [task, replace(task, rows=50)]) == "mine, 100 rows"
    assert study_title(made_study) == "mine"
    assert study_subtitle(made_study, made_results) == (
        "some/backbone · 3 methods · 3 learning rates and 3 seeds each"
    )


def test_lines_below_the_table(made_results):
    (task,) = made_results
    assert [line.split(" is worse than ")[0] for line in comparison_lines(task)[:1]] == ["head"]
    assert len(failure_lines(task)) == 1
