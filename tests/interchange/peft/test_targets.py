"""The modules that a configuration names are found in the model."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError
from adapterhub.interchange.peft import files, targets
from adapterhub.interchange.peft.targets import Targets, modules_of
from adapterhub.interchange.peft.updates import subtracted_factors
from tests.kit import tiny_models
from tests.kit.peers import compare_import, edit, edit_tensors, linear_names, lora_config, trained

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


def test_expressions_share_a_time_limit(monkeypatch):
    monkeypatch.setattr(targets, "SECONDS", 0.05)
    with pytest.raises(FileError, match="takes too long"):
        matched(target_modules=r"(?:(?:[a-z0-9_.]|[a-z0-9_.]{2})+)+[!&]")


# Updates: their biases, and what an initialization subtracts.


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_biases_of_updates(tmp_path, architecture):
    """Also at the pooler of BERT and the head of BART, which are not sites."""
    model = tiny_models.model(architecture)
    names = [n for n in linear_names(model) if model.get_submodule(n).bias is not None]
    names = [n for n in names if not n.startswith(("classifier", "score"))]
    config = lora_config(target_modules=names, lora_bias=True)
    adapter = compare_import(tmp_path, architecture, config, std=0.1, atol=1e-4)
    assert {"lora", "chosen"} <= {method.name for method in adapter.methods}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("initialization", ["pissa", "olora"])
@pytest.mark.parametrize("rank", [3, 9])
def test_the_subtracted_part_is_that_of_peft(initialization, kind, rank):
    """A rank above that of the weight takes all of its components."""
    torch.manual_seed(0)
    module = nn.Sequential(kind(6, 6))
    weight = module[0].weight.detach().clone()
    expected = weight.T if kind is Conv1D else weight
    left, right = subtracted_factors(initialization, module[0], expected, min(rank, 6), 2.0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, init_lora_weights=initialization, target_modules=["0"]
    )
    changed = peft.get_peft_model(module, config).base_model.model[0].base_layer.weight.detach()
    changed = changed.T if kind is Conv1D else changed
    torch.testing.assert_close(expected - 2.0 * left @ right, changed, atol=1e-5, rtol=0)
