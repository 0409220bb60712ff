"""seq2seq: parallel files, targets, and several languages, beside those of transformers."""

import gzip
import re

import pytest

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.seq2seq import LanguagePair
from tests.kit import own_models
from tests.kit.data import word_tokenizer, words_of, write_json_lines
from tests.kit.own_models import PAIRS, SAVED, TRANSLATORS
from tests.kit.session import refused, succeeded


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


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("one\ntwo\n", "eins\n", r"not parallel(.|\n)*2 lines(.|\n)*1 lines"),
        ("one\ntwo\n", "eins\n\n", r"empty lines\n  - line 2"),
        (" \ntwo\n", "eins\nzwei\n", r"a.en has empty lines\n  - line 1"),
    ],
)
def test_files_that_are_not_parallel(source, target, expected, tmp_path):
    (tmp_path / "a.en").write_text(source)
    (tmp_path / "a.de").write_text(target)
    options = DataOptions(train_target=str(tmp_path / "a.de"))
    with pytest.raises(AdapterhubError, match=expected):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")


@pytest.mark.parametrize(
    ("metric", "main", "score"),
    [("bleu", "bleu", 1.0), ("rouge", "rougeL", 1.0), ("exact", "exact_match", 0.0)],
)
def test_the_metric_selects_the_best_checkpoint_and_scores_rows(metric, main, score):
    task = parse_task({"seq2seq": {"metric": metric}})
    assert task.main_metric == main
    assert main in task.metrics([Example("a", None, "the movie")], [Generated("the movie")])
    outcome = task.outcome(Example("ein Haus", label="A house."), Generated("a house"))
    assert outcome["score"] == score


@pytest.fixture
def speaker(tmp_path):
    """Return a function from a kind to its tokenizer."""
    return lambda kind, **given: own_models.translation_tokenizer(kind, tmp_path, **given)


def task_of(kind, target=1, **options):
    names = TRANSLATORS[kind].languages
    languages = {"src_lang": names[0]} if names[0] else {}
    return parse_task({"seq2seq": {**languages, "tgt_lang": names[target], **options}})


def of_transformers(kind, tokenizer, model, text, target):
    """Return the text that transformers generates, as its documentation of each model does."""
    language, start = TRANSLATORS[kind].languages[target], {}
    ids = tokenizer(f">>{language}<< {text}" if kind == "marian" else text, return_tensors="pt")
    if kind != "marian":
        code = tokenizer.convert_tokens_to_ids(f"__{language}__" if kind == "m2m100" else language)
        start = {"decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id": code}
    return model.generate(**ids, **start, max_new_tokens=6, do_sample=False, num_beams=1)[0]


@pytest.mark.parametrize("kind", TRANSLATORS)
def test_targets_and_generation_are_those_of_transformers(kind, speaker):
    """Rows, the first tokens of the decoder, and what is generated, for two target languages."""
    tokenizer = speaker(kind)
    model = own_models.translator(kind, tokenizer)
    setting, texts = Setting(tokenizer, 32), []
    examples = [Example(text, None, target) for text, target in PAIRS]
    for place in (1, 2):
        task = task_of(kind, place, new_tokens=6)
        names = TRANSLATORS[kind].languages
        languages = {"src_lang": names[0], "tgt_lang": names[place]}
        own = speaker(kind, **{} if kind == "marian" else languages)
        prefix = f">>{names[place]}<< " if kind == "marian" else ""
        data = task.encode(examples, setting, labelled=True)
        for row, (text, target) in zip(data.rows, PAIRS, strict=True):
            assert row == dict(own(prefix + text, text_target=target))
        texts.append([each.text for each in task.predict(model, data, 2)])
        codes = getattr(own, "lang_code_to_id", {}).values()
        for found, row, (text, _) in zip(texts[-1], data.rows, PAIRS, strict=True):
            ids = of_transformers(kind, own, model, text, place)
            assert found == own.decode([i for i in ids if i not in codes], skip_special_tokens=True)
            fed = {}
            handle = model.get_decoder().register_forward_pre_hook(
                lambda _, args, inputs, fed=fed: fed.update(inputs), with_kwargs=True
            )
            model(**task.collate([row], setting))
            handle.remove()
            known = 1 if kind in ("mbart", "marian") else 2  # a forced code follows the start
            assert fed["input_ids"][0, :known].tolist() == ids[:known].tolist()
    assert texts[0] != texts[1]
    assert all(texts[0])
    assert getattr(tokenizer, "tgt_lang", None) is None  # as it was
    if kind == "marian":  # a text that names its target needs no option
        named = parse_task("seq2seq(template='>>deu<< {text}')")
        rows = [t.encode(examples, setting, labelled=False).rows for t in (named, task_of(kind))]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("kind", [k for k in TRANSLATORS if k != "marian"])
