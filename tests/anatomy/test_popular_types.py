"""The most downloaded vision-language and mixture-of-experts types: which methods work on them.

By default two of each kind; all with ADAPTERHUB_MATRIX=full. What a cell checks is in
scripts/sweep_cells.py: gradients, the cache, saving, loading, detaching.
"""

from __future__ import annotations

import itertools

import every_type
import pytest
import sweep_cells

from tests.kit import tiny_models
from tests.kit.selection import cases_of

METHODS = ("lora", "pfeiffer", "ia3", "prefix")
VISION_LANGUAGE = (
    "gemma3",
    "qwen2_vl",
    "idefics3",
    "internvl",
    "llava",
    "qwen2_5_vl",
    "qwen3_vl",
    "smolvlm",
)
EXPERTS = (
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "llama4_text",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
REFUSED: dict[tuple[str, str], str] = {}  # (type, method) -> the reason
TYPES = VISION_LANGUAGE + EXPERTS if tiny_models.FULL_MATRIX else VISION_LANGUAGE[:2] + EXPERTS[:2]


# By default, each type gets one or two of the methods.
CELLS = list(itertools.product(TYPES, METHODS))
CELLS = CELLS if tiny_models.FULL_MATRIX else cases_of(CELLS, 3)


@pytest.mark.parametrize("model_type", TYPES)
def test_methods_on_a_popular_type(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    inputs = sweep_cells.inputs_for(model)
    methods = [method for cell, method in CELLS if cell == model_type]
    assert methods
    for method in methods:
        found = sweep_cells.cell(model, method, inputs)
        reason = REFUSED.get((model_type, method))
        assert found == (f"refused: {reason}" if reason else "ok"), method


def test_there_are_eight_of_each_kind():
    assert len(set(VISION_LANGUAGE)) == len(set(EXPERTS)) == 8
    assert {t for t, _ in REFUSED} <= {*VISION_LANGUAGE, *EXPERTS}
