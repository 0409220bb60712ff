"""The commands, as a user types them: train, eval, predict, methods, inspect."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from fixtures import json_lines, sentences, write_tsv

from adapterhub.backbones import fingerprint
from adapterhub.files.native import read_manifest
from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS

LEARN = ("train.epochs=12", "train.learning_rate=5e-3")


def test_train_eval_predict(train, adapterhub, data, tmp_path):
    code, out, err = train("--method", "lora(rank=4)", *LEARN)
    assert code == 0, err
    assert "accuracy     1.0000" in out
    assert "epoch 1.00" in err, "progress"
    code, out, _ = adapterhub("eval", tmp_path / "run", "--data", data[1], "--json")
    assert code == 0
    assert json.loads(out)["accuracy"] == 1.0
    assert json.loads(out)["examples"] == 22
    code, out, _ = adapterhub(
        "predict", tmp_path / "run", "the movie was good", "the movie was bad", "--json"
    )
    assert code == 0
    rows = json_lines(out)
    assert [row["label"] for row in rows] == ["pos", "neg"]
    assert all(abs(sum(row["scores"].values()) - 1) < 1e-5 for row in rows)


def test_predict_from_a_file_and_from_standard_input(
    train, adapterhub, data, tmp_path, monkeypatch
):
    assert train(*LEARN)[0] == 0
    code, from_file, _ = adapterhub(
        "predict", tmp_path / "run" / "adapter", "--data", data[1], "--json"
    )
    assert code == 0
    texts = [row["text"] for row in json_lines(from_file)]
    assert texts == [text for text, _ in sentences(64)[::3]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts) + "\n"))
    code, from_stdin, _ = adapterhub("predict", tmp_path / "run", "--json")
    assert code == 0
    assert from_stdin == from_file


def test_a_recipe_with_overrides(adapterhub, backbone, data, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"backbone: {backbone}\nmethod: {{lora: {{rank: 2}}}}\noutput: {tmp_path / 'run'}\n"
        f"data: {{train: {data[0]}, eval: {data[1]}}}\ntrain: {{epochs: 5, tensorboard: false}}\n"
    )
    code, _, err = adapterhub(
        "train", recipe, "train.epochs=1", "--method", "pfeiffer(size=3)", "--quiet"
    )
    assert code == 0, err
    manifest = json.loads((tmp_path / "run/adapter/adapter.json").read_text())
    assert manifest["methods"][0]["pfeiffer"]["size"] == 3
    assert manifest["training"]["recipe"]["train"]["epochs"] == 1


def test_a_regression_of_pairs(adapterhub, backbone, tmp_path):
    rows = [
        (text, f"a {('good', 'bad')[i % 2]} film", f"{i % 5}.5")
        for i, (text, _) in enumerate(sentences(40))
    ]
    file = write_tsv(tmp_path / "pairs.tsv", rows, header="one\ttwo\tscore")
    columns = ("--text", "one", "--pair", "two", "--label", "score", "--task", "regression")
    where = ("--train", file, "--eval", file, "--output", tmp_path / "run")
    code, out, err = adapterhub(
        "train", "--backbone", backbone, *columns, *where, "train.tensorboard=false"
    )
    assert code == 0, err
    assert "pearson" in out
    assert "spearman" in out
    code, out, _ = adapterhub(
        "predict", tmp_path / "run", "the movie was good", "--pair", "a film", "--json"
    )
    assert code == 0
    assert isinstance(json_lines(out)[0]["value"], float)
    code, _, err = adapterhub("predict", tmp_path / "run", "the movie was good")
    assert code == 2
    assert "--pair" in err


def test_dry_run_prints_the_plan_and_writes_nothing(train, tmp_path):
    code, out, _ = train("--method", "mam", "--dry-run")
    assert code == 0
    for expected in (
        "encoder.0.attn.kv",
        "encoder.1.ffn",
        "scaled-parallel",
        "memory, activations",
        "steps",
    ):
        assert expected in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["full", "prefix", "[prompt, lora(rank=2)]"])
def test_the_same_run_gives_the_same_bytes(train, tmp_path, method):
    for name in ("one", "two"):
        code, _, err = train("--method", method, "train.epochs=1", output=tmp_path / name)
        assert code == 0, err
    for file in ("adapter.safetensors", "adapter.json", "README.md"):
        assert (tmp_path / "one/adapter" / file).read_bytes() == (
            tmp_path / "two/adapter" / file
        ).read_bytes()


KILLED = """
import os, sys
from adapterhub.cli import main
from adapterhub.training.engine import Engine
step, steps = Engine.step, 0
def counted(self, *args):
    global steps
    steps += 1
    if steps > int(os.environ["KILL_AFTER"]):
        os.kill(os.getpid(), 9)
    return step(self, *args)
