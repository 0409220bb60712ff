"""Texts of no length, and as long as a model reads: named, kept empty, or cut and told."""

import io
import json
from dataclasses import replace
from functools import partial
from itertools import product

import pandas as pd
import pytest
from tokenizers import Regex
from tokenizers.normalizers import Replace

import adapterhub as ah
from adapterhub.backbones.pooling import max_positions
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.inference.inputs import examples_of
from adapterhub.inference.open import open_adapter
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.tasks.common.language_models import Writing
from adapterhub.training.run import prepare
from tests.kit import media
from tests.kit.data import json_lines, write_json_lines, write_tsv
from tests.kit.selection import long_table
from tests.kit.server import TaskExample, write_adapter
from tests.kit.session import refused, succeeded

pytestmark = pytest.mark.filterwarnings("ignore:.*inputs are longer than:UserWarning")
KINDS = {
    "classification": TaskExample("classification", "classification", ("neg", "pos")),
    "multi-label": TaskExample("multi-label", "multi-label", ("neg", "pos")),
    "regression": TaskExample("regression", "regression", ("score",)),
    "embedding": TaskExample("embedding", "features"),
    "tagging": TaskExample("tagging", "tagging", ("O", "B-a")),
    "pair": TaskExample("classification", "classification", ("neg", "pos"), pair="second"),
    "reranking": TaskExample("reranking", "regression", ("score",)),
    "causal-lm": TaskExample("causal-lm", "causal-lm"),
    "seq2seq": TaskExample("seq2seq", "seq2seq"),
}

# Inputs without a text: an error that names them, or an empty prediction, in every way in.

NOTHING = ["", " ", "\n\t", "\u00a0", "\u3000", "\u200b\u200e", None, float("nan")]
READERS = [
    *(("bert", kind) for kind in ("classification", "multi-label", "regression", "embedding")),
    ("gpt2", "classification"), ("gpt2", "causal-lm"), ("llama", "causal-lm"), ("t5", "seq2seq"),
]  # fmt: skip


@pytest.fixture
def adapter(backbones, tmp_path):
    """Return a function that writes an adapter of a kind on the usual architecture, or another."""
    usual = {"causal-lm": "gpt2", "seq2seq": "t5"}
    return lambda kind, architecture=None: write_adapter(
        backbones(architecture or usual.get(kind, "bert")), tmp_path / "run", example=KINDS[kind]
    )


@long_table(("architecture", "kind"), READERS, 3)
def test_python_and_the_engine_refuse_or_keep_them(architecture, kind, adapter):
    folder = adapter(kind, architecture)
    model = ah.open(folder)
    good = model.predict("a film")
    letters = model.tokenizer(NOTHING[5], add_special_tokens=False)["input_ids"]
    for nothing in NOTHING[:5] + NOTHING[6:] if letters else NOTHING:
        with pytest.raises(DataError, match="no text") as error:
            model.predict(["a film", nothing])
        assert "item 1" in str(error.value)
        with pytest.raises(DataError, match="no text"):
            model.predict(nothing)
        first, empty = model.predict(["a film", nothing], keep_empty=True)
        assert first.as_dict().keys() == good.as_dict().keys()
        assert (str(empty), empty.label, empty.as_dict()) == ("", None, {"empty": True})
    for rows in ([{"text": "a film"}, {"text": None}], pd.DataFrame({"text": ["a film", None]})):
        with pytest.raises(DataError, match="row 1"):
            model.predict(rows)
        assert model.predict(rows, keep_empty=True)[1].as_dict() == {"empty": True}
    with Engine() as engine:
        asked = [engine.submit(folder, "  ")]
        if kind in ("causal-lm", "seq2seq"):
            asked.append(engine.generate(folder, " ", GenerationOptions(max_tokens=2)))
        for each in asked:
            with pytest.raises(DataError, match="no text"):
                each.result(60)
        assert "empty" not in engine.submit(folder, "a film").result(60)
        assert engine.submit(folder, "  ", keep_empty=True).result(60)["empty"] is True


def test_both_texts_of_a_pair_are_needed(adapter):
    model = ah.open(adapter("pair"))
    for given in (("a film", ""), (" ", "a plot"), ("", ""), ("a film", None)):
        with pytest.raises(DataError, match="no text"):
            model.predict(given)
        assert model.predict(given, keep_empty=True).label is None
    rows = [{"text": "a film", "second": "a plot"}, {"text": "a film", "second": None}]
    with pytest.raises(DataError, match="row 1"):
        model.predict(rows)
    assert [p.label is None for p in model.predict(rows, keep_empty=True)] == [False, True]


