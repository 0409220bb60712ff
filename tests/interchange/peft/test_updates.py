"""The updates of a checkpoint are read by module and parameter; what does not fit is named."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.build import anatomy_of
from adapterhub.interchange.peft import files
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.peft.updates import Update, read_updates, subtracted_factors
from adapterhub.interchange.translation import Translation
from tests.kit import tiny_models
from tests.kit.peers import compare_import, core, linear_names, lora_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EXPERTS = "model.layers.0.mlp.experts"


def test_the_first_parameter_of_a_module_has_the_innermost_wrapper():
    model = tiny_models.model("mixtral", "causal-lm")
    config = files.neutral("LORA") | {
        "target_parameters": ["down_proj", "gate_up_proj"],
        "rank_pattern": {"down_proj": 2},
    }
    tensors = {
        f"{EXPERTS}{wrapper}.lora_{factor}.weight": torch.ones(1)
        for wrapper in ("", ".base_layer")
        for factor in "AB"
    }
    finder = ModuleFinder(anatomy_of(model), config)
    translation = Translation(anatomy_of(model))
    updates, rest = read_updates(files.PeftFiles("LORA", config, tensors), finder, translation)
    found = {(u.file_path, u.parameter): u.rank for u in updates}
    assert found == {(EXPERTS, "down_proj"): 2, (f"{EXPERTS}.base_layer", "gate_up_proj"): 8}
    assert not rest


def test_shapes_of_stacked_weights():
    tensors = {"A": torch.ones(6, 5), "B": torch.ones(7, 6)}
    update = Update("x", "x", 2, 2.0, 1.0, tensors, "weight")
    assert update.shape_problems(5, 7, matrices=3) == []
    assert update.shape_problems(5, 7) == [
        "x: A is (6, 5), here it must be (2, 5)",
        "x: B is (7, 6), here it must be (7, 2)",
    ]


BIASED = {a: None for a in ("bert", "gpt2", "bart", "opt")}


@pytest.mark.parametrize("architecture", core(BIASED, "bert", "gpt2"))
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