Engine.step = counted
main()
"""


@pytest.mark.parametrize("method", ["lora(dropout=0.2)", "full", "mam", "unfreeze"])
def test_resume_after_a_kill_gives_the_same_bytes(train, tmp_path, backbone, data, method):
    words = ("--method", method, "train.save_every=2", "train.epochs=3", "train.dropout=true")
    assert train(*words, output=tmp_path / "whole")[0] == 0
    command = ["train", "--backbone", backbone, "--train", data[0], "--eval", data[1]]
    command += ["--output", tmp_path / "killed", "train.tensorboard=false", *words]
    child = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, command)],
        env=os.environ | {"KILL_AFTER": "7"}, capture_output=True, check=False,
    )  # fmt: skip
    assert child.returncode == -9, child.stderr
    assert not (tmp_path / "killed/adapter").exists()
    code, _, err = train(*words, "--resume", output=tmp_path / "killed")
    assert code == 0, err
    assert "resumed after step 6" in err
    for file in ("adapter/adapter.safetensors", "adapter/adapter.json", "metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (
            tmp_path / "killed" / file
        ).read_bytes(), file


def test_methods_lists_the_registry(adapterhub):
    code, out, _ = adapterhub("methods")
    assert code == 0
    assert all(f" {name} " in out for name in METHODS)
    assert "2106.09685" in out
    code, out, _ = adapterhub("methods", "lora")
    assert "rank" in out
    code, out, _ = adapterhub("methods", "--json")
    assert json.loads(out).keys() == METHODS.keys()


def test_tasks_lists_the_registry(adapterhub):
    code, out, _ = adapterhub("tasks")
    assert code == 0
    assert all(f" {name} " in out for name in TASKS)
    code, out, _ = adapterhub("tasks", "seq2seq")
    assert "bleu | rouge | exact" in out
    code, out, _ = adapterhub("tasks", "--json")
    assert json.loads(out).keys() == TASKS.keys()


def test_inspect_shows_the_anatomy(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone)
    assert code == 0
    assert "encoder.attn.q" in out
    assert "encoder of 2 layers" in out
    code, out, _ = adapterhub("inspect", backbone, "--json")
    facts = json.loads(out)
    assert facts["type"] == "bert"
    assert facts["methods"].keys() == METHODS.keys()


def seconds_of_children():
    """CPU time, which a busy machine hardly changes."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(
    "code",
    [
        "import adapterhub",
        "import sys; sys.argv=['adapterhub','--help']; from adapterhub.cli import main; main()",
    ],
)
def test_import_and_help_are_quick_and_need_no_torch(code):
    report = "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    child = f"import sys, atexit; {report}; {code}"
    best = 9.0
    for _ in range(3):
        start = seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-c", child], capture_output=True, text=True, check=True
        )
        best = min(best, seconds_of_children() - start)
    assert done.stderr.strip() == "False"
    assert best < 0.5


def test_new_tokens_are_trained_and_known_to_predict(adapterhub, backbone, tmp_path):
    rows = [(f"the {word} was {word}", label) for word, label in (("<x>", "pos"), ("<y>", "neg"))]
    file = write_tsv(tmp_path / "train.tsv", rows * 16)
    words = ["--backbone", backbone, "--train", file, "--eval", file, "--output", tmp_path / "run"]
    more = ("--method", "lora(rank=2)", "new_tokens=[<x>, <y>]", "train.tensorboard=false")
    code, _, err = adapterhub("train", *words, *more, "train.batch_size=4", "train.epochs=6")
    assert code == 0, err
    manifest = read_manifest(tmp_path / "run" / "adapter")
    assert [token.content for token in manifest.tokens] == ["<x>", "<y>"]
    assert manifest.training["data"]["sha256"]
    assert manifest.versions.keys() == {"adapterhub", "torch", "transformers"}
    texts = [text for text, _ in rows]
    code, out, err = adapterhub("predict", tmp_path / "run", *texts, "--json")
    assert code == 0, err
    assert [row["label"] for row in json_lines(out)] == ["pos", "neg"]


def test_inspect_names_the_fingerprint(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone, "--json")
    assert code == 0
    assert json.loads(out)["fingerprint"] == fingerprint(backbone)