@pytest.mark.parametrize("kind", ["classification", "multi-label", "seq2seq", "reranking"])
def test_an_evaluation_refuses_texts_without_tokens(kind, adapter, tmp_path):
    """Letters that a tokenizer leaves out, in each field that a prediction reads."""
    nothing = "\u200b\u200e\u0301"
    model = ah.open(adapter(kind))
    model.tokenizer.backend_tokenizer.normalizer = Replace(Regex(f"[{nothing}]"), "")
    if kind == "reranking":
        rows = [{"query": "a", "passage": p, "label": n} for n, p in ((1, "film"), (0, nothing))]
    else:
        label = ["neg"] if kind == "multi-label" else "neg"
        rows = [{"text": text, "label": label} for text in ("a film", nothing)]
    file = str(write_json_lines(tmp_path / "e.jsonl", rows))
    task, choice = model.task.fitted(file, DataOptions(), "eval")
    examples = task.read(file, choice.options, "eval")
    with pytest.raises(DataError, match="1 of 2 inputs has no text") as error:
        model.evaluate(examples, places=choice.places(len(examples)))
    assert error.value.offenders[0].startswith("e.jsonl, line 2")
    assert "keep" not in error.value.hint
    assert model.evaluate(examples[:1])


@pytest.mark.parametrize("kind", ["classification", "causal-lm"])
def test_the_command_line_names_the_file_and_the_line(
    kind, adapter, adapterhub, tmp_path, monkeypatch
):
    folder = adapter(kind)
    refused(adapterhub("predict", folder, "a film", " "), "text 2")
    out = succeeded(adapterhub("predict", folder, "a film", " ", "--json", "--keep-empty"))
    assert [row.get("empty", False) for row in json_lines(out)] == [False, True]
    monkeypatch.setattr("sys.stdin", io.StringIO("a film\n\na plot\n"))
    refused(adapterhub("predict", folder), "line 2")
    lines = tmp_path / "lines.txt"
    lines.write_text("a film\n\na plot\n")
    refused(adapterhub("predict", folder, "--data", lines), "lines.txt, line 2")
    rows = write_json_lines(tmp_path / "r.jsonl", [{"text": "a film"}, {"text": None}])
    refused(adapterhub("predict", folder, "--data", rows), "line 2")
    table = tmp_path / "t.parquet"
    pd.DataFrame({"text": ["a film", "", None]}).to_parquet(table)
    for file, missing in ((lines, [False, True, False]), (rows, [False, True])):
        output = tmp_path / f"{file.stem}.jsonl.out.jsonl"
        code, _, err = adapterhub("predict", folder, "--data", file, "--output", output,
                                  "--keep-empty")  # fmt: skip
        assert code == 0, err
        name = "label" if kind == "classification" else "generated"
        assert [row[name] is None for row in json_lines(output.read_text())] == missing
    words = ("predict", folder, "--input", table, "--output")
    assert adapterhub(*words, tmp_path / "no.parquet")[0] == 2
    succeeded(adapterhub(*words, tmp_path / "yes.parquet", "--keep-empty"))
    found = map(json.loads, pd.read_parquet(tmp_path / "yes.parquet")["prediction"])
    assert [each.get("empty", False) for each in found] == [False, True, True]


# Texts as long as a model reads, with virtual tokens in front of them and new ones behind.

LONG = " ".join(["the movie was very good"] * 60)
VIRTUAL = ("lora(rank=2)", "prompt(length=20)", "p-tuning(length=20)", "prefix(length=20)",
           ["lora(rank=2)", "prompt(length=7)"])  # fmt: skip
CASES = [
    *product(("bert", "gpt2", "llama"), VIRTUAL, ("classification",)),
    *product(("gpt2", "llama"), VIRTUAL, ("causal-lm",)),
    *product(("bart",), VIRTUAL, ("seq2seq",)),
    *product(("bert",), VIRTUAL, ("regression", "embedding", "tagging", "pair")),
]


def asked(kind):
    return (LONG, LONG) if kind == "pair" else LONG


@long_table(("architecture", "method", "kind"), CASES, 12, nightly=4)
def test_a_text_of_the_full_length_is_read_behind_virtual_tokens(
    architecture, method, kind, backbones, tmp_path
):
    folder = write_adapter(backbones(architecture), tmp_path / "run", method, KINDS[kind])
    model = open_adapter(folder)
    assert model.max_length <= model.setting.positions <= max_positions(model.model)
    assert model.predict(asked(kind)) is not None
    with Engine() as engine:
        assert engine.submit(folder, asked(kind)).result(60)
    if kind == "causal-lm":
        for given in (LONG, " ".join(["good"] * model.setting.positions)):
            assert isinstance(model.generate(given, max_new_tokens=5), str)
            assert "".join(model.generate(given, stream=True)) == model.generate(given)


