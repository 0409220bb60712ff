"""Chats with pictures: formats, places of pictures, and rows that are refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.data import image_chats
from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.image_chats import PictureChat, chat_choice
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from tests.kit import media
from tests.kit.data import write_json_lines, write_tsv


@pytest.fixture
def pictures(tmp_path):
    return media.write_red(tmp_path)


def text(words):
    return {"type": "text", "text": words}


def turn(role, *parts):
    return {"role": role, "content": list(parts)}


def read(file, labelled=True, **options):
    choice = chat_choice(str(file), DataOptions(**options), "train")
    assert choice is not None
    return image_chats.read_chats(
        str(file), choice.options, "train", open_picture, labelled=labelled
    )


PLACE = {"type": "image"}
TWO = (("user", (None, None, "which is red?")),)
ROWS = {
    "OpenAI": {
        "messages": [turn("user", PLACE, PLACE, text("which is red?")),
                     turn("assistant", text("the second"))],
        "images": ["0.png", "1.png"],
    },
    "texts": {
        "messages": [{"role": "user", "content": "<image><image>\nwhich is red?"},
                     {"role": "assistant", "content": "the second"}],
        "images": ["0.png", "1.png"],
    },
    "LLaVA": {
        "id": "x",
        "image": ["0.png", "1.png"],
        "conversations": [{"from": "human", "value": "<image>\n<image>\nwhich is red?"},
                          {"from": "gpt", "value": "the second"}],
    },
    "without places": {
        "images": ["0.png", "1.png"],
        "conversations": [{"from": "human", "value": "which is red?"},
                          {"from": "gpt", "value": "the second"}],
    },
    "own pictures": {
        "messages": [turn("user", {"type": "image", "image": "0.png"},
                          {"type": "image_url", "image_url": {"url": "1.png"}},
                          text("which is red?")),
                     turn("assistant", text("the second"))],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_formats_say_the_same(form, pictures):
    file = write_json_lines(pictures / "rows.jsonl", [ROWS[form]])
    (chat,) = read(file)
    assert isinstance(chat, PictureChat)
    assert chat.turns == TWO
    assert chat.label == "the second"
    assert (chat.name, chat.question) == ("0.png, 1.png", "which is red?")
    assert [p.decoded(open_picture).getpixel((0, 0))[0] for p in chat.pictures] == [0, 40]
    (asked,) = read(file, labelled=False)
    assert asked == PictureChat(chat.sha256, TWO)


def test_a_chat_of_several_turns_keeps_its_order(pictures):
    """Pictures in a later message, with one of its own between those of the column."""
    own = {"type": "image", "path": "2.png"}
    row = {"messages": [turn("system", text("be short")), turn("user", PLACE, text("what?")),
                        turn("assistant", text("black")),
                        turn("user", text("and"), own, text("or"), PLACE),
                        turn("assistant", text("both"))],
           "images": ["0.png", "1.png"]}  # fmt: skip
    (chat,) = read(write_json_lines(pictures / "rows.jsonl", [row]))
    assert [p.name for p in chat.pictures] == ["0.png", "2.png", "1.png"]
    assert chat.turns == (
        ("system", ("be short",)),
        ("user", (None, "what?")),
        ("assistant", ("black",)),
        ("user", ("and", None, "or", None)),
    )
    assert (chat.question, chat.label) == ("and or", "both")


def test_parquet_has_bytes_and_missing_keys(pictures):
    """As data sets of the Hub are stored: every part has all keys, and cells are mappings."""
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    chats = [[turn("user", {"type": "image", "text": None}, text("what?")),
              turn("assistant", text("red"))]]  # fmt: skip
    cells = [[{"bytes": media.red_png(200), "path": None}]]
    table = pa.table({"images": cells, "messages": pa.array(chats, pa.list_(message))})
    pq.write_table(table, pictures / "rows.parquet")
    (chat,) = read(pictures / "rows.parquet")
    assert chat.turns == (("user", (None, "what?")),)
    assert chat.pictures[0].decoded(open_picture).getpixel((0, 0)) == (200, 0, 0)


def test_options_name_the_columns_and_other_tables_are_no_chats(pictures):
    row = {"talk": ROWS["OpenAI"]["messages"], "shots": ["0.png", "1.png"], "messages": "no"}
    for other in (
        {"image": "0.png", "question": "what?", "answer": "red"},
        {"messages": "a text", "images": ["0.png"]},
        {"messages": [1, 2], "images": ["0.png"]},
        row,
    ):
        file = write_json_lines(pictures / "rows.jsonl", [other])
        assert chat_choice(str(file), DataOptions(), "train") is None
    (chat,) = read(file, text="talk", pair="shots")
    assert chat.turns == TWO


FINE = ROWS["OpenAI"]["messages"]
WRONG = {
    "the messages have 2 places for images, and 1 are given": {
        "messages": FINE, "images": ["0.png"]},
    "the chat has no image": {"messages": [turn("user", text("hi")),
                                             turn("assistant", text("ho"))], "images": []},
    "the last message is of the role 'user'": {"messages": FINE[:1], "images": ["0.png", "1.png"]},
    "the answer is empty": {"messages": [FINE[0], turn("assistant")],
                            "images": ["0.png", "1.png"]},
    "the answer has an image": {"messages": [FINE[0], turn("assistant", PLACE)],
                                 "images": ["0.png", "1.png", "2.png"]},
    "no message of the user is in front of": {
        "messages": [FINE[0], FINE[1], FINE[1]], "images": ["0.png", "1.png"]},
    "no message of the user is there for": {"messages": [turn("assistant", text("x"))],
                                            "images": ["0.png"]},
    "the type 'video'": {"messages": [turn("user", {"type": "video"}), FINE[1]],
                         "images": ["0.png"]},
    "expected role and content": {"messages": [{"who": "x"}], "images": ["0.png"]},
    "the list of messages is missing": {"messages": None, "images": ["0.png"]},
    "gone.png": {"messages": FINE, "images": ["0.png", "gone.png"]},
}  # fmt: skip


HEADERS = {
    "image\tquestion\tanswer": "what?",
    "photo\tprompt\tresponse": "what?",
    "file_name\ttext\tanswer": "what?",
    "image\tcontext\tlabel": "",  # a usual name of second texts, and none of questions
}


@pytest.mark.parametrize("problem", WRONG)
def test_an_invalid_row_is_told(problem, pictures):
    file = write_json_lines(pictures / "rows.jsonl", [ROWS["OpenAI"], WRONG[problem]])
    with pytest.raises(DataError, match="invalid rows") as error:
        read(file)
    assert "line 2" in error.value.offenders[0]
    assert problem in error.value.offenders[0]
    if problem == "the chat has no image":
        assert len(read(file, skip_empty=True)) == 1


# Tables of pictures with questions and answers: columns by name, and rows that are refused.


WANTED = WANTS["images with questions"]


def read_questions(file, labelled=True, **options):
    given = DataOptions(**options)
    return image_chats.read_asked(
        str(file), given, "train", WANTED, open_picture, labelled=labelled
    )


def triples(examples):
    return [(e.name, e.question, e.label) for e in examples]


@pytest.mark.parametrize("header", HEADERS)
def test_columns_are_found_by_their_names(header, pictures):
    rows = [("0.png", "what?", "red"), ("1.png", "what?", "x")]
    file = write_tsv(pictures / "vqa.tsv", rows, header)
    question = HEADERS[header]
    assert triples(read_questions(file)) == [
        ("0.png", question, "red"),
        ("1.png", question, "x"),
    ]
    file = write_tsv(pictures / "c.tsv", [("0.png", "a red square")], "image\ttext")
    assert triples(read_questions(file)) == [("0.png", "", "a red square")]  # captions
    file = write_tsv(pictures / "odd.tsv", [("0.png", "x", "y")], "image\tfirst\tsecond")
    with pytest.raises(DataError, match="cannot tell which columns"):
        choose_columns(str(file), DataOptions(), "train", WANTED)


def test_options_name_the_columns_of_questions_and_cells_may_be_bytes(pictures):
    cells = [{"bytes": media.red_png(i), "path": f"in-cell-{i}.png"} for i in range(2)]
    table = {"p": cells, "q": ["a?", "b?"], "a": [1, 2], "question": ["no"] * 2,
             "answer": ["no"] * 2}  # fmt: skip
    pq.write_table(pa.table(table), pictures / "rows.parquet")
    named = {"text": "p", "pair": "q", "label": "a"}
    found = read_questions(pictures / "rows.parquet", **named)
    assert triples(found) == [("in-cell-0.png", "a?", "1"), ("in-cell-1.png", "b?", "2")]
    assert found[0].decoded(open_picture).size == (4, 4)
    found = read_questions(pictures / "rows.parquet", labelled=False, text="p", pair="q")
    assert triples(found)[0] == ("in-cell-0.png", "a?", None)


def test_all_invalid_rows_are_told(pictures):
    (pictures / "broken.png").write_bytes(media.red_png(1)[:40])
    cells = [("0.png", "", "x"), ("1.png", "q", " "), ("gone.png", "q", "x"),
             ("broken.png", "q", "x"), ("2.png", "q", "fine")]  # fmt: skip
    rows = [dict(zip(("image", "question", "answer"), row, strict=True)) for row in cells]
    file = write_json_lines(pictures / "rows.jsonl", rows)
    with pytest.raises(DataError, match="invalid rows") as error:
        read_questions(file)
    told = "\n".join(error.value.offenders)
    for part in ("line 1: 'question' is empty", "line 2: 'answer' is empty", "gone.png",
                 "line 4: 'broken"):  # fmt: skip
        assert part in told
    file = write_json_lines(pictures / "gaps.jsonl", [rows[0], rows[1], rows[4]])
    assert [e.name for e in read_questions(file, skip_empty=True)] == ["2.png"]
