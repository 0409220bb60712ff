"""Data of the package: samples, and the corpus of docstrings of the standard library."""

import csv
import functools
import io
import json
import sysconfig
from pathlib import Path

import pytest

from adapterhub.data import docstrings
from adapterhub.data.docstrings import PARTS, load_docstrings
from adapterhub.data.options import DataOptions
from adapterhub.data.samples import SAMPLES, sample_table, write_sample_folder
from adapterhub.data.tables import read_table
from adapterhub.errors import ConfigError

TABLES = [name for name, sample in SAMPLES.items() if sample.table]
FOLDERS = [name for name, sample in SAMPLES.items() if sample.folder]


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_equal_at_each_call_and_held_out_rows_are_others(name):
    train, held_out = sample_table(name), sample_table(name, held_out=True)
    assert train == sample_table(name)
    texts = [{json.dumps(cell) for cell in next(iter(part.values()))} for part in (train, held_out)]
    assert not texts[0] & texts[1]
    assert min(map(len, texts)) >= 36
    few = sample_table(name, 20)
    assert {len(cells) for cells in few.values()} == {20}
    assert {json.dumps(cell) for cell in next(iter(few.values()))} <= texts[0]
    for column, cells in few.items():
        if column not in ("text", "review", "messages"):
            assert len(set(cells)) > 1, f"{column} varies in a few rows"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet", ""])
def test_a_written_table_is_read_back(name, suffix, adapterhub, tmp_path):
    columns = sample_table(name, 24)
    path = tmp_path / f"table.{suffix or 'txt'}"
    code, out, err = adapterhub("sample", name, *([path] if suffix else []), "--rows", "24")
    assert code == 0, err
    if not suffix:
        path = path.with_suffix(".jsonl" if name == "chats" else ".csv")
        path.write_text(out, encoding="utf-8")
    elif name == "chats" and suffix in ("csv", "tsv"):
        lines = io.StringIO(path.read_text(encoding="utf-8"))
        rows = list(csv.DictReader(lines, delimiter=",\t"[suffix == "tsv"]))
        assert [json.loads(row["messages"]) for row in rows] == columns["messages"]
        return
    table = read_table(str(path), DataOptions(train=str(path)), "train")
    for column, cells in columns.items():
        read = list(table.column(column))
        if column == "messages":
            read = [json.loads(c) if isinstance(c, str) else list(c) for c in read]
        assert [c or None for c in read] == cells, column


@pytest.mark.parametrize("name", FOLDERS)
def test_files_are_equal_at_each_call(name, tmp_path):
    counts = write_sample_folder(name, tmp_path / "a", 12)
    assert counts == {"train": 12, "eval": 3}
    write_sample_folder(name, tmp_path / "b", 12)
    files = [
        {p.relative_to(tmp_path / part): p.read_bytes() for p in (tmp_path / part).rglob("*.*")}
        for part in "ab"
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 15 + 2 * (name in ("squares", "speech"))
    table = read_table(str(tmp_path / "a/train"), DataOptions(train="x"), "train")
    assert len(table.lines) == 12


def test_the_list_and_refusals(adapterhub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sorted([*TABLES, *FOLDERS]) == sorted(SAMPLES)
    assert all("PATH" in sample.example for sample in SAMPLES.values())
    out = adapterhub("sample")[1]
    assert [line.split()[0] for line in out.splitlines()] == list(SAMPLES)
    assert adapterhub("sample", "tickets", "--rows", "1")[1].startswith("text,")
    Path("there.csv").touch()
    for words, message in {
        ("digts", "x"): "did you mean 'digits'",
        ("digits",): "no folder for digits",
        ("digits", "x", "--held-out"): "--held-out",
        ("tickets", "there.csv"): "is already there",
        ("tickets", "x.xml"): "PATH x.xml is of an unknown format",
    }.items():
        code, _, err = adapterhub("sample", *words)
        assert (code, message in err) == (2, True), (words, err)
    with pytest.raises(ConfigError, match="not a table"):
        sample_table("digits")
    with pytest.raises(ConfigError, match="not of files"):
        write_sample_folder("tickets", tmp_path)


# The corpus of docstrings.


STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(autouse=True, scope="module")
def parsed_once():
    """Read each file of the library once: two seconds for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docstrings, "_paragraphs", functools.cache(docstrings._paragraphs))
        yield


@pytest.fixture(scope="module")
def sides():
    return load_docstrings()


def test_the_splits_share_no_module_and_no_text_and_follow_from_the_seed(sides):
    modules = {text: (label, number) for label, parts in docstrings._corpus(STDLIB)
               for number, texts in enumerate(parts) for text in texts}  # fmt: skip
    train, evaluation = ({modules[e.text] for e in side} for side in sides)
    assert len(train) > 50
    assert len(evaluation) > 20
    assert not train & evaluation
    keys = [docstrings._key(e.text) for side in sides for e in side]
    assert len(keys) == len(set(keys))
    assert load_docstrings(0) == sides != load_docstrings(1)
    names = [name for parts in PARTS.values() for name in parts.split()]
    assert len(names) == len(set(names)) > 100  # each module has one class
