"""`adapterhub convert` and `adapterhub resize`."""

import json
import re

import pytest

import adapterhub as ah
from adapterhub.files.native import Saved
from tests.kit import own_models, tiny_models
from tests.kit.session import refused, succeeded


@pytest.fixture
def saved(backbone, tmp_path):
    """Save adapters of two methods; return their folders by name."""
    folders = {}
    for method in ("oft(block=4)", "lora(rank=4)"):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["bad", "good"])
        adapter = ah.attach(model, method, name="own")
        tiny_models.scramble(adapter, seed=1)
        name = method.partition("(")[0]
        adapter.save(tmp_path / name)
        folders[name] = tmp_path / name
    return folders


def test_convert_then_resize(saved, adapterhub, backbone, tmp_path):
    data = tmp_path / "test.csv"
    data.write_text("text,label\nthe movie was good,good\nthe movie was bad,bad\n")
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
    assert Saved.at(tmp_path / "small").manifest.labels == ("bad", "good")


def test_without_a_folder_it_prints_what_each_rank_keeps(saved, adapterhub, backbone):
    out = succeeded(adapterhub("resize", saved["lora"], "--json", "--backbone", backbone))
    kept = json.loads(out)["kept"]
    assert [*kept] == ["1", "2", "4"]
    assert 0 < kept["1"] < kept["2"] < kept["4"] == 1
    code, out, err = adapterhub("resize", saved["lora"], "--backbone", backbone)
    assert (code, err) == (0, "")
    assert out.split()[-2:] == ["4", "100.0%"]
    for words, says in ((("lora", "--rank", 2), "--output DIR"), (("oft",), "--energy 0.99")):
        name, *more = words
        refused(adapterhub("resize", saved[name], *more, "--backbone", backbone), says)


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("resize", "lora"), "--rank R, or --energy 0.99"),
        (("convert", "oft"), "--energy, --rank"),
        (("convert", "lora", "--energy", 2), "--energy 2.0"),
        (("convert", "lora", "--rank", 0), "--rank"),
    ],
)
def test_what_is_refused(saved, adapterhub, backbone, tmp_path, words, says):
    command, name, *more = words
    line = (command, saved[name], "--output", tmp_path / "new", "--backbone", backbone, *more)
    refused(adapterhub(*line), says)
    assert not (tmp_path / "new").exists()
