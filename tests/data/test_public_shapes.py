"""Public data sets by their columns: the task that each means, what is read, and what is not.

Each line of public_shapes.jsonl is a form of data: a row, and the task, the columns that are read,
and those that are named as not used; or the beginning of the refusal. In rows, {s0} to {s9} are
sentences, {h0} to {h9} their beginnings, {w0} to {w7} words, {i} is the number of the row, and
{"$": [...]} are values in turn.
"""

import json
import random
import shlex
import wave
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.recipe.recipe import Recipe
from adapterhub.training.run_data import read_data
from tests.kit.data import write_json_lines

ROWS = 24
NOUNS = [
    "river", "mountain", "teacher", "doctor", "kitchen", "market", "garden", "window", "bridge",
    "train", "letter", "winter", "engine", "painter", "soldier", "village", "island", "forest",
    "castle", "library",
]  # fmt: skip
VERBS = ["crosses", "paints", "builds", "follows", "watches", "opens", "repairs", "carries"]
LINES = (Path(__file__).parent / "public_shapes.jsonl").read_text().splitlines()
SHAPES = {shape["shape"]: shape for shape in map(json.loads, LINES)}


@cache
def sentence(row, number):
    draw = random.Random(row * 31 + number).choice
    begin = f"the {draw(NOUNS)} {draw(VERBS)} the {draw(NOUNS)}"
    return f"{begin} near the {draw(NOUNS)} number {row * 7 + number}"


def filled(value, row):
    """Return the value of a row."""
    if isinstance(value, str):
        value = value.replace("{i}", str(row))
        for n in range(10) if "{" in value else ():
            value = value.replace(f"{{s{n}}}", sentence(row, n))
            value = value.replace(f"{{h{n}}}", sentence(row, n).split(" near")[0])
            value = value.replace(f"{{w{n}}}", random.Random(row * 17 + n + 5).choice(NOUNS))
        return value
    if isinstance(value, list):
        return [filled(item, row) for item in value]
    if not isinstance(value, dict):
        return value
    if "$words" in value:
        return filled(value["$words"], row).split()
    if "$" in value:
        return row if value["$"] == "i" else value["$"][row % len(value["$"])]
    return {name: filled(item, row) for name, item in value.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("shapes")
    for row in range(ROWS):
        Image.new("RGB", (8, 8), (row, 0, 0)).save(made / f"i{row}.png")
        with wave.open(str(made / f"a{row}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(bytes([row, 0]) * 1600)
    return made


def run_data(folder, shape, task=None):
    rows = [filled(SHAPES[shape]["row"], row) for row in range(ROWS)]
    file = write_json_lines(folder / "rows.jsonl", rows)
    data = DataOptions(train=str(file), eval="none")
    return read_data(Recipe(backbone="b", task=task, output="o", data=data))


def outcome(data):
    """Return what a form of data becomes, as its line has it."""
    names = {n: getattr(data.options, n) for n in ("text", "pair", "label", "choices")}
    if data.spec != "multiple-choice":
        del names["choices"]
    unused = [note.partition(": ")[2] for note in data.notes if note.startswith("columns not used")]
    assert len(unused) <= 1
    columns = "".join(unused).replace(f" ({ROWS} rows)", "")
    return {"task": data.spec, "read": {n: v for n, v in names.items() if v}, "unused": columns}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_public_form_of_data_is_read_whole_or_refused(folder, shape):
    """Every column is read, or named once."""
    known = {name: value for name, value in SHAPES[shape].items() if name not in ("shape", "row")}
    try:
        data = run_data(folder, shape)
    except DataError as error:
        problem = str(error).splitlines()[0].replace(str(folder / "rows.jsonl"), "")
        assert known == {"refused": problem}
        return
    assert json.loads(json.dumps(outcome(data))) == known
    told = "".join(note for note in data.notes if note.startswith("columns not used: "))
    for name, value in filled(SHAPES[shape]["row"], 0).items():
        texts = _texts(value)
        if texts and not all(text in repr(data.train[0]) for text in texts):
            assert f"{name} (" in told or f"{name}." in told or name in _NAMES_ALONE, name


# Files, which are read and known by their content; numbers of tags, and marks of choices.
_NAMES_ALONE = {"img", "image", "audio", "choices", "answerKey", "answers", "conversations"}


def _texts(value):
    """Return the sentences in a value."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [text for item in inner for text in _texts(item)]
    is_sentence = isinstance(value, str) and len(value.split()) > 3 and "\n" not in value
    return [value] if is_sentence else []


FORMLESS = [n for n, shape in SHAPES.items() if "no task reads whole" in shape.get("refused", "")]


@pytest.mark.parametrize("shape", FORMLESS)
def test_what_is_typed_for_questions_without_a_known_form_reads_them(folder, shape):
    with pytest.raises(DataError) as error:
        run_data(folder, shape)
    if error.value.hint.startswith("write them"):
        return
    words = shlex.split(error.value.hint)
    named = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    file, task = str(folder / "rows.jsonl"), named.pop("task")
    data = DataOptions(train=file, eval="none", **named)
    assert len(read_data(Recipe(backbone="b", task=task, output="o", data=data)).train) == ROWS


def test_choices_are_those_of_the_key_and_counted_from_what_the_labels_have(folder):
    for shape in ("arc", "arc numbers", "openbookqa", "commonsense_qa"):
        for row, example in enumerate(run_data(folder, shape).train):
            given = filled(SHAPES[shape]["row"], row)
            choices = dict(zip(given["choices"]["label"], given["choices"]["text"], strict=True))
            assert example.choices[example.label] == choices[given["answerKey"]]
    for shape, first in (("winogrande", 1), ("social_iqa", 1), ("swag", 0)):
        for row, example in enumerate(run_data(folder, shape).train):
            given = filled(SHAPES[shape]["row"], row)
            assert example.label == int(given.get("label", given.get("answer"))) - first


def test_an_answer_that_was_judged_bad_is_not_learned(folder):
    for task in (None, "causal-lm", "seq2seq"):
        with pytest.raises(DataError, match=r"unpaired preferences \(KTO\)"):
            run_data(folder, "kto", task)
    file = str(folder / "rows.jsonl")
    named = DataOptions(train=file, eval="none", text="prompt", label="completion")
    data = read_data(Recipe(backbone="b", task="causal-lm", output="o", data=named))
    assert "columns not used: label (24 rows)" in data.notes
