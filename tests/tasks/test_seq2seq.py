"""seq2seq: parallel files, columns, targets."""

from __future__ import annotations

import gzip

import pytest

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.batches import IGNORED
from tests.kit.data import word_tokenizer, words_of


def test_parallel_files_and_columns(tmp_path):
    for name, lines in (("en", "one\nnil\ntwo\n"), ("de", "eins\nnull\r\nzwei\n")):
        (tmp_path / f"a.{name}.gz").write_bytes(gzip.compress(lines.encode()))
    options = DataOptions(eval_target=str(tmp_path / "a.de.gz"))
    task, source = parse_task("seq2seq"), str(tmp_path / "a.en.gz")
    pairs = (("one", "eins"), ("nil", "null"), ("two", "zwei"))
    expected = [Example(text, None, target) for text, target in pairs]
    assert task.read(source, options, "eval") == expected
    (tmp_path / "a.tsv").write_text("en\tde\none\teins\n")
    columns = DataOptions(text="en", label="de")
    assert task.read(str(tmp_path / "a.tsv"), columns, "train") == expected[:1]


def test_targets_are_truncated_and_padding_is_ignored():
    tokenizer = word_tokenizer(end="</s>")
    task = parse_task("seq2seq(template='a plot : {text}', max_target=3)")
    examples = [Example("good", None, "the movie was very good"), Example("bad", None, "bad")]
    batch = task.encode(examples, Setting(tokenizer, 16), labelled=True).batch([0, 1])
    assert words_of(tokenizer, batch["input_ids"][0].tolist()) == ["a", "plot", ":", "good", "</s>"]
    assert words_of(tokenizer, batch["labels"][0].tolist()) == ["the", "movie", "</s>"]
    assert batch["labels"][1].tolist()[2:] == [IGNORED]


def test_files_that_are_not_parallel(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    options = DataOptions(train_target=str(tmp_path / "a.de"))
    with pytest.raises(AdapterhubError, match=r"not parallel(.|\n)*2 lines(.|\n)*1 lines"):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")
    (tmp_path / "a.de").write_text("eins\n\n")
    with pytest.raises(AdapterhubError, match=r"empty lines\n  - line 2"):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    (tmp_path / "a.en").write_text(" \ntwo\n")
    with pytest.raises(AdapterhubError, match=r"a.en has empty lines\n  - line 1"):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")


def test_the_metric_selects_the_best_checkpoint():
    mains = {"bleu": "bleu", "rouge": "rougeL", "exact": "exact_match"}
    for metric, main in mains.items():
        task = parse_task({"seq2seq": {"metric": metric}})
        assert task.main_metric == main
        assert main in task.metrics([Example("a", None, "the movie")], [Generated("the movie")])


@pytest.mark.parametrize(("metric", "score"), [("bleu", 1.0), ("exact", 0.0)])
def test_the_score_of_a_row_is_its_exact_match_where_that_is_the_metric(metric, score):
    task = parse_task(f"seq2seq(metric={metric})")
    outcome = task.outcome(Example("ein Haus", label="A house."), Generated("a house"))
    assert outcome["score"] == score
