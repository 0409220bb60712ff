"""Rows under a limit, what truncation removes, and rows of streamed text."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.files.native import Saved
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.status import Display, showing
from adapterhub.tasks import TASKS, Setting, parse_task
from adapterhub.tasks.common.base import encode_whole, longest_row, lost_tokens, truncate
from adapterhub.tasks.common.packing import STARTS_WORD, Frame, Windows
from adapterhub.tasks.multiple_choice import Choices
from adapterhub.tasks.question_answering import Question
from adapterhub.tasks.tagging import Sentence
from adapterhub.training.run import run
from tests.kit.data import WORDS, word_tokenizer
from tests.kit.runs import Notes, adapter_bytes
from tests.kit.task_cases import CASES

SPECS = [case.task for case in CASES.values()] + [
    "causal-lm(data=text)",
    "causal-lm(data=text, pack=true)",
    "seq2seq(metric=exact, max_target=2)",
    "question-answering(unanswerable=true, stride=2)",
]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not parse_task(spec).decodes])
def test_truncated_rows_are_those_of_encode(spec, backbones, tmp_path, monkeypatch):
    """Encoding is counted, which changes no row."""
    task = parse_task(spec)
    case = CASES[task.name]
    tokenizer = AutoTokenizer.from_pretrained(backbones(case.backbone))
    examples = task.read(str(case.data(tmp_path)), DataOptions(), "train")
    whole = Setting(tokenizer, 64, task.labels(examples), positions=64)
    all_rows = encode_whole(task, examples, whole)
    monkeypatch.setattr("adapterhub.tasks.common.base.CHUNK", 5)
    done, display = [], Display()
    monkeypatch.setattr(display, "update", lambda work, count: done.append(count))
    with showing(display):
        counted = encode_whole(task, examples, whole)
    assert (counted.rows, counted.owners) == (all_rows.rows, all_rows.owners)
    assert counted.examples == all_rows.examples
    assert done[-1] == len(examples)
    assert len(done) == -(-len(examples) // 5)
    for limit in (7, 9, 12, 64):
        setting = replace(whole, max_length=limit)
        expected = task.encode(examples, setting, labelled=True)
        for encoded in (truncate(each, task, setting) for each in (all_rows, counted)):
            assert (encoded.rows, encoded.owners) == (expected.rows, expected.owners)
            assert (encoded.task, encoded.setting) == (task, setting)
    assert whole.tokenizer.model_max_length != 1 << 30


def test_a_chunk_without_tokens_is_no_error_if_others_have_some(backbones, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(backbones(CASES["masked-lm"].backbone))
    task, setting = parse_task("masked-lm"), Setting(tokenizer, 64, ())
    monkeypatch.setattr("adapterhub.tasks.common.base.CHUNK", 2)
    with pytest.raises(AdapterhubError, match="the texts contain no tokens"):
        encode_whole(task, [Example("")] * 5, setting)
    examples = [Example("")] * 4 + [Example("the movie was good")]
    assert encode_whole(task, examples, setting).owners == (4,)


TEXT = "the movie was very very very very good"
SPAN = (("good", TEXT.index("good")),)
CUT = [
    ("classification", Example("good", TEXT, "pos"), Example("good", "bad", "neg"), 1),
    ("tagging", Sentence(TEXT, tuple(TEXT.split()), ("pos",) * 8), Sentence("a", ("a",), ("pos",)),
     1),
    ("multiple-choice", Choices(TEXT, ("good", "bad"), 0), Choices("a", ("good", "bad"), 0), 1),
    ("question-answering", Question("a", TEXT, SPAN), Question("a", "good", (("good", 0),)), 0),
    ("seq2seq", Example(TEXT, None, "bad"), Example("good", None, "bad"), 1),
    ("causal-lm(data=text)", Example(f"{TEXT} bad"), Example("good"), 0),
    ("causal-lm(template='{text}', pack=true)", Example(TEXT, None, "bad"),
     Example("a", None, "bad"), 1),
    ("prompted(template='{text} {mask}', words={'neg': 'bad', 'pos': 'good'})",
     Example(TEXT, None, "pos"), Example("good", None, "neg"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "long", "short", "count"), CUT)
def test_examples_that_lose_tokens_are_counted(spec, long, short, count, backbone):
    encoder = spec.partition("(")[0] not in ("seq2seq", "causal-lm")
    tokenizer = AutoTokenizer.from_pretrained(backbone) if encoder else word_tokenizer(end="</s>")
    task, setting = parse_task(spec), Setting(tokenizer, 8, ("neg", "pos"))
    whole = encode_whole(task, [short, long, short], setting)
    encoded = truncate(whole, task, setting)
    (lost, *_) = lost_tokens(whole, encoded)
    assert (lost.cut, lost.examples) == (count, 3)
    assert bool(lost.lost) == bool(count)
    assert longest_row(whole) > 8


def test_the_numbers_of_a_target_are_apart():
    task = parse_task("seq2seq(max_target=3)")
    setting = Setting(word_tokenizer(end="</s>"), 64)
    whole = encode_whole(task, [Example("a", None, TEXT), Example("a", None, "bad")], setting)
    encoded = truncate(whole, task, setting)
    texts, targets = lost_tokens(whole, encoded)
    assert (texts.cut, targets.cut, targets.longest, targets.lost) == (0, 1, 9, 6)
    assert [len(row["labels"]) for row in encoded.rows] == [3, 2]


# Streamed text: rows are whole, without padding, by the seed and the epoch, and resumable

STREAMED = ("masked-lm", "causal-lm(data=text)", "span-corruption", "denoising")


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Write 60 documents of different lengths."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    choice = np.random.default_rng(0)
    documents = [" ".join(choice.choice(WORDS, choice.integers(1, 30))) for _ in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    return tmp_path / "text.txt"


@given(st.lists(st.integers(0, 99), min_size=2, max_size=60), st.integers(3, 20), st.booleans())
def test_windows_hold_all_tokens_once(ids, limit, framed):
    around = (100,) * framed
    frame = Frame(before=around, after=around)
    tokens = np.array([i | STARTS_WORD * (i % 2) for i in ids], dtype=np.uint32)
    windows = Windows(tokens, frame, limit, lambda ids, starts: {"ids": ids, "starts": starts})
    rows = list(windows)
    inner = [row["ids"][len(around) : len(row["ids"]) - len(around)] for row in rows]
    assert [i for part in inner for i in part] in (ids, ids[:-1])
    assert [len(row["ids"]) for row in rows] == windows.lengths
    assert all(length == limit for length in windows.lengths[:-1])
    assert rows == [windows[i] for i in range(len(windows))] == windows[:]
    for row in rows:
        odd = [n for n, i in enumerate(row["ids"]) if i % 2 and i < 100]
        assert row["starts"] == odd


@pytest.mark.parametrize("task", STREAMED)
def test_rows_are_full_and_documents_are_separated(task, text):
    stream, tokenizer = open_stream(str(text), DataOptions()), word_tokenizer()
    encoded = parse_task(task).encode_stream(stream, Setting(tokenizer, 32))
    lengths = [len(row["input_ids"]) for row in encoded.rows]
    assert len(set(lengths[:-1])) == 1
    ids = [i for row in encoded.rows for i in row["input_ids"]]
    words = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    assert [i for i in ids if i not in special] == words
    assert ids.count(tokenizer.eos_token_id) == (0 if task == "masked-lm" else 60)
    first, again, later = (encoded.batch(range(8), epoch) for epoch in (0, 0, 1))
    assert all(first[key].equal(again[key]) for key in first)
    assert all(first[key].equal(later[key]) for key in first) == (task == "causal-lm(data=text)")


def test_windows_of_a_bert_are_between_its_special_tokens(text, backbones):
    _, tokenizer = ah.load_backbone(str(backbones("bert")), task="masked-lm")
    stream = open_stream(str(text), DataOptions())
    encoded = parse_task("masked-lm").encode_stream(stream, Setting(tokenizer, 16))
    first, *_, last = ids = encoded.rows[0]["input_ids"]
    assert (len(ids), first, last) == (16, tokenizer.cls_token_id, tokenizer.sep_token_id)
    pairs = [p for row in encoded.rows for p in zip(row["input_ids"], row["special"], strict=True)]
    flagged = [i for i, special in pairs if special]
    assert set(flagged) == {tokenizer.cls_token_id, tokenizer.sep_token_id}
    assert len(flagged) == 2 * len(encoded.rows) + 60, "and one after each document"


def test_a_streamed_run_resumes_in_the_middle_of_an_epoch(text, backbones, tmp_path):
    """Given evaluation data are streamed, too."""
    (tmp_path / "dev.txt").write_text("the movie was good\n\nthe plot was bad\n\nfine")

    def made(name):
        train = {"epochs": 2, "max_length": 16, "batch_size": 4, "report": False, "save_every": 4}
        data = {"eval": str(tmp_path / "dev.txt"), "eval_rows": 2, "rows": 30}
        flags = {"backbone": str(backbones("bert")), "task": "masked-lm", "train": train}
        flags |= {"data": {"train": str(text), "stream": True, **data}}
        return read(flags=flags | {"output": str(tmp_path / name)})

    whole = run(made("whole"), Reporter())
    record = Saved.at(whole.folder).manifest.training["data"]
    assert (record["train"], record["eval"]) == (30, 2)
    with pytest.raises(KeyboardInterrupt):
        run(made("cut"), Notes(stop_after=8))
    cut = run(made("cut"), Reporter(), resume=True)
    assert adapter_bytes(tmp_path / "cut") == adapter_bytes(tmp_path / "whole")
    assert cut.metrics == whole.metrics


@pytest.mark.parametrize(
    "name", sorted(TASKS.keys() - {task.partition("(")[0] for task in STREAMED} - {"prompted"})
)
def test_another_task_streams_rows_and_needs_to_know_how_many(name, text, backbones, tmp_path):
    flags = {"backbone": str(backbones("bert")), "task": name, "output": str(tmp_path / "run")}
    recipe = read(flags=flags | {"data": {"train": str(text), "stream": True}})
    with pytest.raises(ConfigError, match=f"data.stream=true with {name}") as error:
        run(recipe, Reporter())
    assert any("max_steps" in offender for offender in error.value.offenders)
    assert "--steps" in error.value.hint
