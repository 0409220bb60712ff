"""Prompt tuning: its equation, its start, its size."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.prompt import Prompt
from tests.kit import tiny_models


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def test_the_stack_reads_the_prompt_and_the_tokens():
    """stack([P; E(tokens)]), without the outputs at the virtual tokens."""
    model = tiny_models.model("bert", "features")
    inputs = tiny_models.batch()
    inputs["attention_mask"][0, 6:] = 0
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    adapter = ah.attach(model, "prompt(length=4)")
    tiny_models.scramble(adapter)
    (prompt,) = adapter.parameters()
    output = hidden(model, **inputs)
    ah.activate(model)
    joined = torch.cat([prompt.detach().expand(3, -1, -1), embeddings], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (4, 0), value=1)
    expected = hidden(model, inputs_embeds=joined, attention_mask=mask)[:, 4:]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_the_prompt_starts_as_rows_of_the_embedding():
    model = tiny_models.model("bert", "features")
    table = model.get_input_embeddings().weight.detach()
    (prompt,) = ah.attach(model, "prompt(length=4)").parameters()
    assert all(any(torch.equal(row, token) for token in table) for row in prompt.detach())


def test_the_prompt_of_an_encoder_decoder_belongs_to_the_encoder():
    adapter = ah.attach(tiny_models.model("t5"), "prompt")
    assert [p.site.id for p in adapter.placed] == ["encoder.embed"]


def test_the_count_is_length_times_width():
    adapter = ah.attach(tiny_models.model("bert", "features"), "prompt(length=7)")
    assert adapter.count() == 7 * 32 == adapter.methods[0].count(adapter.anatomy)


def test_a_length_of_zero_is_refused():
    with pytest.raises(ConfigError) as error:
        Prompt(length=0)
    assert "length" in str(error.value)