@long_table(("architecture", "method"), product(("gpt2", "llama"), (VIRTUAL[1], *VIRTUAL[::3])), 3)
def test_a_prompt_and_new_tokens_have_the_positions_behind_virtual_ones(
    architecture, method, backbones, tmp_path
):
    """Prompts of every length near the context are written from, or refused with the numbers."""
    folder = write_adapter(backbones(architecture), tmp_path / "run", method, KINDS["causal-lm"])
    opened = open_adapter(folder)
    room = opened.setting.positions - (len(opened.tokenizer("good")["input_ids"]) - 1)
    with Engine() as engine:
        for words in (1, room - 9, room - 1, room, 3 * room):
            text = " ".join(["good"] * words)
            options = GenerationOptions(max_tokens=8, temperature=0)
            generation = engine.generate(folder, text, options)
            if words >= room:
                with pytest.raises(DataError, match=f"fewer than {opened.setting.positions}"):
                    generation.result(60)
            else:
                assert len(generation.result(60).tokens) <= room - words


def test_more_new_tokens_than_positions_are_refused(backbones, tmp_path, adapterhub):
    folder = write_adapter(backbones("gpt2"), tmp_path / "run", example=KINDS["causal-lm"])
    room = open_adapter(folder).setting.positions - 1
    with pytest.raises(ConfigError, match=f"at most {room}"):
        ah.open(folder).generate("good", max_new_tokens=room + 1)
    refused(adapterhub("predict", folder, "good", "--max-new-tokens", 1000), f"at most {room}")
    assert adapterhub("predict", folder, "good", "--max-new-tokens", room)[0] == 0
    assert adapterhub("predict", folder, LONG, "--max-new-tokens", room)[0] == 0


@long_table(("architecture", "method"), product(("bert", "gpt2"), VIRTUAL[:4]), 3)
def test_a_run_leaves_room_for_virtual_tokens(
    architecture, method, recipe_with, backbones, tmp_path
):
    """In training, with a method on top of a frozen adapter with virtual tokens too."""
    file = write_tsv(tmp_path / "t.tsv", [(LONG, "a"), ("good", "b")] * 2)
    below = write_adapter(backbones(architecture), tmp_path / "below", "prompt(length=9)")
    for on in ((), (below,)):
        words = (f"method={method}", f"data.train={file}", "data.eval=none")
        recipe = recipe_with(*words, folder=backbones(architecture))
        prepared = prepare(replace(recipe, on=tuple(map(str, on))))
        batch = prepared.train.batch([0, 1])
        assert prepared.model(**batch).loss.isfinite()
        assert batch["input_ids"].shape[1] == prepared.recipe.train.max_length


def test_virtual_tokens_that_leave_no_room_are_refused_before_the_first_step(recipe_with):
    for length in (62, 200):
        with pytest.raises(ConfigError, match=f"{length} virtual tokens") as error:
            prepare(recipe_with(f"method=prompt(length={length})"))
        assert "at most 61" in str(error.value)


def trained_on(folder, output, kind, length):
    """Write an adapter whose training cut texts to a length."""
    model, _ = ah.load_backbone(str(folder), task=kind.kind, labels=kind.labels)
    adapter = ah.attach(model, "lora(rank=2)", name="short")
    recipe = {"task": kind.task, "data": {"pair": kind.pair}, "train": {"max_length": length}}
    adapter.metadata.training = {"recipe": recipe}
    adapter.save(output)
    return output


def test_predictions_read_what_the_backbone_reads(backbone, adapterhub, tmp_path):
    """Whatever length the training had; what is cut is told, in every way out."""
    short_run = trained_on(backbone, tmp_path / "short", KINDS["classification"], 8)
    inside, beyond = "good " * 40 + "film", "good " * 80 + "film"
    model, short = ah.open(short_run), ah.open(short_run, max_length=8)
    assert (model.max_length, short.max_length) == (64, 8)
    assert model.predict(inside).truncated == 0
    with pytest.warns(UserWarning, match="1 of 2 inputs are longer than 64 tokens: 19 tokens"):
        whole, cut = model.predict([inside, beyond])
    assert (whole.truncated, cut.truncated) == (0, 19)
    with pytest.warns(UserWarning, match="longer than 8 tokens"):
        assert short.predict(inside).truncated == 35
    with pytest.raises(ConfigError, match="max_length is 0"):
        ah.open(short_run, max_length=0)
    file = write_json_lines(tmp_path / "t.jsonl", [{"text": inside}, {"text": beyond}])
    readers = {"tsv": partial(pd.read_csv, sep="\t"), "parquet": pd.read_parquet}
    for into, read_table in readers.items():
        output = tmp_path / f"out.{into}"
        code, _, err = adapterhub("predict", short_run, file, "--output", output)
        assert code == 0, err
        assert err.count("1 of 2 inputs are longer than 64 tokens") == 1
        assert list(read_table(output)["truncated"]) == [0, 19]
    code, out, _ = adapterhub("predict", short_run, beyond, "--json", "--max-length", 10)
    assert json_lines(out)[0]["truncated"] == 73
    table, job = tmp_path / "in.parquet", tmp_path / "job.parquet"
    pd.DataFrame({"text": [inside, beyond]}).to_parquet(table)
    succeeded(adapterhub("predict", short_run, "--input", table, "--output", job))
    assert ["truncated" in cell for cell in pd.read_parquet(job)["prediction"]] == [False, True]
    file = write_tsv(tmp_path / "e.tsv", [(inside, "neg"), (beyond, "pos")])
    for words, cut in ((), "1 of 2 evaluation texts"), (("--max-length", 8), "2 of 2"):
        with pytest.warns(UserWarning, match=cut):
            assert adapterhub("eval", short_run, "--data", file, *words)[0] == 0
    for options, lost in (({}, 19), ({"max_length": 8}, 75)):
        with Engine(**options) as engine:
            future = engine.submit(str(short_run), beyond)
            future.result(60)
            assert future.lost == lost


