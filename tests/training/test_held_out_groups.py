"""Whole groups are held out: by task, by a column, in training, tests, studies and folds."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from adapterhub.bench.execute import read_task_data
from adapterhub.bench.suggest import linear_probe
from adapterhub.data.examples import TooFewGroups, hold_out
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.pages.row_scores import outcomes_of
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import parse_task
from adapterhub.tasks.classification import Scored
from adapterhub.training.run_data import read_data, sample_rows
from tests.kit.data import write_json_lines

COUNT, EACH = 30, 4  # groups, and rows of each


def chat(first, turns):
    roles = ("user", "assistant")
    told = [{"role": roles[k % 2], "content": f"turn {k}"} for k in range(1, 2 * turns + 2)]
    return [{"role": "user", "content": first}, *told]


# Task -> the row of group i and number j. What is learned differs, and so does the rest.
ROWS = {
    "reranking": lambda i, j: {"query": f"q {i}", "passage": f"p {i} {j}", "label": int(j == 0)},
    "embedding": lambda i, j: {"anchor": f"q {i}", "positive": f"p {j}", "negative": f"n {j}"},
    "embedding(loss_type=cosent)": lambda i, j: {"text": f"q {i}", "pair": f"p {j}", "score": j},
    "classification": lambda i, j: {"text": f"t {i}", "label": "ab"[j % 2]},
    "classification of pairs":
        lambda i, j: {"premise": f"t {i}", "hypothesis": f"h {i} {j}", "label": "abc"[j % 3]},
    "regression": lambda i, j: {"text": f"t {i}", "label": j / 7},
    "prompted(template='{text} is {mask}', words={'a': 'good', 'b': 'bad'})":
        lambda i, j: {"text": f"t {i}", "label": "ab"[j % 2]},
    "multi-label": lambda i, j: {"text": f"t {i}", "labels": ["ab"[j % 2], "c"][: 1 + j % 2]},
    "question-answering": lambda i, j: {
        "question": f"who {j}?", "context": f"The cat {i} sleeps.",
        "answers": {"text": ["cat"], "answer_start": [4]}},
    "unified-qa": lambda i, j: {"question": f"who {j}?", "context": f"cat {i}", "answer": "a cat"},
    "multiple-choice": lambda i, j: {
        "text": f"t {i}", "choices": [f"c {(j + n) % 4}" for n in range(4)], "label": 0},
    "preference": lambda i, j: {"prompt": f"p {i}", "chosen": f"c {j}", "rejected": f"r {j}"},
    "reward": lambda i, j: {"prompt": f"p {i}", "chosen": f"c {j}", "rejected": f"r {j}"},
    "preference of chats": lambda i, j: {
        "chosen": chat(f"p {i}", j), "rejected": [*chat(f"p {i}", j)[:-1],
                                                  {"role": "assistant", "content": "no"}]},
    "causal-lm": lambda i, j: {"prompt": f"p {i}", "response": f"c {j}"},
    "causal-lm of chats": lambda i, j: {"messages": chat(f"p {i}", j)},
    "causal-lm(data=text)": lambda i, j: {"text": f"document {i}{' ' * j}"},
    "seq2seq": lambda i, j: {"source": f"s {i}", "target": f"t {j}"},
    "tagging": lambda i, j: {"tokens": ["in", f"town {i}"], "tags": ["O", ("B-x", "B-y")[j % 2]]},
    "masked-lm": lambda i, j: {"text": f"document {i}{' ' * j}"},
    "span-corruption": lambda i, j: {"text": f"Document {i}" if j else f"document {i}"},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes rows, and makes the recipe of a task on them."""

    def recipe(rows, task, seed=0, **options) -> Recipe:
        file = write_json_lines(tmp_path / "rows.jsonl", rows)
        data = DataOptions(train=str(file), **options)
        return Recipe(backbone="x", task=task.partition(" of ")[0], data=data, seed=seed)

    return recipe


def rows_of(task: str):
    return [ROWS[task](i, j) for i in range(COUNT) for j in range(EACH)]


def groups_of(data, *parts):
    return [set(data.task.groups_of(part)) for part in parts]


@pytest.mark.parametrize("task", ROWS)
def test_every_task_holds_out_whole_groups(task, recipe):
    data = read_data(recipe(rows_of(task), task, test=0.1))
    train, held, test = groups_of(data, data.train, data.evaluation, data.test)
    assert (len(held), len(test)) == (6, 3)
    assert len(train) == COUNT - 9
    assert train.isdisjoint(held | test)
    assert held.isdisjoint(test)
    sizes = Counter(data.task.groups_of([*data.evaluation, *data.test]))
    assert set(sizes.values()) == {EACH}
    told = f"24 of 120 rows are held out, those of 6 of 30 {data.task.groups}"
    assert any(told in note for note in data.notes)


@pytest.mark.parametrize("task", ["reranking", "question-answering", "classification"])
def test_a_study_tests_on_whole_groups(task, recipe):
    found = read_task_data(recipe(rows_of(task), task), None, 8)
    train, selected, test = groups_of(found.run, found.run.train, found.run.evaluation, found.test)
    assert train.isdisjoint(selected | test)
    assert selected.isdisjoint(test)
    assert len(found.run.evaluation) == 8
    if task == "reranking":  # whole queries, since a part of the passages is ranked more easily
        assert len(selected) == 2
    assert any("to test" in note and "of 24" in note for note in found.notes)


