"""Examples from tables: texts, labels and their names, samples and hashes."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.options import from_dict
from adapterhub.data import examples as reading
from adapterhub.data.examples import Example, read_examples, sample, strata_of
from adapterhub.data.options import DataOptions, parse_labels
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import parse_task
from tests.kit.task_cases import CASES

names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_labels_keep_their_spelling(tmp_path):
    rows = [{"text": "a", "label": label} for label in (1, "01", True, 1.5, " x ")]
    source = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    labels = [e.label for e in read_examples(source, DataOptions(), labelled=True)]
    assert labels == ["1", "01", "True", "1.5", "x"]
    source = write(tmp_path / "a.csv", "text\none\ntwo\n")
    assert reading.read_texts(source, DataOptions()) == [Example("one"), Example("two")]


def test_regression_labels_are_floats(tmp_path):
    source = write(tmp_path / "a.tsv", "text\tlabel\na\t5.000\nb\t-1e-1\n")
    examples = read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [e.label for e in examples] == [5.0, -0.1]
    source = write(tmp_path / "b.csv", "text;label\ngood, clean;1,5\nbad;0,5\n")
    examples = read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [e.label for e in examples] == [1.5, 0.5], "decimal commas"
    source = write(tmp_path / "a.csv", "text,label\na,1.5\nb,high\nc,nan\nd,1e999\n")
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [line.split(":")[0] for line in caught.value.offenders] == ["line 3", "line 4", "line 5"]


def offenders(source, **options):
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(**options), labelled=True)
    return list(caught.value.offenders)


INVALID = [
    ("a.csv", "text,label\na,1\nb, \n", ["line 3: the label is empty"]),
    ("a.csv", "text,label\n" + "a,\n" * 25, ["... and 15 more"]),
    ("a.jsonl", '{"text": "a", "label": "1"}\n{"text": "b"}\n', ["line 2: the label is empty"]),
    ("a.jsonl", '{"text": 5, "label": [1]}', ["line 1: 'text' has type int, expected text",
                                             "line 1: the label has type list, expected"]),
    ("a.jsonl", '{"text": null, "label": 1}', ["line 1: 'text' is missing"]),
    ("a.jsonl", '{"text": "\\ud800", "label": 1}', ["lone surrogate"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "messages"), INVALID)
def test_an_invalid_row_is_reported_with_its_line(tmp_path, name, text, messages):
    found = "\n".join(offenders(write(tmp_path / name, text)))
    assert all(message in found for message in messages)


def test_an_invalid_row_of_parquet_is_reported_with_its_number(tmp_path):
    table = pyarrow.table({"text": ["a", None], "label": [float("nan"), 1.0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = offenders(str(tmp_path / "a.parquet"))
    assert found == ["row 1: the label is empty", "row 2: 'text' is missing"]


def write_rows(path, rows):
    """Write rows in the format of the file's suffix; `.quoted.tsv` encloses all fields."""
    table = [list(rows[0]), *([*row.values()] for row in rows)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        write(path, "\n".join(map(json.dumps, rows)))
    else:
        quote = '"' if path.name.endswith(".quoted.tsv") else ""
        delimiter = "," if path.suffix == ".csv" else "\t"
        lines = (delimiter.join(f"{quote}{cell}{quote}" for cell in row) for row in table)
        write(path, "\n".join(lines) + "\n")
    return str(path)


FORMATS = {"a.csv": "line 3", "a.tsv": "line 3", "a.quoted.tsv": "line 3", "a.jsonl": "line 2",
           "a.parquet": "row 2"}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_text_with_a_label_is_refused(tmp_path, name):
    row = {"text": "a", "pair": "b", "label": "1"}
    for column, value in itertools.product(("text", "pair"), ("", "  ")):
        source = write_rows(tmp_path / name, [row, row | {column: value}])
        assert offenders(source, pair="pair") == [f"{FORMATS[name]}: {column!r} is empty"]
        examples = read_examples(source, DataOptions(pair="pair"), labelled=False)
        assert examples[1] == Example(**{"text": "a", "pair": "b", column: value})


@given(st.lists(names, unique=True, min_size=1), st.integers(1, 50), st.integers(0, 2**32))
def test_a_sample_is_an_ordered_subset_determined_by_its_seed(labels, count, seed):
    examples = [Example(label) for label in labels]
    drawn = sample(examples, count, seed)
    assert len(drawn) == min(count, len(examples))
    assert drawn == [e for e in examples if e in drawn] == sample(examples, count, seed)
    assert sample(examples, None, 0) == examples
    many = [Example(str(i)) for i in range(100)]
    assert sample(many, 10, seed) != sample(many, 10, seed + 1)
    with pytest.raises(DataError, match="rows is 0"):
        sample(examples, 0, 0)


def test_labels_are_ordered_and_those_unseen_in_training_are_counted():
    """In numeric order only if all are numbers."""
    for labels, expected in (
        (["10", "9", "-1", "9"], ["-1", "9", "10"]),
        (["10", "9", "nan"], ["10", "9", "nan"]),
    ):
        assert reading.labels_of(Example("", None, label) for label in labels) == expected
    with pytest.raises(DataError) as caught:
        reading.check_labels(["no", "yes"], ["no", "maybe", "maybe", "never"])
    assert caught.value.offenders == ("'maybe': 2 times", "'never': 1 time")
    reading.check_labels(["no", "yes"], ["no"])
    with pytest.raises(DataError, match="1 label"):
        reading.check_labels(["yes"], [])


def test_the_hash_depends_on_order_and_fields_and_is_stable():
    first, second = Example("a", "b", "1"), Example("a", None, 1.0)
    hashes = {
        reading.data_hash(x) for x in ([], [first], [second], [first, second], [second, first])
    }
    assert len(hashes) == 5
    expected = "a1afde9dd52cf4f83607d683b29083b6e631c7b8f87f7a7c84f5e949d0a64a66"
    assert reading.data_hash([Example("é", "b", "1")]) == expected
    drawn = "f089ec5c222beb83ba31f502b91b322f7f0ceb1a606eaa12e916ed216fd108ea"
    rows = [Example(str(i), None, str(i % 7)) for i in range(99)]
    assert reading.data_hash(sample(rows, 9, 3)) == drawn, "whatever PYTHONHASHSEED is"


# Rows that are held out for evaluation.


def of_labels(counts):
    return [Example(f"{c} {i}", None, c) for c, n in counts.items() for i in range(n)]


def held(rows, seed=0):
    return reading.hold_out(rows, seed, strata_of(rows))


@pytest.mark.parametrize(
    ("total", "expected"),
    [(10, 2), (50, 10), (100, 20), (200, 20), (1204, 120), (5000, 500), (101_000, 10_000)],
)
def test_a_tenth_is_held_out_and_more_of_small_data(total, expected):
    train, evaluation = held(of_labels({"a": total // 2, "b": total - total // 2}))
    assert len(evaluation) == expected
    assert len(train) == total - expected


def test_labels_have_the_same_shares_and_the_seed_determines_the_rows():
    rows = of_labels({"a": 700, "b": 200, "c": 100})
    assert Counter(e.label for e in held(rows)[1]) == {"a": 70, "b": 20, "c": 10}
    assert held(rows, 3) == held(rows, 3) != held(rows, 4)
    numbers = [Example(str(i), None, i / 7) for i in range(100)]  # which are one group
    assert set(strata_of(numbers)) == {None}
    assert len(held(numbers)[1]) == 20


LABELS = st.sampled_from("abcdefghij")
ROWS = st.lists(st.builds(Example, st.sampled_from("xyzuvw12345678"), st.none(), LABELS))


@given(ROWS | st.lists(st.builds(Example, st.text(), st.none(), LABELS), min_size=10),
       st.integers(0, 99))  # fmt: skip
def test_a_split_is_fair_or_refused(rows, seed):
    try:
        train, evaluation = held(rows, seed)
    except DataError:
        return
    assert Counter(train) + Counter(evaluation) == Counter(rows)
    assert {e.label for e in rows} == {e.label for e in train}
    assert not {e.text for e in train} & {e.text for e in evaluation}
    assert 0 < len(evaluation) <= max(0.21 * len(rows), 20)
    order = {id(e): i for i, e in enumerate(rows)}
    assert [order[id(e)] for e in train] == sorted(order[id(e)] for e in train)


@pytest.mark.parametrize("rows", [[], of_labels({"a": 9}), [Example("x", None, "a")] * 50])
def test_too_few_rows_are_refused_with_what_to_type(rows):
    with pytest.raises(DataError, match="too few to hold any out") as error:
        held(rows)
    assert "--eval none" in error.value.hint


def test_the_rarest_tag_is_the_stratum_of_a_sentence():
    @dataclass(frozen=True)
    class Tagged:
        text: str
        tags: tuple[str, ...]

    rows = [Tagged("a", ("O", "B-x", "I-x")), Tagged("b", ("B-x", "B-y")), Tagged("c", ("O",))]
    assert strata_of(rows) == ["x", "y", None]
    assert reading.content_of(rows[0]) == ("a",)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_labels_of_every_task_divide_its_rows(name, tmp_path):
    """Whatever the of_labels of a task call them: no label is in the held-out rows alone."""
    task = parse_task(CASES[name].task)
    source = str(CASES[name].data(tmp_path))
    task, choice = task.fitted(source, DataOptions(), "train")
    rows = task.read(source, choice.options, "train")
    if not task.labels(rows):
        return
    assert len(set(strata_of(rows))) > 1
    train, evaluation = reading.hold_out(rows, 0, strata_of(rows))
    assert set(task.labels(evaluation)) <= set(task.labels(train))


# Notes on the data: exact figures, one line each, a handful at most.


def texts(*labels, text="text"):
    return [Example(f"{text} {i}", None, label) for i, label in enumerate(labels)]


def notes(train, evaluation=None):
    labels = sorted({str(e.label) for e in train})
    return reading.notes_on(train, evaluation or [], labels)


A = "ab" * 50


NOTED = [
    (texts(*map(str, range(1204))),
     "1,204 labels in 1,204 training rows: is it the right column? (--label)"),
    (texts(*[str(i % 12) for i in range(120)]),
     "the 12 labels are all numbers: --task regression learns their size"),
    (texts(*["ham"] * 95, *["spam"] * 5),
     "'ham' is the label of 95.0% of the 100 training rows: compare macro_f1, not accuracy"),
    (texts(*A, "c", "d"), "2 labels have one training row: 'c', 'd'"),
    (texts(*A, "c"), "1 label has one training row: 'c'"),
    ([*texts(*A), Example("text 0", None, "b"), Example("text 1", None, "a")],
     "2 texts occur with different labels, in 4 training rows, such as 'text 0'"),
    ([Example(f"t{i % 3} {'ab'[i % 2]}", None, "ab"[i % 2]) for i in range(60)],
     "only 6 of the 60 training texts are different"),
    ([Example(f"{c} {i} is Sports or not", None, "sports") for i, c in enumerate("ab" * 30)]
     + texts("music", "music"), "96.8% of the training texts contain their label as a word"),
]  # fmt: skip


@pytest.mark.parametrize(("train", "note"), NOTED)
def test_what_is_probably_not_intended_is_told(train, note):
    assert note in notes(train)


def test_evaluation_rows_that_are_trained_on_are_counted():
    train = texts(*A)
    assert notes(train, texts(*"ab" * 5, text="other")) == ()  # good data
    numbers = [Example(f"text {i}", None, i / 7) for i in range(100)]
    assert reading.notes_on(numbers, [], ()) == ()
    evaluation = [*train[:3], *texts(*"ab" * 10, text="other")]
    assert notes(train, evaluation) == (
        "3 of 23 evaluation rows (13.0%) are also training rows: the scores are too good",
    )


# Names for the labels of a file.


NAMES = {"0": "negative", "1": "positive"}


def test_every_form_gives_the_same_names():
    """A list fixes the order, and nothing names nothing."""
    for spec in ("0=negative,1=positive", " 0 = negative , 1=positive ", NAMES,
                 {0: "negative", 1: "positive"}):  # fmt: skip
        assert parse_labels(spec) == NAMES
        assert DataOptions(labels=spec) == DataOptions(labels=NAMES)
        assert from_dict(DataOptions, {"labels": spec}).label_names == NAMES
    assert list(parse_labels("pos,neg")) == ["pos", "neg"]
    assert parse_labels(["pos", "neg"]) == {"pos": "pos", "neg": "neg"}
    for spec in (None, "", {}, [], ()):
        assert parse_labels(spec) == {}
        assert DataOptions(labels=spec).labels is None


BAD = [
    ("0=a,1=a", "the name 'a': 2 times"),
    ("0=a,0=b", "the value '0': 2 times"),
    (["a", "a"], "'a': 2 times"),
    ("0=,1=b", "'0': empty"),
    ("0=1,1=2", "'1' is another value of the file"),
    *((spec, "invalid names") for spec in ("0=a,b", 7, [["a"]], {"a": ["b"]})),
]


@pytest.mark.parametrize(("spec", "problem"), BAD)
def test_bad_names_are_refused(spec, problem):
    with pytest.raises(ConfigError) as error:
        parse_labels(spec)
    assert problem in str(error.value)
    assert "0=negative,1=positive" in error.value.expected


def test_there_are_at_most_five_short_lines_without_control_characters():
    train = [
        Example("same \x1b[31m" + "x" * 500, None, f"\x1b{'y' * 300}{i % 3}") for i in range(90)
    ]
    found = notes([*train, *texts(*"ab" * 9)], train)
    assert 0 < len(found) <= 5
    assert all(len(note) < 250 and "\x1b" not in note for note in found)
