"""`adapterhub convert`, `resize` and `combine`: adapters that are made of others."""

import json
import re

import pytest

from adapterhub.files.native import Saved
from tests.kit import own_models, tiny_models
from tests.kit.data import write_tsv
from tests.kit.server import EXAMPLES, write_adapter
from tests.kit.session import refused, succeeded


@pytest.fixture
def saved(backbone, tmp_path):
    """Save adapters of three methods, all called `served`; return their folders by name."""
    methods = {"oft": "oft(block=4)", "lora": "lora(rank=4)", "rslora": "rslora(rank=2)"}
    return {
        name: write_adapter(backbone, tmp_path / name, method, seed=number)
        for number, (name, method) in enumerate(methods.items(), 1)
    }


def test_convert_then_resize(saved, adapterhub, backbone, tmp_path):
    rows = [("the movie was good", "pos"), ("the movie was bad", "neg")]
    data = write_tsv(tmp_path / "test.tsv", rows)
    where = ("--backbone", backbone)
    words = ("convert", saved["oft"], "--output", tmp_path / "new", "--energy", 1, "--eval", data)
    out = succeeded(adapterhub(*words, *where))
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert float(lines["difference"].split()[0]) < 1e-4
    after, before = lines["accuracy"].replace(" before", "").split(", ")
    assert after == before
    assert set(Saved.at(tmp_path / "new").manifest.methods[0]) == {"lora"}
    words = ("resize", tmp_path / "new", "--output", tmp_path / "small", "--rank", 2, "--json")
    out = succeeded(adapterhub(*words, *where))
    facts = json.loads(out)
    assert facts["ranks"] == [2, 2]
    assert 0 < facts["lost"] < 1
    assert facts["parameters"] < facts["parameters before"]
    assert Saved.at(tmp_path / "small").manifest.labels == ("neg", "pos")


def test_without_a_folder_it_prints_what_each_rank_keeps(saved, adapterhub, backbone):
    out = succeeded(adapterhub("resize", saved["lora"], "--json", "--backbone", backbone))
    kept = json.loads(out)["kept"]
    assert [*kept] == ["1", "2", "4"]
    assert 0 < kept["1"] < kept["2"] < kept["4"] == 1
    code, out, err = adapterhub("resize", saved["lora"], "--backbone", backbone)
    assert (code, err) == (0, "")
    assert out.split()[-2:] == ["4", "100.0%"]
    refused(adapterhub("resize", saved["oft"], "--backbone", backbone), "--energy 0.99")
    words = ("convert", saved["oft"], "--output", "new", "--backbone", backbone)
    refused(adapterhub(*words), "--energy, --rank")


def test_the_training_of_a_language_model_names_a_sufficient_rank(adapterhub, tmp_path):
    checkpoint = own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), tmp_path / "m")
    (tmp_path / "notes.txt").write_text("the movie was good\n\nthe movie was bad\n" * 8)
    words = ("train", tmp_path / "notes.txt", "--backbone", checkpoint, "--task")
    words += ("causal-lm(data=text)", "--steps", 3, "--output", tmp_path / "run")
    out = succeeded(adapterhub(*words))
    rank, whole, kept = re.search(r"(\d+) of (\d+) would keep (\d+) % of", out).groups()
    assert 2 * int(rank) <= int(whole)
    assert int(kept) >= 95
    command = re.search(r"adapterhub (resize .*) DIR", out)[1]
    succeeded(adapterhub(*command.split(), tmp_path / "small"))


def test_combine_then_predict_and_merge(saved, adapterhub, backbone, tmp_path):
    """And with ties, in a rank."""
    where, folders = ("--backbone", backbone), (saved["lora"], saved["rslora"])
    words = ("combine", *folders, "--weights", "0.5,-0.25", "--output", tmp_path / "sum", *where)
    succeeded(adapterhub(*words), "linear of 2 adapters")
    manifest = Saved.at(tmp_path / "sum").manifest
    assert manifest.name == "combined"
    assert manifest.labels == ("neg", "pos")
    assert manifest.training["combined"]["weights"] == [0.5, -0.25]
    assert manifest.methods[0]["lora"]["rank"] == 6
    out = succeeded(adapterhub("predict", tmp_path / "sum", "the movie was good", *where))
    assert out.split()[0] in ("neg", "pos")
    succeeded(adapterhub("merge", tmp_path / "sum", "--output", tmp_path / "out", *where))
    words = ("combine", *folders, "--how", "ties", "--density", 0.2, "--rank", 4, "--name", "both")
    out = succeeded(adapterhub(*words, *where, "--output", tmp_path / "both", "--json"))
    facts = json.loads(out)
    assert (facts["how"], facts["density"], facts["rank"]) == ("ties", 0.2, 4)
    assert 0 < facts["lost"] < 1
    assert Saved.at(tmp_path / "both").manifest.name == "both"


def test_a_head_is_chosen_where_labels_differ(saved, adapterhub, backbone, tmp_path):
    five = write_adapter(backbone, tmp_path / "five", "lora(rank=4)", EXAMPLES[1])
    words = ("combine", saved["lora"], five, "--backbone", backbone, "--output", tmp_path / "new")
    refused(adapterhub(*words), "1: served: neg, pos", "--head ADAPTER")
    assert not (tmp_path / "new").exists()
    succeeded(adapterhub(*words, "--head", five))
    assert Saved.at(tmp_path / "new").manifest.labels == EXAMPLES[1].labels
