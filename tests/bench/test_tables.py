"""The tables of a study: what their cells say, and what they are sorted by."""

from dataclasses import replace

from adapterhub.bench.tables import (
    failure_word,
    score_title,
    summary_table,
    task_table,
)


def cells(task, method):
    table = task_table(task)
    (row,) = [row for row in table.rows if row[0] == method]
    return dict(zip(table.columns[1:], row[1:], strict=True))


def with_result(task, result):
    methods = tuple(result if each.method == result.method else each for each in task.methods)
    return replace(task, methods=methods)


def test_every_column_of_a_trained_method(made_results):
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


def test_a_method_that_diverged_and_one_that_is_not_trained(made_results):
    (task,) = made_results
    mam, majority = cells(task, "mam"), cells(task, "majority class")
    assert (mam["accuracy"].text, mam["accuracy"].number) == ("diverged", None)
    assert mam["against lora"].text == "-"
    assert majority["trained"].text == "-"
    assert majority["accuracy"].text == "66.5"
    assert failure_word(task.find("lora")) == "not run"


def test_columns_that_nobody_has_are_left_out(made_results):
    (task,) = made_results
    methods = tuple(replace(found, gap=None, costs=None) for found in task.methods)
    titles = {*task_table(replace(task, methods=methods)).columns}
    assert not titles & {"fit gap", "trained", "files", "training", "peak memory"}
    assert "accuracy" in titles


def test_the_baseline_and_what_is_not_known(made_results):
    (task,) = made_results
    assert cells(task, "lora")["against lora"].text == "baseline"
    head = task.find("head")
    unknown = replace(head, comparison=replace(head.comparison, corrected=None))
    assert cells(with_result(task, unknown), "head")["against lora"].text.endswith(", not known")
    even = replace(head, comparison=replace(head.comparison, value=-1e-7))
    assert cells(with_result(task, even), "head")["against lora"].text.startswith("+0.0, ")


def test_failed_seeds_are_counted_and_a_rate_at_the_edge_is_marked(made_results):
    (task,) = made_results
    one, *rest = task.find("lora").finals
    spoiled = replace(task.find("lora"), finals=(replace(one, status="diverged"), *rest))
    assert cells(with_result(task, spoiled), "lora")["seeds"].text == "2 of 3 (1 diverged)"
    edge = replace(task.find("lora"), at_edge=True)
    assert cells(with_result(task, edge), "lora")["rate"].text == "1e-3 edge"


def test_all_tasks_are_in_one_table(made_results):
    other = replace(made_results[0], task="yours")
    table = summary_table([made_results[0], replace(other, methods=other.methods[:1])])
    assert table.columns == ["method", "mine", "yours"]
    found = {name: texts for name, *texts in table.texts()}
    assert found["mam"] == ["diverged", ""]
    assert found["head"][0] == found["head"][1]
    loss = replace(made_results[0], score=replace(made_results[0].score, name="loss"))
    assert score_title(loss) == "loss, lower is better"
