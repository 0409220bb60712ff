"""The modules that a configuration names are found in the model."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError
from adapterhub.interchange.peft import files, targets
from adapterhub.interchange.peft.targets import Targets, ends_with, modules_of
from tests.kit import tiny_models
from tests.kit.peers import edit, edit_tensors, lora_config, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("targets", [["query", "value"], ["value"], r".*layer\.0.*query"])
def test_targets_and_tensors_must_agree(checkpoint, targets):
    edit(checkpoint, target_modules=targets)
    with pytest.raises(MismatchError, match="target_modules"):
        ah.load(tiny_models.model("bert"), checkpoint)


RENAMED = {
    "another class": ("bert.encoder", "encoder"),
    "another wrapper": ("bert.encoder", "text_model.bert.encoder"),
    "another version": ("bert.encoder.layer", "model.transformer.layers"),
}


@pytest.mark.parametrize("case", RENAMED)
def test_modules_that_were_renamed_are_found(checkpoint, case):
    expected = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    old, new = RENAMED[case]
    edit_tensors(checkpoint, lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})
    found = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_linear_names_the_same_modules(tmp_path):
    folder = trained(tmp_path / "theirs", "llama", lora_config(target_modules="all-linear"))
    expected = ah.load(tiny_models.model("llama"), folder).tensors()
    edit(folder, target_modules="all-linear")
    assert ah.load(tiny_models.model("llama"), folder).tensors().keys() == expected.keys()


def matched(**config):
    model = tiny_models.model("bert")
    found = Targets(files.neutral("LORA") | config, model)
    return sorted(path for path in modules_of(model) if path in found)


LAYER = "bert.encoder.layer"
MATCHES = {
    "names": ({"target_modules": ["query"]}, [0, 1]),
    "expression": ({"target_modules": r".*layer\.1.*query"}, [1]),
    "layers": ({"target_modules": ["query"], "layers_to_transform": 1}, [1]),
    "pattern": (
        {"target_modules": ["query"], "layers_to_transform": [0], "layers_pattern": "layer"},
        [0],
    ),
    "excluded": ({"target_modules": ["query"], "exclude_modules": r".*layer\.0.*"}, [1]),
    "saved": ({"target_modules": ["query"], "modules_to_save": ["query"]}, []),
    "none": ({"target_modules": None}, []),
}


def test_the_named_modules_are_targets(subtests):
    for case in MATCHES:
        with subtests.test(case=case):
            config, layers = MATCHES[case]
            assert matched(**config) == [f"{LAYER}.{n}.attention.self.query" for n in layers]


def test_a_name_matches_whole_path_components():
    assert ends_with("a.query", ["query"])
    assert ends_with("query", ["query"])
    assert not ends_with("a.subquery", ["query"])


def test_the_first_matching_pattern_gives_the_value():
    found = Targets(files.neutral("LORA"), tiny_models.model("bert"))
    patterns = {"query": 2, r"layer\.0\..*": 3}
    assert found.value_at(patterns, "layer.0.query", 8) == 2
    assert found.value_at(patterns, "layer.0.key", 8) == 3
    assert found.value_at(patterns, "layer.1.key", 8) == 8
    assert found.value_at(None, "layer.1.key", 8) == 8


def test_expressions_share_a_time_limit(monkeypatch):
    monkeypatch.setattr(targets, "SECONDS", 0.05)
    with pytest.raises(FileError, match="takes too long"):
        matched(target_modules=r"(?:(?:[a-z0-9_.]|[a-z0-9_.]{2})+)+[!&]")