@pytest.mark.parametrize("length", [8, 200])
def test_every_word_gets_a_tag(length, backbone, tmp_path):
    """Of a sentence that fits, the tags are those of one pass; windows overlap in longer ones."""
    folder = trained_on(backbone, tmp_path / "run", KINDS["tagging"], length)
    model = ah.open(folder)
    words = LONG.split()
    fitting = {"words": words[:60]}
    assert model.predict(fitting).truncated == 0
    examples, _ = examples_of([{"words": words}], model.task, model.data)
    encoded = model.task.encode(examples, model.setting, labelled=False)
    covered = {token for row in encoded.rows for token in row["first"]} - {-1}
    assert covered == set(range(len(words)))
    assert len(encoded.rows) > 4
    found = model.predict({"words": words})
    assert (len(found.tags), found.truncated) == (len(words), 0)
    with Engine() as engine:
        assert len(engine.submit(str(folder), {"words": words}).result(60)["tags"]) == len(words)


def test_a_prompt_is_cut_from_the_left_and_told(backbones, tmp_path):
    model = ah.open(trained_on(backbones("gpt2"), tmp_path / "run", KINDS["causal-lm"], 8))
    few = model.writing(Writing(max_new_tokens=4))
    (found,) = few.predict_examples([few.task.example((LONG,), few.data)])
    whole = len(few.tokenizer(LONG)["input_ids"])
    assert found.truncated >= whole - 60
    assert few.predict("good").truncated == 0
    for trained, length in ((8, 2048), (4000, 4000)):  # a backbone without positions
        folder = trained_on(backbones("t5"), tmp_path / f"{trained}", KINDS["seq2seq"], trained)
        assert ah.open(folder).setting.max_length == length


def test_targets_longer_than_the_decoder_are_cut_and_told(backbones, tmp_path, adapterhub):
    rows = [{"text": "the movie", "label": "good " * (300 if i == 2 else 1)} for i in range(6)]
    file = write_json_lines(tmp_path / "t.jsonl", rows)
    code, out, err = adapterhub(
        "train", file, "--backbone", backbones("bart"), "--task", "seq2seq(max_target=1000)",
        "--eval", file, "--output", tmp_path / "run", "--steps", 1,
    )  # fmt: skip
    assert code == 0, err
    assert "1 of 6 training targets are longer than" in out + err


def test_spoken_texts_longer_than_the_decoder_are_refused_by_name(backbones, tmp_path, adapterhub):
    folder = media.write_speech(tmp_path / "speech", media.PHRASES[:4])
    lines = (folder / "metadata.csv").read_text().splitlines()
    name = lines[2].partition(",")[0]
    lines[2] = f"{name},{'dad ' * 400}"
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    words = ("train", folder, "--backbone", backbones("speech-whisper"), "--eval", "none",
             "--task", "speech-recognition(language=en)", "--output", tmp_path / "run")  # fmt: skip
    for more in ((), ("train.max_length=64",)):
        result = adapterhub(*words, *more)
        refused(result, f"{name}: a text of", "texts are longer than the backbone writes")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("backbone_of", "kind"), [("gpt2", "causal-lm"), ("bart", "seq2seq")])
def test_texts_that_are_written_piece_by_piece_say_what_was_cut(
    backbone_of, kind, backbones, tmp_path, adapterhub
):
    folder = trained_on(backbones(backbone_of), tmp_path / "run", KINDS[kind], 8)
    model, told = ah.open(folder), "1 of 1 inputs are longer than 64 tokens"
    for stream in (False, True):
        with pytest.warns(UserWarning, match=told):
            list(model.generate(LONG, stream=stream, max_new_tokens=2))
    words = ("predict", folder, LONG, "--max-new-tokens", 2)
    assert told in adapterhub(*words)[2]
    with pytest.warns(UserWarning, match=told):
        assert adapterhub(*words, "--stream")[0] == 0
