"""The first rows of a run as text: for each task, without the backbone's weights."""

from __future__ import annotations

import pytest

from adapterhub.cli.train import print_rows
from adapterhub.recipe.recipe import read
from adapterhub.tasks import TASKS
from adapterhub.training import loading
from adapterhub.training.plan import preview_rows
from tests.kit.data import HEADS, mixed_recipe, write_json_lines
from tests.kit.task_cases import CASES

LEARNED = {
    "classification": {"label": "neg (class 0)"},
    "multi-label": {"labels": "none"},
    "regression": {"label": "-1.0"},
    "tagging": {"tokens": "[CLS] the/O movie/O was/O bad/B-neg [SEP]"},
    "question-answering": {"answer": "bad (tokens 8 to 8)"},
    "seq2seq": {"target": "bad </s>"},
    "unified-qa": {"target": "bad </s>"},
    "causal-lm": {"learned": "·x9 bad </s>"},
    "multiple-choice": {"right, 0": "[CLS] the movie [SEP] the movie was good [SEP]"},
    "embedding": {"anchor": "[CLS] the movie was bad [SEP]", "positive": "[CLS] awful [SEP]"},
    "reranking": {"label": "0.0"},
    "preference": {"chosen": "·x9 bad </s>", "rejected": "·x9 good </s>"},
    "reward": {"chosen": "·x3 the movie was good"},
    "masked-lm": {"learned": "·x4 bad ·"},
    "prompted": {"learned": "·x6 bad ·"},
    "span-corruption": {"target": "<extra_id_0> bad <extra_id_1> </s>"},
    "audio-classification": {"label": "high (class 0)", "input_values": "4800"},
    "speech-recognition": {"input_values": "4480", "target": "a b"},
    "image-classification": {"label": "0 (class 0)", "pixel_values": "3 x 16 x 16"},
    "image-text-to-text": {
        "question": "which digit?",
        "tokens": "<image>x16 \\n w h i c h ▁ d i g i t ? \\n 0 </s>",
        "pixel_values": "1 x 3 x 16 x 16",
        "learned": "·x30 0 </s>",
    },
    "denoising": {"target": "<s> the movie was bad </s>"},
}


def recipe_of(backbone, task, file, **train):
    data = {"train": str(file), "eval": str(file)}
    flags = {"backbone": str(backbone), "task": task, "output": "x", "data": data, "train": train}
    return read(flags=flags)


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_the_model_gets_and_learns(name, backbones, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_backbone", None)
    case = CASES[name]
    recipe = recipe_of(backbones(case.backbone), case.task, case.data(tmp_path))
    rows, notes = preview_rows(recipe, 3)
    assert len(rows) == 3
    assert rows[0].title.startswith("row 1 of ")
    facts = rows[0].facts
    assert facts.items() >= LEARNED[name].items()
    if TASKS[name].decodes:
        assert "length" not in facts
        assert facts[TASKS[name].input_name]
    else:
        assert facts["text"].startswith(("the movie", "great movie"))
        assert "tokens" in facts["length"]
        assert "no text is cut" in notes[-1]
    monkeypatch.setenv("COLUMNS", "80")
    print_rows(recipe, 2)
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line) < 80 for line in printed)
    assert sum(line.startswith("row ") for line in printed) == 2


def test_what_is_cut_and_what_is_padded(backbone, tmp_path):
    rows = [{"text": "the movie was very good", "label": "a"}, {"text": "bad", "label": "b"}]
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    (first, second), notes = preview_rows(
        recipe_of(backbone, "classification", file, max_length=5), 9
    )
    assert first.facts["cut"] == "2 of 7 tokens: very good"
    assert second.facts["length"] == "3 tokens; 2 of padding on the right in a batch of these rows"
    assert "cut" not in second.facts
    assert any(note.startswith("1 of 2 training texts") for note in notes)


def test_rows_of_each_of_several_tasks(backbone, tmp_path):
    recipe = mixed_recipe(backbone, tmp_path, "train.best_metric=length/mse")
    rows, notes = preview_rows(recipe, 2)
    assert [row.title.partition(":")[0] for row in rows] == [n for n in HEADS for _ in range(2)]
    assert rows[-1].title == "length: row 2 of 9"
    assert any(note.startswith("mood: ") for note in notes)


WORDS = "the movie was very good"
CHAT = [
    {"role": role, "content": content}
    for role, content in zip(("user", "assistant") * 2, ("the movie", "was good", "a", "bad"),
                             strict=True)
]  # fmt: skip


@pytest.mark.parametrize(
    ("backbone_of", "task", "row", "length", "expected"),
    [
        ("t5", "seq2seq(max_target=3)", {"text": "the movie", "label": WORDS}, None,
         {"cut from the target": "3 of 6 tokens: was very good", "cut": None}),
        ("llama", "causal-lm(data=text)", {"text": "the movie was good"}, 3,
         {"windows": "the text has 2"}),
        ("llama", "causal-lm(data=text, pack=true)", {"text": "the movie was good"}, None,
         {"text": None, "windows": None}),
        ("llama", "chat", {"text": CHAT}, None, {"learned": "·x7 was good </s> ·x6 bad </s>"}),
    ],
)  # fmt: skip
def test_targets_windows_and_chats(backbone_of, task, row, length, expected, backbones, tmp_path):
    file = write_json_lines(tmp_path / "a.jsonl", [row] * 4)
    recipe = recipe_of(backbones(backbone_of), task, file, max_length=length)
    facts = preview_rows(recipe, 1)[0][0].facts
    assert {name: facts.get(name) for name in expected} == expected


def test_the_command_prints_and_stops(adapterhub, backbone, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = adapterhub(
        "train", "--backbone", backbone, "--train", data[0], "--eval", data[1], "--show", "2"
    )
    assert code == 0, err
    assert out.count("[CLS]") == 2
    assert not (tmp_path / "runs").exists()
