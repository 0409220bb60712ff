"""Columns are guessed where there is no doubt; a doubt is one error that says what to type."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError

_TEXT = "the movie was really good bad boring wonderful actors plot and never again"
_WORDS = _TEXT.split()
LABELS = ("pos", "neg", "neutral")


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(5, 15))) + draw.choice((".", ", yes!"))


def write(path: Path, header: tuple[str, ...] | None, kinds: str, rows: int = 60) -> str:
    """Write a CSV file with a column for each letter: text, class, number, id, date or empty."""
    draw = random.Random(0)
    cells = {
        "t": lambda i: text(draw),
        "c": lambda i: draw.choice(LABELS),
        "b": lambda i: draw.choice("01"),
        "f": lambda i: f"{draw.random() * 5:.2f}",
        "i": lambda i: 1000 + 7 * i,
        "h": lambda i: f"{draw.getrandbits(64):016x}",
        "u": lambda i: f"user{i % 9}",
        "d": lambda i: f"2024-03-{i % 28 + 1:02} 12:00:00",
        "e": lambda i: "",
        "l": lambda i: draw.choice("ABCD"),
    }
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if header:
            writer.writerow(header)
        writer.writerows([cells[kind](i) for kind in kinds] for i in range(rows))
    return str(path)


def chosen(source: str, wants: str = "classes", **options: object) -> ColumnChoice:
    return choose_columns(source, DataOptions(**options), "train", WANTS[wants])  # type: ignore[arg-type]


# header, kinds of cells, what is wanted: text, pair, label (or None for a doubt)
LAYOUTS = [
    ("text,label", "tc", "classes", "text", None, "label"),
    ("label,text", "ct", "classes", "text", None, "label"),
    ("review,sentiment", "tc", "classes", "review", None, "sentiment"),
    ("Review Text,Rating", "tb", "classes", "Review Text", None, "Rating"),
    ("v1,v2,,", "ctee", "classes", "v2", None, "v1"),
    (",text,target", "itb", "classes", "text", None, "target"),
    ("id,comment,toxic", "itb", "classes", "comment", None, "toxic"),
    ("sentence1,sentence2,label", "ttc", "classes", "sentence1", "sentence2", "label"),
    ("premise,hypothesis,gold_label", "ttc", "classes", "premise", "hypothesis", "gold_label"),
    ("index,question,sentence,label", "ittc", "classes", "question", "sentence", "label"),
    ("Quality,#1 ID,#2 ID,#1 String,#2 String", "biitt", "classes", "#1 String", "#2 String",
     "Quality"),
    ("Class Index,Title,Description", "btt", "classes", "{Title}. {Description}", None,
     "Class Index"),
    ("title,text,rating", "ttb", "classes", "text", None, "rating"),
    ("text,label,label_text", "tbc", "classes", "text", None, "label"),
    ("texto,etiqueta", "tc", "classes", "texto", None, "etiqueta"),
    ("tweet_id,airline_sentiment,airline,text,tweet_created", "icutd", "classes", "text", None,
     "airline_sentiment"),
    (None, "tc", "classes", "0", None, "1"),
    (None, "bt", "classes", "1", None, "0"),
    ("sentence1,sentence2,score", "ttf", "numbers", "sentence1", "sentence2", "score"),
    ("id,year,text,price", "iitf", "numbers", "text", None, "price"),
    ("id,article,highlights", "htt", "targets", "article", None, "highlights"),
    ("question,answer", "tt", "targets", "question", None, "answer"),
    ("document,summary", "tt", "targets", "document", None, "summary"),
    (None, "tt", "targets", "0", None, "1"),
    ("text", "t", "texts", "text", None, "label"),
    ("my column", "t", "texts", "my column", None, "label"),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]} {layout[2]}")
def test_columns_of_common_layouts_are_guessed(tmp_path: Path, layout: tuple[str, ...]) -> None:
    header, kinds, wants, *expected = layout
    source = write(tmp_path / "a.csv", tuple(header.split(",")) if header else None, kinds)
    options = chosen(source, wants).options
    assert [options.text, options.pair, options.label] == expected


DOUBTS = [
    ("id,text,label", "iti", "classes", "--label"),
    ("id,text,label", "ith", "classes", "--label"),
    ("text,label", "tt", "classes", "--label"),
    ("id,comment", "it", "classes", "--label"),
    ("genre,sentence1,sentence2,score", "cttf", "classes", "--task regression"),
    ("text,category,priority", "tcc", "classes", None),
    ("text,colour,shape", "tcc", "classes", "--label"),
    ("note a,note b,label", "ttc", "classes", "--text"),
    ("en,de", "tt", "targets", "--text en --label de"),
    (None, "ubet", "classes", "--label 1"),
    (None, "tt", "classes", "--label"),
    ("a,b", "ii", "classes", "--text"),
    ("text,label", "tc", "answers", "--pair"),
]


@pytest.mark.parametrize("layout", DOUBTS, ids=lambda layout: f"{layout[0]} {layout[1]}")
def test_a_doubt_shows_the_columns_and_what_to_type(tmp_path: Path, layout) -> None:
    header, kinds, wants, typed = layout
    source = write(tmp_path / "a.csv", tuple(header.split(",")) if header else None, kinds)
    if typed is None:
        assert chosen(source, wants).options.label == "category"
        return
    with pytest.raises(DataError, match="cannot tell which columns") as error:
        chosen(source, wants)
    names = header.split(",") if header else map(str, range(len(kinds)))
    for name in names:
        assert f"{name}" in str(error.value)
    assert typed in str(error.value)


@given(
    st.lists(st.sampled_from("tbcfihud"), min_size=1, max_size=6),
    st.sampled_from(["named", "usual", "none"]),
    st.integers(0, 9),
)
def test_a_guess_is_never_an_id_or_a_text_as_a_label(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], names: str, seed: int
) -> None:
    draw = random.Random(seed)
    usual = ["text", "label", "id", "review", "class", "score", "title", "content", "target"]
    header = {
        "named": tuple(f"col_{chr(97 + i)}" for i in range(len(kinds))),
        "usual": tuple(draw.sample(usual, len(kinds))),
        "none": None,
    }[names]
    source = write(tmp_path_factory.getbasetemp() / "layout.csv", header, "".join(kinds), 40)
    try:
        options = chosen(source).options
    except DataError:
        return
    columns = header or tuple(map(str, range(len(kinds))))
    kind_of = dict(zip(columns, kinds, strict=True))
    assert kind_of[str(options.label)] in "bcu"
    if options.text in kind_of and options.text != "text" and names != "usual":
        assert kind_of[options.text] == "t"


def test_what_was_read_and_guessed_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "reviews.csv", ("review text", "stars"), "tb")
    assert chosen(source).notes == (
        "reviews.csv: comma-separated, 60 rows; columns: review text, stars",
        "guessed: --text 'review text' --label stars",
    )
    source = write(tmp_path / "a.csv", ("text", "label"), "tb")
    assert chosen(source).notes == ("a.csv: comma-separated, 60 rows; columns: text, label",)


def test_columns_that_are_given_are_taken_and_the_rest_is_guessed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", ("sentence1", "sentence2", "label"), "ttc")
    choice = chosen(source, text="sentence2")
    assert (choice.options.text, choice.options.pair) == ("sentence2", None)
    with pytest.raises(DataError, match="columns not found"):
        chosen(source, text="sentence3").table.take(["sentence3"])  # type: ignore[union-attr]


def test_a_template_is_taken_and_its_empty_cells_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "".join(f"A {i},{'' if i % 4 else 'some words'},{'pn'[i % 2]}\n" for i in range(40))
    file.write_text(f"title,body,label\n{rows}")
    choice = chosen(str(file), text="{title}. {body}")
    assert choice.options.text == "{title}. {body}"
    assert choice.notes[-1] == "30 of 40 rows have no 'body': it is left out there"
    with pytest.raises(DataError, match="'boddy'; did you mean 'body'"):
        list(choice.table.take(["{boddy}"]))  # type: ignore[union-attr]


RECORDED = DataOptions(text="review", label="stars")


def test_data_to_predict_on_without_names_is_read_by_its_look(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", None, "t")
    choice = choose_columns(source, RECORDED, "eval", WANTS["classes"], labelled=False)
    assert choice.options.text == "0"
    assert "guessed: --text 0" in choice.notes
    source = write(tmp_path / "b.csv", None, "bt")
    choice = choose_columns(source, RECORDED, "eval", WANTS["classes"])
    assert (choice.options.text, choice.options.label) == ("1", "0")


def test_recorded_pairs_are_found_in_data_without_names(tmp_path: Path) -> None:
    recorded = DataOptions(text="premise", pair="hypothesis", label="label")
    source = write(tmp_path / "a.csv", None, "tt")
    choice = choose_columns(source, recorded, "eval", WANTS["classes"], labelled=False)
    assert (choice.options.text, choice.options.pair) == ("0", "1")


def test_recorded_numbers_are_columns_of_data_without_names_only(tmp_path: Path) -> None:
    recorded = DataOptions(text="3", label="1")
    source = write(tmp_path / "a.csv", None, "ubet")
    choice = choose_columns(source, recorded, "eval", WANTS["classes"])
    assert (choice.options.text, choice.options.label) == ("3", "1")
    source = write(tmp_path / "b.csv", ("sentence", "label"), "tb")
    choice = choose_columns(source, recorded, "eval", WANTS["classes"])
    assert (choice.options.text, choice.options.label) == ("sentence", "label")


def test_a_recorded_column_that_named_data_lacks_is_not_guessed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", ("sentence", "label"), "tb")
    choice = choose_columns(source, DataOptions(text="text"), "eval", WANTS["classes"])
    with pytest.raises(DataError, match="columns not found"):
        choice.table.take([choice.options.text_column])  # type: ignore[union-attr]


OTHERS = {
    "tags": ({"tokens": ["a", "b"], "ner_tags": ["O", "B-x"], "id": 1}, "tokens", "ner_tags"),
    "answers": (
        {"id": "x", "context": "a b", "question": "which?",
         "answers": {"text": ["a"], "answer_start": [0]}},
        "question", "answers",
    ),
    "choices": ({"question": "q?", "options": ["a", "b"], "answer": "A"}, "question", "answer"),
}  # fmt: skip


@pytest.mark.parametrize("wants", OTHERS)
def test_columns_of_other_tasks_are_guessed(tmp_path: Path, wants: str) -> None:
    row, text_column, label_column = OTHERS[wants]
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 30)
    options = chosen(str(file), wants).options
    assert (options.text, options.label) == (text_column, label_column)
    if wants == "choices":
        assert options.choices == "options"


@pytest.mark.parametrize(
    ("header", "choices"),
    [
        ("question,A,B,C,D,answer", ("A", "B", "C", "D")),
        ("id,ctx,ending0,ending1,label", ("ending0", "ending1")),
        ("context,choice_1,choice_2,choice_3,label", ("choice_1", "choice_2", "choice_3")),
    ],
)
def test_choices_in_several_columns_are_guessed(
    tmp_path: Path, header: str, choices: tuple[str, ...]
) -> None:
    names = tuple(header.split(","))
    kinds = "".join("i" if n == "id" else "l" if n in ("answer", "label") else "t" for n in names)
    options = chosen(write(tmp_path / "a.csv", names, kinds), "choices").options
    assert options.choices == choices


def test_the_table_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adapterhub.data import tables
    from adapterhub.data.examples import read_examples

    source, calls = write(tmp_path / "a.csv", ("review", "stars"), "tb"), []
    read = tables.read_delimited
    monkeypatch.setattr(tables, "read_delimited", lambda *a, **b: calls.append(a) or read(*a, **b))
    choice = chosen(source)
    assert len(read_examples(source, choice.options, labelled=True)) == 60
    assert len(calls) == 1
    Path(source).write_text("review,stars\nanother file now,1\n")
    assert len(read_examples(source, choice.options, labelled=True)) == 1
