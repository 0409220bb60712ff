"""Commands on an adapter with several heads."""

import json
from pathlib import Path

import pytest

from adapterhub.loop.report import Reporter
from adapterhub.training.run import run
from tests.kit.data import HEADS, mixed_recipe
from tests.kit.session import succeeded


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
    for words in (
        ["predict", several, "x"],
        ["eval", several, "--data", "data/mood-dev.tsv"],
        ["export", several, "--output", "no"],
        ["merge", several, "--output", "no"],
    ):
        code, out, err = adapterhub(*words)
        assert code != 0
        assert "has 3 heads: which one?" in err
        assert "one of length, mood, thing-2" in err
        assert "--head length" in err
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
