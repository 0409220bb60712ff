"""Tables of pictures with questions and answers: columns by name, and rows that are refused."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.examples import data_hash
from adapterhub.data.image_chats import AskedPicture, ask, read_asked
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from tests.kit import media
from tests.kit.data import write_json_lines, write_tsv

WANTED = WANTS["asked pictures"]


@pytest.fixture
def pictures(tmp_path):
    return media.write_red(tmp_path)


def read(file, labelled=True, **options):
    given = DataOptions(**options)
    return read_asked(str(file), given, "train", WANTED, open_picture, labelled=labelled)


def asked(examples):
    return [(e.name, e.question, e.label) for e in examples]


@pytest.mark.parametrize(
    ("header", "question"),
    [
        ("image\tquestion\tanswer", "what?"),
        ("photo\tprompt\tresponse", "what?"),
        ("file_name\ttext\tanswer", "what?"),
        ("image\tcontext\tlabel", ""),  # a usual name of second texts, and none of questions
    ],
)
def test_columns_are_found_by_their_names(header, question, pictures):
    file = write_tsv(pictures / "vqa.tsv", [("0.png", "what?", "red"), ("1.png", "what?", "x")],
                     header)  # fmt: skip
    assert asked(read(file)) == [("0.png", question, "red"), ("1.png", question, "x")]


def test_captions_have_no_question(pictures):
    file = write_tsv(pictures / "c.tsv", [("0.png", "a red square")], "image\ttext")
    assert asked(read(file)) == [("0.png", "", "a red square")]


def test_options_name_the_columns(pictures):
    rows = [{"p": "0.png", "q": "how many?", "a": 3, "question": "no", "answer": "no"}]
    file = write_json_lines(pictures / "rows.jsonl", rows)
    found = read(file, text="p", pair="q", label="a")
    assert asked(found) == [("0.png", "how many?", "3")]
    assert asked(read(file, labelled=False, text="p", pair="q")) == [("0.png", "how many?", None)]


def test_pictures_may_be_bytes_in_cells(pictures):
    cells = [{"bytes": media.red_png(i), "path": f"in-cell-{i}.png"} for i in range(2)]
    table = pa.table({"image": cells, "question": ["a?", "b?"], "answer": ["1", "2"]})
    pq.write_table(table, pictures / "rows.parquet")
    found = read(pictures / "rows.parquet")
    assert asked(found) == [("in-cell-0.png", "a?", "1"), ("in-cell-1.png", "b?", "2")]
    assert found[0].decoded(open_picture).size == (4, 4)


def test_all_invalid_rows_are_told(pictures):
    (pictures / "broken.png").write_bytes(media.red_png(1)[:40])
    rows = [
        {"image": "0.png", "question": "", "answer": "x"},
        {"image": "1.png", "question": "q", "answer": " "},
        {"image": "gone.png", "question": "q", "answer": "x"},
        {"image": "broken.png", "question": "q", "answer": "x"},
        {"image": "2.png", "question": "q", "answer": "fine"},
    ]
    file = write_json_lines(pictures / "rows.jsonl", rows)
    with pytest.raises(DataError, match="invalid rows") as error:
        read(file)
    told = "\n".join(error.value.offenders)
    parts = (
        "line 1: 'question' is empty",
        "line 2: 'answer' is empty",
        "gone.png",
        "line 4: 'broken",
    )
    assert [part in told for part in parts] == [True] * 4
    file = write_json_lines(pictures / "gaps.jsonl", [rows[0], rows[1], rows[4]])
    assert [e.name for e in read(file, skip_empty=True)] == ["2.png"]


def test_an_answer_column_in_doubt_is_asked_for(pictures):
    file = write_tsv(pictures / "odd.tsv", [("0.png", "x", "y")], "image\tfirst\tsecond")
    with pytest.raises(DataError, match="cannot tell which columns"):
        choose_columns(str(file), DataOptions(), "train", WANTED)


def test_the_question_and_the_answer_are_content(pictures):
    one = ask(str(pictures / "0.png"), "what?", open_picture)
    same = ask(str(pictures / "0.png"), "what?", open_picture)
    assert isinstance(one, AskedPicture)
    assert one == same
    others = [ask(str(pictures / "0.png"), "who?", open_picture), one.with_label("red"),
              ask(str(pictures / "1.png"), "what?", open_picture)]  # fmt: skip
    assert one not in others
    assert len({data_hash([example]) for example in (one, same, *others)}) == 4
