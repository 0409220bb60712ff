"""What a prompt does to the inputs of a stack; whole models are in test_prompt.py."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from adapterhub.hooks.prompt import PromptedInputs, past_length
from tests.kit import tiny_models

LENGTH = 3


def stack(architecture):
    """Return a stack with a prompt, and its slot."""
    model = tiny_models.model(architecture, "features")
    ah.attach(model, f"prompt(length={LENGTH})")
    root = next(m for m in model.modules() if "adapterhub" in m._modules)
    return root, root._modules["adapterhub"]


def extended(architecture, **inputs):
    root, slot = stack(architecture)
    added = PromptedInputs(inputs, slot).extend(root)
    return inputs, added


def padded(side):
    ids = tiny_models.batch(2, 6)["input_ids"]
    ids[0, : 2 if side == "left" else 6][4 if side == "right" else 0 :] = tiny_models.PAD
    return {"input_ids": ids, "attention_mask": ids.ne(tiny_models.PAD).long()}


def test_embeddings_mask_and_types_are_longer_by_the_prompt():
    batch = tiny_models.batch(2, 6)
    inputs, added = extended("bert", **batch, token_type_ids=torch.ones_like(batch["input_ids"]))
    assert "input_ids" not in inputs
    assert inputs["inputs_embeds"].shape[:2] == (2, LENGTH + 6)
    assert inputs["attention_mask"].shape == (2, LENGTH + 6)
    assert inputs["token_type_ids"][0].tolist() == [0] * LENGTH + [1] * 6
    assert (added.length, added.tokens) == (LENGTH, 6)


@pytest.mark.parametrize(
    ("side", "mask", "places"),
    [
        ("right", [1, 1, 1, 1, 1, 1, 1, 0, 0], [3, 4, 5, 6, 7, 8]),
        ("left", [0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 5, 6, 7, 8]),
    ],
)
def test_the_prompt_stands_next_to_its_text(side, mask, places):
    inputs, added = extended("llama", **padded(side))
    assert inputs["attention_mask"].tolist() == [mask, [1] * 9]
    assert added.places.tolist() == [places, [3, 4, 5, 6, 7, 8]]


def test_positions_of_the_caller_are_behind_the_prompt():
    positions = torch.arange(6)[None].expand(2, -1)
    inputs, _ = extended("llama", **tiny_models.batch(2, 6), position_ids=positions)
    assert inputs["position_ids"].tolist() == [list(range(LENGTH + 6))] * 2


def test_positions_that_count_from_padding_are_written_out():
    inputs, _ = extended("roberta", **padded("right"))
    first = tiny_models.PAD + 1
    assert inputs["position_ids"][1].tolist() == list(range(first, first + LENGTH + 6))
    assert inputs["position_ids"][0, -2:].tolist() == [tiny_models.PAD] * 2


def test_a_cache_without_the_prompt_is_refused():
    cache = DynamicCache()
    cache.update(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), 0)
    assert past_length(cache) == 5
    assert past_length(None) == 0
    root, slot = stack("llama")
    with pytest.raises(AdapterhubError):
        PromptedInputs(tiny_models.batch(2, 6) | {"past_key_values": cache}, slot).extend(root)
