"""`--labels`, which names labels, and commands on an adapter with several heads."""

import json
from pathlib import Path

import pytest

from adapterhub.files.native import Saved
from adapterhub.loop.report import Reporter
from adapterhub.training.run import run
from tests.kit.data import HEADS, json_lines, mixed_recipe, sentences, write_json_lines, write_tsv
from tests.kit.session import refused, succeeded

NAMES = {"0": "bad film", "1": "good film"}
LEARN = ("train.epochs=1", "train.tensorboard=false")


def rows(values):
    return [(text, values[label == "pos"]) for text, label in sentences(48)]


@pytest.fixture
def trained(adapterhub, backbone, tmp_path):
    runs = iter(("run", "second", "third"))

    def train(task: str, file, labels: str, *words: str):
        return adapterhub(
            "train", "--backbone", backbone, "--task", task, "--train", file, "--eval", file,
            "--output", tmp_path / next(runs), "--labels", labels, *LEARN, *words,
        )  # fmt: skip

    return train


def test_names_are_shown_and_values_are_read(trained, adapterhub, tmp_path):
    numbers = write_tsv(tmp_path / "numbers.tsv", rows(("0", "1")))
    code, _, err = trained("classification", numbers, "0=bad film,1=good film")
    assert code == 0, err
    assert "--labels" not in err
    manifest = Saved.at(tmp_path / "run/adapter").manifest
    assert manifest.labels == ("bad film", "good film")
    assert manifest.training["recipe"]["data"]["labels"] == NAMES
    named = write_tsv(tmp_path / "named.tsv", rows(("bad film", "good film")))
    scores = []
    for file in (numbers, named):
        out = succeeded(adapterhub("eval", tmp_path / "run", "--data", file, "--json"))
        scores.append(json.loads(out))
    assert scores[0] == scores[1]
    code, out, _ = adapterhub("predict", tmp_path / "run", "the movie was bad", "--json")
    (row,) = json_lines(out)
    assert row["scores"].keys() == {"bad film", "good film"}
    other = write_tsv(tmp_path / "other.tsv", rows(("0", "7")))
    words = ("eval", tmp_path / "run", "--data", other)
    refused(adapterhub(*words), "'7': 24 times", "--labels 0=bad film,1=good film,7=NAME")
    file = write_tsv(tmp_path / "a.tsv", sentences(48))  # a list is the order of the logits
    succeeded(trained("classification", file, "pos,neg", "train.max_steps=1"))
    assert Saved.at(tmp_path / "second/adapter").manifest.labels == ("pos", "neg")


def test_tags_may_be_numbers(trained, tmp_path):
    sentence = {"text": ["the", "movie", "was", "good"], "label": [0, 1, 0, 0]}
    file = write_json_lines(tmp_path / "tags.jsonl", [sentence] * 8)
    succeeded(trained("tagging", file, "0=O,1=B-thing,2=I-thing", "train.max_steps=1"))
    assert Saved.at(tmp_path / "run/adapter").manifest.labels == ("O", "B-thing", "I-thing")
    unnamed = "the tag '1' has no name in --labels"
    refused(trained("tagging", file, "0=O,2=B-thing", "train.max_steps=1"), unnamed)
    refused(trained("tagging", file, "", "train.max_steps=1"), "--labels 0=O,1=B-PER")


def test_bare_numbers_get_a_note_and_other_tasks_an_error(trained, tmp_path):
    file = write_tsv(tmp_path / "numbers.tsv", rows(("0", "1")))
    code, _, err = trained("classification", file, "", "train.max_steps=1")
    assert code == 0, err
    assert "the labels are numbers (0, 1); --labels 0=NAME,1=NAME names them" in err
    recorded = Saved.at(tmp_path / "run/adapter").manifest.training["recipe"]
    assert "labels" not in recorded["data"]
    assert recorded["task"] == "classification"
    refused(trained("regression", file, "0=a,1=b"), "regression has no labels to name")


# Commands on an adapter with several heads.


@pytest.fixture
def several(backbone, tmp_path, monkeypatch):
    """Train three heads, and return the run's folder, relative to the current one."""
    monkeypatch.chdir(tmp_path)
    run(mixed_recipe(backbone, tmp_path, "train.max_steps=3"), Reporter())
    return Path("run")


def test_each_command_takes_one_head(adapterhub, several):
    """Also of the published adapter. One test, since training takes longest."""
    for name, labels in HEADS.items():
        out = succeeded(adapterhub("predict", several, "--head", name, "--json", "the movie"))
        prediction = json.loads(out)
        assert tuple(prediction.get("scores", ())) == labels
        data = f"data/{name}-dev.tsv"
        out = succeeded(adapterhub("eval", several, "--head", name, "--data", data, "--json"))
        assert json.loads(out)["examples"] > 4
    heads = "heads       length (regression), mood (classification: neg, pos), thing-2"
    use = f'predict {several} --head length "a text"'
    succeeded(adapterhub("show", several), heads, "scores      mean ", use)
    succeeded(adapterhub("export", several, "--head", "thing-2", "--output", "peft"))
    config = json.loads(Path("peft/adapter_config.json").read_text(encoding="utf-8"))
    assert config["modules_to_save"] == ["classifier"]
    succeeded(adapterhub("merge", several, "--head", "thing-2", "--output", "merged"))
    config = json.loads(Path("merged/config.json").read_text(encoding="utf-8"))
    assert list(config["id2label"].values()) == list(HEADS["thing-2"])
    card = (several / "adapter" / "README.md").read_text(encoding="utf-8")
    assert "head='length'" in card
    assert "| heads |" in card
    which = ("has 3 heads: which one?", "one of length, mood, thing-2", "--head length")
    refused(adapterhub("predict", several, "x"), *which)
    refused(adapterhub("eval", several, "--data", "data/mood-dev.tsv"), *which)
    for command in ("export", "merge"):
        refused(adapterhub(command, several, "--output", "no"), *which)
    succeeded(adapterhub("publish", several, "--name", "three"))
    succeeded(adapterhub("predict", "three", "--head", "length", "the movie"))
    succeeded(adapterhub("show", "three@v1"), "heads       ")
    succeeded(adapterhub("list"), "three")


def test_a_dry_run_shows_the_mixture(adapterhub, backbone, tmp_path):
    recipe = mixed_recipe(backbone, tmp_path, "mixing=temperature(t=2)", "train.max_steps=10")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml(), encoding="utf-8")
    out = succeeded(adapterhub("train", file, "--dry-run"))
    table = out[out.index("Tasks") :]
    assert "mood" in table
    assert "share" in table
    assert "heads.thing-2.classifier" in out
    assert not (tmp_path / "run").exists()
