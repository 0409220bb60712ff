"""Columns are guessed where there is no doubt; a doubt is one error that says what to type."""

import csv
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data import chat_formats
from adapterhub.data.column_names import KNOWN, NEVER
from adapterhub.data.columns import WANTS, ColumnProfile, choose_columns, profile_of
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table, numbers_rows, plain_name
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError
from tests.kit.data import write_json_lines

_TEXT = "the movie was really good bad boring wonderful actors plot and never again"
_WORDS = _TEXT.split()
LABELS = ("pos", "neg", "neutral")


def text(draw):
    return " ".join(draw.choices(_WORDS, k=draw.randint(5, 15))) + draw.choice((".", ", yes!"))


def write(path, header, kinds, rows=60):
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


def chosen(source, wants="classes", **options):
    return choose_columns(source, DataOptions(**options), "train", WANTS[wants])


# header, kinds of cells, what is wanted: text, pair, label (or None for a doubt)
LAYOUTS = [
    ("text,label", "tc", "classes", "text", None, "label"),
    ("Review Text,Rating", "tb", "classes", "Review Text", None, "Rating"),
    ("v1,v2,,", "ctee", "classes", "v2", None, "v1"),
    (",text,target", "itb", "classes", "text", None, "target"),
    ("id,comment,toxic", "itb", "classes", "comment", None, "toxic"),
    ("Quality,#1 ID,#2 ID,#1 String,#2 String", "biitt", "classes", "#1 String", "#2 String",
     "Quality"),
    ("Class Index,Title,Description", "btt", "classes", "{Title}. {Description}", None,
     "Class Index"),
    ("title,text,rating", "ttb", "classes", "text", None, "rating"),
    ("text,label,label_text", "tbc", "classes", "text", None, "label"),
    ("tweet_id,airline_sentiment,airline,text,tweet_created", "icutd", "classes", "text", None,
     "airline_sentiment"),
    (None, "tc", "classes", "0", None, "1"),
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
def test_columns_of_common_layouts_are_guessed(tmp_path, layout):
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
def test_a_doubt_shows_the_columns_and_what_to_type(tmp_path, layout):
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
def test_a_guess_is_never_an_id_or_a_text_as_a_label(tmp_path_factory, kinds, names, seed):
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


def test_columns_that_are_given_are_taken_and_the_rest_is_guessed_and_told(tmp_path):
    source = write(tmp_path / "a.csv", ("review text", "stars"), "tb")
    assert chosen(source).notes == (
        "a.csv: comma-separated, 60 rows; columns: review text, stars",
        "guessed: --text 'review text' --label stars",
    )
    source = write(tmp_path / "a.csv", ("sentence1", "sentence2", "label"), "ttc")
    choice = chosen(source, text="sentence2")
    assert (choice.options.text, choice.options.pair) == ("sentence2", None)
    with pytest.raises(DataError, match="columns not found"):
        chosen(source, text="sentence3").table.take(["sentence3"])
    recorded = DataOptions(text="text")  # a column that later data lacks is not guessed
    choice = choose_columns(source, recorded, "eval", WANTS["classes"])
    with pytest.raises(DataError, match="columns not found"):
        choice.table.take([choice.options.text_column])


RECORDED = DataOptions(text="review", label="stars")
PAIRS = DataOptions(text="premise", pair="hypothesis", label="label")
NUMBERED = DataOptions(text="3", label="1")
LATER = [  # recorded columns, header and cells of other data, whether it has labels, what is read
    (RECORDED, None, "t", False, ("0", None, None)),
    (RECORDED, None, "bt", True, ("1", None, "0")),
    (PAIRS, None, "tt", False, ("0", "1", None)),
    (NUMBERED, None, "ubet", True, ("3", None, "1")),
    (NUMBERED, ("sentence", "label"), "tb", True, ("sentence", None, "label")),
]


@pytest.mark.parametrize(("recorded", "header", "kinds", "labelled", "expected"), LATER)
def test_recorded_columns_are_found_in_later_data(
    tmp_path, recorded, header, kinds, labelled, expected
):
    """Data without names are read by their look; numbers are columns of such data only."""
    source = write(tmp_path / "a.csv", header, kinds)
    choice = choose_columns(source, recorded, "eval", WANTS["classes"], labelled=labelled)
    options = choice.options
    assert (options.text, options.pair, options.label if labelled else None) == expected
    if kinds == "t":
        assert "guessed: --text 0" in choice.notes


# What columns contain.


TEXTS = [f"this is the text number {i} of a few" for i in range(40)]
CLASSES = ["pos", "neg"] * 20


def profile(*values, name="x"):
    return ColumnProfile(name, tuple(values))


KINDS = ("is_text", "is_class", "is_number", "is_words", "is_tags", "is_answers")
CELLS = {
    "texts": (TEXTS, {"is_text"}),
    "chinese": ([f"这部电影非常好看我很喜欢它的故事{i}" for i in range(30)], {"is_text"}),
    "classes": (CLASSES, {"is_class"}),
    "numbers of classes": (["0", "1"] * 20, {"is_class", "is_number"}),
    "numbers": ([f"{i / 7:.3f}" for i in range(40)], {"is_number"}),
    "decimal commas": ([f"{i},5" for i in range(40)], {"is_number"}),
    "words": ([["a", "b"], ["c"]], {"is_words"}),
    "tags": ([["O", "B-x"], ["O"]], {"is_words", "is_tags"}),
    "answers": ([{"text": ["a"], "answer_start": [0]}], {"is_answers"}),
    "ids": ([f"gj{i:04}" for i in range(40)], set()),
    "links": ([f"https://example.org/{i}" for i in range(40)], set()),
    "dates": ([f"2024-01-{i % 28 + 1:02} 10:00 UTC" for i in range(40)], set()),
    "one value": (["same"] * 40, set()),
    "nothing": ([], set()),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_are_recognized_by_their_look(case):
    values, expected = CELLS[case]
    found = profile(*values)
    assert {kind for kind in KINDS if getattr(found, kind)} == expected
    found = profile(*values, name="doc_id")  # which numbers rows
    assert not any((found.is_text, found.is_class, found.is_number))
    column = [None, "", " ", "a", 3]
    table = Table("x", "row", ("a",), range(5), lambda name: column)
    assert profile_of(table, "a").values == ("a", 3)


# Usual names of columns.


def test_columns_that_number_or_date_rows_are_known():
    known = ("id", "ID", "user_id", "tweetId", "docID", "#1 ID", "index", "", "Unnamed: 0", "date")
    assert all(map(numbers_rows, known))
    assert not any(map(numbers_rows, ("text", "label", "said", "paid", "kid", "valid", "Idea")))
    assert all(name == plain_name(name) for name in KNOWN | NEVER)


# Formats of instructions and chats are recognized by their columns.


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
FORMATS = {
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, "{instruction}\n\n{input}",
               "output"),
    "instruction and output": ({"instruction": "go", "output": "ok"}, "instruction", "output"),
    "prompt and completion": ({"prompt": "a", "completion": "b", "id": 3}, "prompt", "completion"),
    "OpenAI messages": ({"messages": TURNS}, "messages", None),
    "ShareGPT": ({"id": "x", "conversations": SHARED}, "conversations", None),
}  # fmt: skip
NONE = [
    {"text": "a", "label": "b", "instruction": "c", "output": "d"},
    {"question": "a", "answer": "b"},
    {"messages": "no list"},
    {"messages": [{"role": "user"}]},
    {"conversations": [[]]},
    {"prompt": ["a"], "completion": ["b"]},
    {"prompt": "a", "completion": "b", "response": "c"},
    {"messages": TURNS, "conversations": SHARED},
]


def write_rows(folder, row):
    return str(write_json_lines(folder / "a.jsonl", [row] * 3))


@pytest.mark.parametrize("name", FORMATS)
def test_columns_that_are_left_out_are_told(tmp_path, name):
    row, text, label = FORMATS[name]
    source = write_rows(tmp_path, row | {"system": "Be brief.", "history": [["a", "b"]]})
    assert chat_formats.is_chat(source, DataOptions(), "train") is (label is None)
    found = chat_formats.instruction_columns(source, DataOptions(), "train")
    assert (found is None) == (label is None)
    choice = found or chat_formats.chat_column(source, DataOptions(), "train")
    assert (choice.options.text, choice.options.label) == (text, label or "label")
    assert f"not read: {'history' if label is None else 'system, history'};" in choice.notes[-1]
    notes = " ".join(choice.notes)
    assert f"read as {name}" in notes
    assert ("template, system" in notes) == (label is None)
    others = {"Alpaca": "input", "ShareGPT": "id"}
    if name in others:  # a named column turns recognition off
        named = DataOptions(text=others[name])
        assert chat_formats.instruction_columns(source, named, "train") is None
        assert not chat_formats.is_chat(source, named, "train")


@pytest.mark.parametrize("row", NONE, ids=str)
def test_other_data_is_no_format(tmp_path, row):
    source = write_rows(tmp_path, row)
    assert chat_formats.recognize_format(read_table(source, DataOptions(), "train")) is None
    assert chat_formats.instruction_columns(source, DataOptions(), "train") is None
    assert not chat_formats.is_chat(source, DataOptions(), "train")


def test_messages_have_the_roles_of_templates():
    said = (("user", "hi"), ("assistant", "hello"))
    assert chat_formats.messages_of(SHARED) == chat_formats.messages_of(TURNS) == said
    assert chat_formats.messages_of([{"role": "tool", "content": "x"}]) == (("tool", "x"),)
    for other in (None, "hi", [], [{"role": 1, "content": "x"}], [3], {"role": "user"}):
        assert chat_formats.messages_of(other) is None