def test_rows_of_one_picture_stay_together(recipe, tmp_path):
    for i in range(COUNT):
        for copy in ("", "copy "):  # of the same bytes
            Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{copy}{i}.png")
    names = [(f"{'copy ' * (j % 2)}{i}.png", j) for i in range(COUNT) for j in range(EACH)]
    for task, row in (
        ("image-classification", lambda j: {"label": "ab"[j // 2]}),
        ("image-text-to-text", lambda j: {"question": f"why {j}?", "answer": "so"}),
    ):
        data = read_data(recipe([{"image": name} | row(j) for name, j in names], task))
        train, held = groups_of(data, data.train, data.evaluation)
        assert (len(train), len(held)) == (24, 6)


def test_rows_with_two_labels_are_held_out_like_others(recipe):
    """The best that a model can reach on them is the same in training and evaluation."""
    clear = [{"text": f"clear {i}", "label": "ab"[i % 2]} for i in range(700)]
    doubtful = [{"text": f"hard {i}", "label": x} for i in range(150) for x in "ab"]
    hard = []
    for seed in range(20):
        data = read_data(recipe([*clear, *doubtful], "classification", seed))
        hard.append(np.mean([e.text.startswith("hard") for e in data.evaluation]))
        labels = Counter(e.label for e in data.evaluation)
        assert abs(labels["a"] - labels["b"]) <= 2
    assert np.mean(hard) == pytest.approx(0.3, abs=0.02)


def test_large_and_small_groups_are_held_out_alike():
    """By many classes, of which each has a row or two to give."""
    rows = [(c, f"{c} {k}") for c in range(40) for k in range(9)]
    rows += [(c, f"{c} twice {k}") for c in range(40) for k in range(3) for _ in range(2)]
    examples = [parse_task("classification").example([text], DataOptions()) for _, text in rows]
    counts = Counter()
    for seed in range(60):
        _, held = hold_out(examples, seed, [c for c, _ in rows])
        counts.update("twice" in e.text for e in held)
    assert counts[True] / counts.total() == pytest.approx(240 / 600, abs=0.08)


@pytest.mark.parametrize("test", [None, 0.2])
def test_a_column_names_the_groups(test, recipe):
    rows = [{"text": f"t {i} {j}", "label": "ab"[j % 2], "speaker": i}
            for i in range(COUNT) for j in range(EACH)]  # fmt: skip
    data = read_data(recipe(rows, "classification", group="speaker", test=test))
    parts = [{e.group for e in part} for part in (data.train, data.evaluation, data.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == COUNT
    assert any("6 of 30 values of 'speaker'" in note for note in data.notes)
    assert data.options.text == "text"
    words = [{"words": f"some words {i}", "mood": "ab"[i % 2], "who": "xyz"[i % 3]}
             for i in range(40)]  # fmt: skip
    with pytest.raises(DataError):  # the column is not guessed as something else
        read_data(recipe(words, "classification"))
    data = read_data(recipe(words, "classification", group="who"))
    assert (data.options.label, data.labels) == ("mood", ("a", "b"))


def test_too_few_groups_are_told(recipe):
    few = [ROWS["reranking"](0, j) for j in range(40)]
    with pytest.raises(TooFewGroups, match="too few queries to hold some out: 1, in 40") as error:
        read_data(recipe(few, "reranking"))
    assert "--group none" in error.value.hint
    assert len(read_data(recipe(few, "reranking", group="none")).evaluation) == 8
    named = [{"text": f"t {j}", "label": "ab"[j % 2], "who": "x"} for j in range(40)]
    with pytest.raises(TooFewGroups, match="values of 'who'"):
        read_data(recipe(named, "classification", group="who"))
    with pytest.raises(DataError, match="whom"):
        read_data(recipe(named, "classification", group="whom"))
    for groups, held in ((1, 8), (2, 20)):
        rows = [ROWS["question-answering"](j % groups, j) for j in range(40)]
        data = read_data(recipe(rows, "question-answering"))
        assert len(data.evaluation) == held
        assert (groups == 1) == any("contexts are too few (1)" in note for note in data.notes)


def test_fewer_evaluation_rows_are_whole_queries(recipe):
    data = read_data(recipe(rows_of("reranking"), "reranking"))
    rows = data.train
    for most, expected in ((1, EACH), (EACH, EACH), (10, 2 * EACH), (500, len(rows))):
        some = sample_rows(data.task, rows, most, 0)
        assert len(some) == expected
        assert set(Counter(data.task.groups_of(some)).values()) == {EACH}


def test_predictions_name_the_group_of_each_row():
    """Prompts that are empty are none."""
    task = parse_task("preference")
    equal = [task.example([""], DataOptions())] * 40
    assert len(set(task.groups_of(equal))) == 1
    parts = [type(equal[0])("", f"c {j}", f"r {j}") for j in range(40)]
    assert len(set(task.groups_of(parts))) == 40
    task = parse_task("classification")
    examples = [task.example([f"t {i // 2}"], DataOptions()) for i in range(6)]
    found = outcomes_of(task, examples, [Scored("a", {"a": 0.9, "b": 0.1})] * 6, ["a", "b"], 0)
    assert [row["group"] for row in found.rows] == [0, 0, 1, 1, 2, 2]
    alone = outcomes_of(task, examples[::2], [Scored("a", {"a": 1.0})] * 3, ["a", "b"], 0)
    assert "group" not in alone.rows[0]


def test_rows_of_a_group_are_in_one_fold():
    """Features that tell the group alone say nothing of other groups."""
    groups = np.repeat(np.arange(20), 5)
    features = np.eye(20, dtype=np.float32)[groups]
    labels = [str(g % 2) for g in groups]
    for file in linear_probe(features, labels, list(groups), "classes"):
        right = [row["label"] == row["prediction"] for row in file.rows]
        assert np.mean(right) < 0.6
