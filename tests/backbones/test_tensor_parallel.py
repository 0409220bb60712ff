"""Adapters on tensor parallel models in two processes compute what they compute in one."""

import json
import sys
from functools import cache
from importlib.util import find_spec

import every_type
import pytest
from torch import nn

from adapterhub.backbones.tensor_parallel import loading_by_plan, tensor_parallel
from adapterhub.errors import BackboneError, ConfigError
from tests.kit import processes, tensor_parallel_cells, tiny_models
from tests.kit.matrix import one_of_each_signature
from tests.kit.selection import ALL, cases_of

pytestmark = pytest.mark.skipif(
    find_spec("transformers.distributed.parallel_utils") is None, reason="no plans that train"
)
EVERY = one_of_each_signature()
TOGETHER = 15  # cells of one start
FEW = ["lora", "prefix", "ia3", "unipelt", "dora"]
# Fused projections, an activation that IA3 scales, latent attention, experts, linear attention.
SOME = ("gpt_neox", "phi3", "deepseek_v3", "qwen3_moe", "qwen3_next")
# What transformers 5.23 does not compute or train by its own plan at these sizes, without adapters.
NOT_DIVIDED = {
    "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v32", "doge", "dots3_note_text", "gemma4",
    "glm_moe_dsa", "hrm_text", "inkling2_text", "inkling_text", "llama4", "llama4_text",
    "longcat_flash", "youtu",
}  # fmt: skip


@cache
def planned():
    """Return the types with a plan: building the configurations of all takes seconds."""
    return tuple(filter(tensor_parallel_cells.has_plan, every_type.TYPES))


CELLS = [("llama", method) for method in EVERY]
CELLS = cases_of(CELLS + [(each, method) for each in SOME for method in FEW], 4, nightly=4)
if tiny_models.FULL_MATRIX:
    CELLS += [(each, method) for each in planned() if each not in SOME for method in FEW[:4]]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return what gives the result of a cell; two processes compute some cells in one start."""
    found = {}

    def of(cell):
        if cell not in found:
            start = CELLS.index(cell) // TOGETHER * TOGETHER
            some = CELLS[start : start + TOGETHER]
            found.update(zip(some, computed(some, tmp_path_factory.mktemp("cells")), strict=True))
        return found[cell]

    return of


def computed(cells, folder):
    """Compute cells in two processes."""
    (folder / "cells.json").write_text(json.dumps(cells))
    words = (tensor_parallel_cells.__file__, folder / "cells.json", folder)
    ended = processes.run(*words, processes=2)
    assert ended.returncode == 0, ended.printed[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.apart
@pytest.mark.parametrize(("model_type", "method"), CELLS)
def test_outputs_gradients_and_texts_are_those_of_one_process(model_type, method, result):
    result = result((model_type, method))
    if result.startswith("not"):
        assert model_type in NOT_DIVIDED or result == "not built"
    else:
        assert result in ("ok", "refused alike")


@pytest.mark.skipif(not ALL, reason="building the configurations of all types takes seconds")
def test_most_types_with_a_plan_are_covered():
    types = planned()
    assert len(types) >= 111
    assert len(set(types) - NOT_DIVIDED) >= 90
    assert set(NOT_DIVIDED) <= set(types)
    assert len(EVERY) >= 20


def test_one_process_cannot_divide_a_model(tmp_path):
    with pytest.raises(ConfigError, match="there is only one") as error:
        loading_by_plan(tmp_path)
    assert "torchrun" in error.value.hint
    assert tensor_parallel(tiny_models.model("llama")) is tensor_parallel(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("model_type", "count", "problem"),
    [("bert", 2, "no tensor parallel plan for bert"), ("llama", 3, "do not divide into 3")],
)
def test_a_model_that_does_not_divide_says_what_does(
    model_type, count, problem, tmp_path, monkeypatch
):
    auto = "AutoModelForCausalLM" if model_type == "llama" else "AutoModelForMaskedLM"
    every_type.build(model_type, auto, tiny=True).config.save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(BackboneError, match=problem) as error:
        loading_by_plan(tmp_path)
    assert "train.shard=true" in error.value.hint


def test_an_old_transformers_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.parallel_utils", None)
    with pytest.raises(ConfigError, match="no tensor parallel plans") as error:
        loading_by_plan(tmp_path)
    assert "transformers>=5.23" in error.value.hint
