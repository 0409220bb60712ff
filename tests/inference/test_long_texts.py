"""Texts as long as a model reads, with virtual tokens in front of them and new ones behind."""

from __future__ import annotations

from itertools import product

import pytest
from command_line import refused
from fixtures import sentences, write_json_lines, write_tsv
from selection import rotate
from served import TaskExample, write_adapter

import adapterhub as ah
from adapterhub.backbones.pooling import max_positions
from adapterhub.errors import ConfigError, DataError
from adapterhub.inference.open import open_adapter
from adapterhub.recipe.recipe import read
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.training.prepare import prepare

LONG = " ".join(["the movie was very good"] * 60)
VIRTUAL = ("lora(rank=2)", "prompt(length=20)", "p-tuning(length=20)", "prefix(length=20)",
           ["lora(rank=2)", "prompt(length=7)"])  # fmt: skip
KINDS = {
    "classification": TaskExample("classification", "classification", ("neg", "pos")),
    "regression": TaskExample("regression", "regression", ("score",)),
    "embedding": TaskExample("embedding", "features"),
    "tagging": TaskExample("tagging", "tagging", ("O", "B-a")),
    "pair": TaskExample("classification", "classification", ("neg", "pos"), pair="second"),
    "causal-lm": TaskExample("causal-lm", "causal-lm"),
    "seq2seq": TaskExample("seq2seq", "seq2seq"),
}
CASES = [
    *product(("bert", "gpt2", "llama"), VIRTUAL, ("classification",)),
    *product(("gpt2", "llama"), VIRTUAL, ("causal-lm",)),
    *product(("bart",), VIRTUAL, ("seq2seq",)),
    *product(("bert",), VIRTUAL, ("regression", "embedding", "tagging", "pair")),
]


def asked(kind):
    return (LONG, LONG) if kind == "pair" else LONG


@rotate(("architecture", "method", "kind"), CASES, 4)
def test_a_text_of_the_full_length_is_read_behind_virtual_tokens(
    architecture, method, kind, backbones, tmp_path
):
    folder = write_adapter(backbones(architecture), tmp_path / "run", method, KINDS[kind])
    model = open_adapter(folder)
    assert model.max_length <= model.setting.positions <= max_positions(model.model)
    assert model.predict(asked(kind)) is not None
    with Engine() as engine:
        assert engine.submit(folder, asked(kind)).result(60)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["lora(rank=2)", "prompt(length=20)", "prefix(length=20)"])
def test_a_prompt_and_new_tokens_have_the_positions_behind_virtual_ones(
    architecture, method, backbones, tmp_path
):
    """Prompts of every length near the context are written from, or refused with the numbers."""
    folder = write_adapter(backbones(architecture), tmp_path / "run", method, KINDS["causal-lm"])
    opened = open_adapter(folder)
    room = opened.setting.positions - (len(opened.tokenizer("good")["input_ids"]) - 1)
    with Engine() as engine:
        for words in (1, room - 9, room - 2, room - 1, room, room + 1, 3 * room):
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


@pytest.mark.parametrize("method", VIRTUAL[:4])
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_run_leaves_room_for_virtual_tokens(architecture, method, backbones, tmp_path):
    """In training, with a method on top of a frozen adapter with virtual tokens too."""
    file = write_tsv(tmp_path / "t.tsv", [(LONG, "a"), ("good", "b")] * 2)
    below = write_adapter(backbones(architecture), tmp_path / "below", "prompt(length=9)")
    for on in ([], [below]):
        flags = {
            "backbone": str(backbones(architecture)), "method": method, "on": on,
            "output": str(tmp_path / "run"), "data": {"train": str(file), "eval": "none"},
        }  # fmt: skip
        prepared = prepare(read(flags={name: value for name, value in flags.items() if value}))
        batch = prepared.train.batch([0, 1])
        assert prepared.model(**batch).loss.isfinite()
        assert batch["input_ids"].shape[1] == prepared.recipe.train.max_length


def test_virtual_tokens_that_leave_no_room_are_refused_before_the_first_step(
    backbone, tmp_path, adapterhub
):
    file = write_tsv(tmp_path / "t.tsv", sentences(8))
    for length in (62, 64, 200):
        result = adapterhub(
            "train", file, "--backbone", backbone, "--eval", "none", "--output", tmp_path / "run",
            "--method", f"prompt(length={length})",
        )  # fmt: skip
        refused(result, f"{length} virtual tokens", "at most 61")


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
    import sounds

    folder = sounds.write_speech(tmp_path / "speech", sounds.PHRASES[:4])
    table = folder / "metadata.csv"
    lines = table.read_text().splitlines()
    name = lines[2].partition(",")[0]
    lines[2] = f"{name},{'dad ' * 400}"
    table.write_text("\n".join(lines) + "\n")
    words = ("--backbone", backbones("speech-whisper"), "--eval", "none", "--quiet")
    task = ("--task", "speech-recognition(language=en)")
    for more in ((), ("train.max_length=64",)):
        result = adapterhub("train", folder, *words, *task, "--output", tmp_path / "run", *more)
        refused(result, f"{name}: a text of", "texts are longer than the backbone writes")
    assert not (tmp_path / "run").exists()


def test_python_writes_behind_a_full_context(backbones, tmp_path):
    folder = write_adapter(
        backbones("gpt2"), tmp_path / "run", "prompt(length=20)", KINDS["causal-lm"]
    )
    model = ah.open(folder)
    for given in (LONG, " ".join(["good"] * model.setting.positions)):
        assert isinstance(model.predict(given).text, str)
        assert isinstance(model.generate(given, max_new_tokens=5), str)
        assert "".join(model.generate(given, stream=True)) == model.generate(given)
