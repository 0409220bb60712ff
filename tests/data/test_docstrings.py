"""The corpus of standard library docstrings."""

from __future__ import annotations

import collections
import functools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterhub.data import docstrings
from adapterhub.data.docstrings import PARTS, load_docstrings
from adapterhub.data.examples import Example, data_hash
from adapterhub.errors import DataError
from tests.kit.selection import ALL

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(autouse=True, scope="module")
def parsed_once() -> Iterator[None]:
    """Read each file of the library once: two seconds for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docstrings, "_paragraphs", functools.cache(docstrings._paragraphs))
        yield


@pytest.fixture(scope="module")
def sides() -> tuple[list[Example], list[Example]]:
    return load_docstrings()


def module_of() -> dict[str, tuple[str, int]]:
    """Map each text to its class and the index of its module in that class."""
    return {
        text: (label, number)
        for label, modules in docstrings._corpus(STDLIB)
        for number, texts in enumerate(modules)
        for text in texts
    }


def write_modules(stdlib: Path, texts: dict[str, list[str]]) -> None:
    """Write a library with two large modules per class, and those in `texts`."""
    stdlib.mkdir(exist_ok=True)
    for label, modules in PARTS.items():
        for name in modules.split()[:2]:
            lines = [
                f"def f{i}(): '''The {label} text {i} of module {name}, in full length.'''"
                for i in range(40)
            ]
            (stdlib / f"{name}.py").write_text("\n".join(lines))
    for name, docs in texts.items():
        path = stdlib / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"def f{i}(): {doc!r}" for i, doc in enumerate(docs)))


def corpus_texts(stdlib: Path, label: str) -> list[str]:
    return [text for module in dict(docstrings._corpus(stdlib))[label] for text in module]


def test_the_corpus_is_large_and_balanced(sides: tuple[list[Example], list[Example]]) -> None:
    train, evaluation = sides
    assert 1500 <= len(train) <= 2500
    assert 500 <= len(evaluation) <= 800
    for side in sides:
        counts = collections.Counter(e.label for e in side)
        assert set(counts) == set(PARTS)
        assert max(counts.values()) < 1.5 * min(counts.values())


def test_the_splits_share_no_module_and_no_text(
    sides: tuple[list[Example], list[Example]],
) -> None:
    modules = module_of()
    train, evaluation = ({modules[e.text] for e in side} for side in sides)
    assert len(train) > 50
    assert len(evaluation) > 20
    assert not train & evaluation
    keys = [docstrings._key(e.text) for side in sides for e in side]
    assert len(keys) == len(set(keys))


def test_texts_are_single_short_paragraphs(sides: tuple[list[Example], list[Example]]) -> None:
    for e in (e for side in sides for e in side):
        assert 40 <= len(e.text) <= 400
        assert " ".join(e.text.split()) == e.text
        assert e.pair is None


def test_the_seed_determines_the_splits(sides: tuple[list[Example], list[Example]]) -> None:
    assert load_docstrings(0) == sides
    assert load_docstrings(1) != sides


def test_the_limit_applies_to_each_class() -> None:
    train, evaluation = load_docstrings(0, limit_per_class=20)
    counts = collections.Counter(e.label for e in (*train, *evaluation))
    assert set(counts) == set(PARTS)
    assert set(counts.values()) <= {19, 20, 21}


def test_each_module_has_one_class() -> None:
    modules = [name for names in PARTS.values() for name in names.split()]
    assert len(modules) == len(set(modules)) > 100


def test_duplicates_are_dropped_within_and_across_classes(tmp_path: Path) -> None:
    shared = "This text occurs in the modules of two classes, twice."
    copied = "This text occurs in two modules of one class alone."
    write_modules(
        tmp_path,
        {
            "re": [shared, copied, "Too short."],
            "json": [copied.upper(), "x" * 401, ">>> this is code, not a sentence of English"],
            "uuid": [shared.replace(",", " ;")],
            "json/tests/deep": ["This text is in a folder that holds tests of the library."],
        },
    )
    texts = corpus_texts(tmp_path, "text")
    assert len(texts) == 81
    assert copied.upper() in texts  # json comes before re
    assert copied not in texts
    assert not any("two classes" in text for text in (*texts, *corpus_texts(tmp_path, "data")))
    assert not any("folder" in text for text in texts)


def test_only_the_first_paragraph_is_used(tmp_path: Path) -> None:
    doc = "One paragraph that goes\n    over as many as two lines.\n\n    More, in as many as two."
    write_modules(tmp_path, {"re": [doc]})
    texts = corpus_texts(tmp_path, "text")
    assert "One paragraph that goes over as many as two lines." in texts
    assert len(texts) == 81


def test_a_python_without_source_files_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="does not contain the source files") as caught:
        load_docstrings()
    assert caught.value.offenders == tuple(f"{label}: 0 docstrings" for label in PARTS)


def test_missing_modules_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"_pydatetime", "cgi", "cgitb", "mailcap", "nntplib", "telnetlib", "tomllib"}
    names = {label: " ".join(set(names.split()) - gone) for label, names in PARTS.items()}
    monkeypatch.setattr(docstrings, "PARTS", names)
    monkeypatch.setattr(docstrings, "_corpus", docstrings._corpus.__wrapped__)
    train, evaluation = load_docstrings()
    assert len(train) > 1500
    assert {e.label for e in evaluation} == set(PARTS)


def test_the_corpus_is_independent_of_the_hash_seed_and_imports_none_of_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, with every second module: a new process reads all anew."""
    names = {label: names.split() for label, names in PARTS.items()}
    parts = {label: " ".join(each[:: 1 if ALL else 2]) for label, each in names.items()}
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
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == [data_hash(side) for side in load_docstrings()]
