"""Selected parameters of the backbone (`chosen`): names, patterns and tied embeddings."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MergeError, SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import trained_names


def test_the_embedding_trains_by_default():
    model = tiny_models.model("bert")
    table = model.get_input_embeddings().weight.detach().clone()
    adapter = ah.attach(model, "chosen")
    assert adapter.count() == table.numel() == adapter.methods[0].count(adapter.anatomy)
    (changed,) = adapter.changed
    tiny_models.scramble(adapter, std=2.0)
    ids = torch.tensor([5, 9])
    assert torch.equal(model.get_input_embeddings()(ids), changed.own[ids])
    adapter.detach()
    assert torch.equal(model.get_input_embeddings()(ids), table[ids])


def test_patterns_select_parameters_by_name():
    names = trained_names("bert", "chosen(names=['encoder.*.attn.q.weight'])")
    assert names == {f"encoder.{n}.attn.q.chosen.weight" for n in (0, 1)}


def test_a_tied_table_trains_once():
    model = tiny_models.model("gpt2", "causal-lm")
    adapter = ah.attach(model, "chosen")
    assert adapter.count() == tiny_models.VOCAB * 32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_unknown_name_is_refused():
    with pytest.raises(SiteError) as error:
        trained_names("bert", "chosen(names=['encoder.0.attn.q.weigth', 'embeddings'])")
    (offender,) = error.value.offenders
    assert "'encoder.0.attn.q.weight'" in offender


def test_a_use_of_a_tied_table_trains_by_itself(tmp_path):
    model = tiny_models.model("gpt2", "causal-lm")
    table = model.get_input_embeddings().weight
    adapter = ah.attach(model, "chosen(names=['backbone.lm_head.weight'], untied=true)")
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy) == table.numel()
    assert model.get_input_embeddings().weight is table
    assert model.get_output_embeddings().weight is adapter.changed[0].own
    adapter.save(tmp_path / "saved")
    adapter.detach()
    assert model.get_output_embeddings().weight is table
    ah.load(model, tmp_path / "saved")  # its backbone is the same one
    assert model.get_output_embeddings().weight is not table


def test_every_use_of_a_tied_table_can_train():
    model = tiny_models.model("t5", "seq2seq", tie_word_embeddings=True)
    adapter = ah.attach(model, "chosen(untied=true)")
    owned = {name.removesuffix(".chosen.weight") for name in adapter.tensors()}
    stacks = {"backbone.encoder.embed_tokens", "backbone.decoder.embed_tokens"}
    assert owned == stacks | {"backbone.shared", "backbone.lm_head"}


def test_an_untied_use_cannot_be_merged():
    """A checkpoint of the merged model would be tied again when it is loaded."""
    model = tiny_models.model("gpt2", "causal-lm")
    ah.attach(model, "chosen(names=['backbone.lm_head.weight'], untied=true)")
    with pytest.raises(MergeError, match="untied by the adapter"):
        ah.merge(model)
    untied = tiny_models.model("llama", "causal-lm", tie_word_embeddings=False)
    ah.attach(untied, "chosen(names=['backbone.lm_head.weight'], untied=true)")
    ah.merge(untied)
