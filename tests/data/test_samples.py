"""Data of the package: samples, and the corpus of docstrings of the standard library."""

from __future__ import annotations

import collections
import csv
import functools
import io
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from adapterhub.data import docstrings
from adapterhub.data.docstrings import PARTS, load_docstrings
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.samples import SAMPLES, sample_table, write_sample_folder
from adapterhub.data.tables import read_table
from adapterhub.errors import ConfigError, DataError
from tests.kit.selection import ALL

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


def write_modules(stdlib, texts):
    """Write a library with two large modules per class, and those in `texts`."""
    stdlib.mkdir(exist_ok=True)
    for label, modules in PARTS.items():
        for name in modules.split()[:2]:
            doc = f"The {label} text {{}} of module {name}, in full length."
            lines = [f"def f{i}(): '''{doc.format(i)}'''" for i in range(40)]
            (stdlib / f"{name}.py").write_text("\n".join(lines))
    for name, docs in texts.items():
        path = stdlib / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"def f{i}(): {doc!r}" for i, doc in enumerate(docs)))


def test_the_corpus_is_large_balanced_and_of_short_paragraphs(sides):
    train, evaluation = sides
    assert 1500 <= len(train) <= 2500
    assert 500 <= len(evaluation) <= 800
    few = load_docstrings(0, limit_per_class=20)
    for part, most in ((train, 1.5), (evaluation, 1.5), ([*few[0], *few[1]], 1.11)):
        counts = collections.Counter(e.label for e in part)
        assert set(counts) == set(PARTS)
        assert max(counts.values()) < most * min(counts.values())
    assert max(counts.values()) <= 21
    for e in (e for side in sides for e in side):
        assert 40 <= len(e.text) <= 400
        assert " ".join(e.text.split()) == e.text
        assert e.pair is None


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


def test_duplicates_are_dropped_and_first_paragraphs_are_used(tmp_path):
    shared = "This text occurs in the modules of two classes, twice."
    copied = "This text occurs in two modules of one class alone."
    long = "One paragraph that goes\n    over as many as two lines.\n\n    More, in as many as two."
    write_modules(
        tmp_path,
        {
            "re": [shared, copied, "Too short.", long],
            "json": [copied.upper(), "x" * 401, ">>> this is code, not a sentence of English"],
            "uuid": [shared.replace(",", " ;")],
            "json/tests/deep": ["This text is in a folder that holds tests of the library."],
        },
    )
    texts = corpus_texts(tmp_path, "text")
    assert len(texts) == 82
    assert copied.upper() in texts  # json comes before re
    assert copied not in texts
    assert "One paragraph that goes over as many as two lines." in texts
    assert not any("two classes" in text for text in (*texts, *corpus_texts(tmp_path, "data")))
    assert not any("folder" in text for text in texts)


def corpus_texts(stdlib, label):
    return [text for module in dict(docstrings._corpus(stdlib))[label] for text in module]


def test_the_corpus_is_independent_of_the_hash_seed_and_imports_none_of_its_modules(monkeypatch):
    """By default, with every third module: a new process reads all anew."""
    names = {label: names.split() for label, names in PARTS.items()}
    parts = {label: " ".join(each[:: 1 if ALL else 3]) for label, each in names.items()}
    monkeypatch.setattr(docstrings, "PARTS", parts)
    monkeypatch.setattr(docstrings, "_corpus", docstrings._corpus.__wrapped__)
    code = (
        "import sys, sysconfig\n"
        "from adapterhub.data.examples import data_hash\n"
        "from adapterhub.data import docstrings\n"
        f"docstrings.PARTS = {parts}\n"
        "sysconfig.get_path('stdlib')\n"
        "before = set(sys.modules)\n"
        "print(*map(data_hash, docstrings.load_docstrings()), *set(sys.modules) - before)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [data_hash(side) for side in load_docstrings()]


def test_missing_modules_are_skipped_and_a_python_without_source_files_is_an_error(
    tmp_path, monkeypatch
):
    gone = {"_pydatetime", "cgi", "cgitb", "mailcap", "nntplib", "telnetlib", "tomllib"}
    names = {label: " ".join(set(names.split()) - gone) for label, names in PARTS.items()}
    monkeypatch.setattr(docstrings, "PARTS", names)
    monkeypatch.setattr(docstrings, "_corpus", docstrings._corpus.__wrapped__)
    train, evaluation = load_docstrings()
    assert len(train) > 1500
    assert {e.label for e in evaluation} == set(PARTS)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="does not contain the source files") as caught:
        load_docstrings()
    assert caught.value.offenders == tuple(f"{label}: 0 docstrings" for label in PARTS)