def test_limits_keep_the_codes(kind, speaker):
    setting, (source, target, _) = Setting(speaker(kind), 4), TRANSLATORS[kind].languages
    own, (text, label) = speaker(kind, src_lang=source, tgt_lang=target), PAIRS[0]
    task = task_of(kind, max_target=4)
    (row,) = task.encode([Example(text, None, label)], setting, labelled=True).rows
    limits = {"truncation": True, "max_length": 4}
    assert row["input_ids"] == own(text, **limits)["input_ids"]
    assert row["labels"] == own(text_target=label, **limits)["input_ids"]


def test_rows_of_several_languages_are_written_each_in_its_own(speaker):
    tokenizer = speaker("m2m100")
    model = own_models.translator("m2m100", tokenizer)
    setting, text = Setting(tokenizer, 32), PAIRS[0][0]
    mixed = [LanguagePair(text, None, None, "en", code) for code in ("de", "fr", "de")]
    task = parse_task("seq2seq(new_tokens=6)")
    together = task.predict(model, task.encode(mixed, setting, labelled=False), 3)
    alone = [
        own.predict(model, own.encode([Example(text)], setting, labelled=False), 1)[0]
        for own in (task_of("m2m100", place, new_tokens=6) for place in (1, 2, 1))
    ]
    assert together == alone
    of_data = task.for_examples(mixed)
    assert (of_data.src_lang, of_data.tgt_lang) == ("en", None)
    assert together[0] != together[1]


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("mbart", "seq2seq(tgt_lang=de_DE)", r"src_lang is not given(.|\n)*ar_AR cs_CZ de_DE"),
        ("mbart50", "seq2seq(src_lang=en_XX)",
         r"tgt_lang is not given(.|\n)*af_ZA ar_AR(.|\n)*\(src_lang=en_XX, tgt_lang=...\)"),
        ("nllb", "seq2seq(src_lang=eng_Latn, tgt_lang=de)", "'de', which(.|\n)*tgt_lang=deu_Latn"),
        ("marian", "seq2seq", r"tgt_lang is not given(.|\n)*one of deu fra"),
        ("marian", "seq2seq(src_lang=eng, tgt_lang=fra)", "no src_lang(.|\n)*tgt_lang alone"),
        (None, "seq2seq(tgt_lang=de)", "no tgt_lang(.|\n)*a backbone for several languages"),
    ],
)  # fmt: skip
def test_languages_that_are_missing_or_unknown(kind, spec, expected, speaker):
    tokenizer = speaker(kind) if kind else word_tokenizer(end="</s>")
    with pytest.raises(ConfigError) as error:
        parse_task(spec).encode([Example("the", None, "die")], Setting(tokenizer, 8), labelled=True)
    assert re.search(expected, str(error.value))


@pytest.mark.parametrize("kind", SAVED)
def test_a_run_records_its_languages(kind, tmp_path, adapterhub):
    """Columns become options of the adapter, where all rows agree; `open` and `predict` use them.

    Without languages the run ends before its first step.
    """
    folder = own_models.save_translator(kind, tmp_path)
    names = TRANSLATORS[kind].languages
    rows = [{"text": text, "label": label} for text, label in PAIRS * 4]
    spoken = [row | {"src_lang": names[0], "tgt_lang": names[1]} for row in rows]
    words = (
        "--eval", "none", "--backbone", folder, "--method", "lora(rank=2)", "--epochs", 1,
        "--task", "seq2seq(new_tokens=4)", "train.tensorboard=false", "train.report=false",
    )  # fmt: skip
    bare = write_json_lines(tmp_path / "bare.jsonl", rows)
    result = adapterhub("train", bare, *words, "--output", tmp_path / "no")
    refused(result, "src_lang is not given", names[1])
    assert "step" not in "".join(result[1:])
    file = write_json_lines(tmp_path / "spoken.jsonl", spoken)
    succeeded(adapterhub("train", file, *words, "--output", tmp_path / "run"))
    opened = ah.open(tmp_path / "run")
    assert (opened.task.src_lang, opened.task.tgt_lang) == names[:2]
    text = PAIRS[0][0]
    predicted = opened.predict(text).text
    (given,) = opened.predict([{"text": text, "src_lang": names[0], "tgt_lang": names[1]}])
    assert given.text == predicted
    with Engine() as engine:
        written = engine.generate(str(tmp_path / "run"), text, GenerationOptions(temperature=0))
        assert written.result().text == predicted
