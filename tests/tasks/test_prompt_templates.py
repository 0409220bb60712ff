"""Prompts and responses are written by the chat template of a backbone that has one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from adapterhub.inference.open import open_adapter
from adapterhub.inference.record import read_training_record
from adapterhub.recipe.recipe import read
from adapterhub.tasks import parse_task
from adapterhub.training.run import prepare
from tests.kit.data import write_json_lines

ALPACA = {"instruction": "the movie", "input": "", "output": "good"}
COMPARED = {"prompt": "the movie", "chosen": "good", "rejected": "bad"}
FORMS: dict[str, tuple[str, dict[str, str], str]] = {
    "Alpaca": ("causal-lm", ALPACA, "the movie"),
    "Alpaca with an input": ("causal-lm", ALPACA | {"input": "a plot"}, "the movie a plot"),
    "completion": ("causal-lm", {"prompt": "the movie", "completion": "good"}, "the movie"),
    "response": ("causal-lm", {"prompt": "the movie", "response": "good"}, "the movie"),
    "output": ("causal-lm", {"instruction": "the movie", "output": "good"}, "the movie"),
    "columns": ("causal-lm", {"text": "the movie", "label": "good"}, "the movie"),
    "preference": ("preference", COMPARED, "the movie"),
    "reward": ("reward", COMPARED, "the movie"),
}  # fmt: skip
WAYS = {"chat": "", "plain": "", "off": "template='{text}'"}
CELLS = [(form, "chat") for form in FORMS]
CELLS += [(form, way) for form in ("Alpaca", "preference", "reward") for way in ("plain", "off")]


@pytest.fixture(scope="module")
def without_template(backbones: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer without a chat template."""
    folder = shutil.copytree(backbones("llama"), tmp_path_factory.mktemp("plain") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return Path(folder)


@pytest.mark.parametrize(("form", "way"), CELLS)
def test_pairs_are_written_by_the_chat_template_of_a_backbone_that_has_one(
    form: str, way: str, backbones: Any, without_template: Path, tmp_path: Path
) -> None:
    task, row, text = FORMS[form]
    backbone = without_template if way == "plain" else backbones("llama")
    data = str(write_json_lines(tmp_path / "rows.jsonl", [row] * 8))
    flags = {
        "backbone": str(backbone), "task": f"{task}({WAYS[way]})", "output": str(tmp_path / "run"),
        "method": "lora(rank=1)", "data": {"train": data, "eval": data},
    }  # fmt: skip
    prepared = prepare(read(None, ["train.tensorboard=false"], flags))
    encoded = prepared.train.rows[0]
    ids = encoded["responses"][0]["input_ids"] if "responses" in encoded else encoded["input_ids"]
    words = prepared.train.setting.tokenizer.decode(ids).split()
    chat = ["user", ":", *text.split(), "</s>", "assistant", ":"]
    prompt = chat if way == "chat" else ["<s>", *text.split()]
    assert words == [*prompt, "good", "</s>"]
    note = "written by the tokenizer's chat template; --task \"" + task
    assert sum(note in line for line in prepared.notes) == (way == "chat")
    recorded = parse_task(prepared.recipe.task).template
    assert recorded == {"chat": None, "plain": "{text}\n", "off": "{text}"}[way]


def test_a_prompt_is_written_as_in_training(
    backbones: Any, adapterhub: Any, tmp_path: Path
) -> None:
    data = write_json_lines(tmp_path / "rows.jsonl", [ALPACA] * 20)
    code, _, err = adapterhub(
        "train", "--backbone", backbones("llama"), "--task", "causal-lm(new_tokens=4)",
        "--train", data, "--eval", data, "--output", tmp_path / "run", "train.max_steps=1",
        "train.report=false", "train.tensorboard=false",
    )  # fmt: skip
    assert code == 0, err
    assert err.count("written by the tokenizer's chat template") == 1
    assert read_training_record(tmp_path / "run").task.template is None
    opened = open_adapter(tmp_path / "run")
    example = opened.task.example(["the movie"], read_training_record(tmp_path / "run").data)
    (row,) = opened.task.encode([example], opened.setting, labelled=False).rows
    words = opened.setting.tokenizer.decode(row["input_ids"]).split()
    assert words == ["user", ":", "the", "movie", "</s>", "assistant", ":"]
