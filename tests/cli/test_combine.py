"""`adapterhub combine`: two runs become one adapter, which predicts, merges and combines again."""

import json

import pytest

import adapterhub as ah
from adapterhub.files.native import Saved
from tests.kit import tiny_models
from tests.kit.session import refused, succeeded


@pytest.fixture
def folders(backbone, tmp_path):
    """Two saved adapters of the tiny backbone."""
    made = []
    for seed, method in enumerate(["lora(rank=4)", "rslora(rank=2)"]):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["bad", "good"])
        adapter = ah.attach(model, method, name="same")
        tiny_models.scramble(adapter, seed=seed + 1)
        adapter.save(tmp_path / f"adapter-{seed}")
        made.append(tmp_path / f"adapter-{seed}")
    return made


def test_combine_then_predict_and_merge(folders, adapterhub, backbone, tmp_path):
    where = ("--backbone", backbone)
    words = ("combine", *folders, "--weights", "0.5,-0.25", "--output", tmp_path / "sum", *where)
    succeeded(adapterhub(*words), "linear of 2 adapters")
    manifest = Saved.at(tmp_path / "sum").manifest
    assert manifest.name == "combined"
    assert manifest.labels == ("bad", "good")
    assert manifest.training["combined"]["weights"] == [0.5, -0.25]
    assert manifest.methods[0]["lora"]["rank"] == 6
    out = succeeded(adapterhub("predict", tmp_path / "sum", "the movie was good", *where))
    assert out.split()[0] in ("bad", "good")
    succeeded(adapterhub("merge", tmp_path / "sum", "--output", tmp_path / "out", *where))


def test_ties_in_a_rank(folders, adapterhub, backbone, tmp_path):
    words = ("combine", *folders, "--how", "ties", "--density", 0.2, "--rank", 4, "--name", "both")
    words += ("--backbone", backbone, "--output", tmp_path / "both", "--json")
    out = succeeded(adapterhub(*words))
    facts = json.loads(out)
    assert (facts["how"], facts["density"], facts["rank"]) == ("ties", 0.2, 4)
    assert 0 < facts["lost"] < 1
    assert Saved.at(tmp_path / "both").manifest.name == "both"


def test_a_head_is_chosen_where_labels_differ(folders, adapterhub, backbone, tmp_path):
    labels = ["one", "two", "three"]
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=labels)
    ah.attach(model, "lora(rank=4)", name="same").save(tmp_path / "three")
    words = ("combine", folders[0], tmp_path / "three", "--backbone", backbone, "--output")
    refused(adapterhub(*words, tmp_path / "new"), "1: same: bad, good", "--head ADAPTER")
    assert not (tmp_path / "new").exists()
    succeeded(adapterhub(*words, tmp_path / "new", "--head", tmp_path / "three"))
    assert Saved.at(tmp_path / "new").manifest.labels == tuple(labels)


def test_bad_input(folders, adapterhub, backbone, tmp_path):
    where = ("--backbone", backbone, "--output", tmp_path / "new")
    for words, expected in [
        (("--weights", "0.5,x"), "0.5,x"),
        (("--weights", "1"), "1 weights for 2 adapters"),
        (("--density", "2"), "density 2.0"),
        (("--head", "other"), "--head other is not combined"),
    ]:
        refused(adapterhub("combine", *folders, *where, *words), expected)
    assert not (tmp_path / "new").exists()
