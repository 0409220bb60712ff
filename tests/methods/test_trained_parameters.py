"""Methods that train parameters of the backbone: which, at which rate, and what they compute."""

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.errors import MergeError, SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import trained_names

BIASES = ("attn.q", "attn.k", "attn.v", "attn.o", "attn.norm", "ffn.up", "ffn.down", "ffn.norm")
NAMES = [
    ("bert", "bitfit(layers='top 1')", {f"encoder.1.{role}.bitfit.bias" for role in BIASES}),
    ("bert", "bitfit(sites=[attn.q, ffn.up])",  # the smaller set of the paper
     {f"encoder.{n}.{role}.bitfit.bias" for n in (0, 1) for role in ("attn.q", "ffn.up")}),
    ("bert", "chosen(names=['encoder.*.attn.q.weight'])",
     {f"encoder.{n}.attn.q.chosen.weight" for n in (0, 1)}),
    ("llama", "norms(layers=1)",
     {f"{name}.norms.weight" for name in ("decoder.1.attn.norm", "decoder.1.ffn.norm",
                                          "backbone.norm")}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "spec", "names"), NAMES)
def test_options_select_parameters_by_name(architecture, spec, names):
    assert trained_names(architecture, spec) == names


MODULES = [  # of a model of features
    ("bert", "full", lambda model: [model]),
    ("bert", "unfreeze", lambda model: [model]),
    ("bert", "freeze(top=1)", lambda model: [model.encoder.layer[1], model.pooler]),
    ("bert", "freeze(top=2)", lambda model: [model.encoder, model.pooler]),
    ("t5", "freeze(top=3)", lambda model: [
        model.encoder.block[1], model.encoder.final_layer_norm,
        model.decoder.block, model.decoder.final_layer_norm,
    ]),
    ("bert", "staged(groups=['top 1', embeddings])", lambda model: [
        model.encoder.layer[1], model.pooler, model.embeddings
    ]),
    ("bert", "chosen", lambda model: [model.embeddings.word_embeddings]),
    ("bert", "bitfit", lambda model: [
        nn.ParameterList(p for n, p in model.named_parameters() if n.endswith("bias"))
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "spec", "modules"), MODULES)
def test_the_parameters_of_whole_modules_train(architecture, spec, modules):
    model = tiny_models.model(architecture, "features")
    expected = {p for module in modules(model) for p in module.parameters()}
    adapter = ah.attach(model, spec)
    assert {changed.original for changed in adapter.changed} == expected
    number = sum(p.numel() for p in expected)
    assert adapter.count() == number == adapter.methods[0].count(adapter.anatomy)


def test_a_trained_parameter_takes_the_place_of_the_original():
    """y = W x + b with the trained b, of one projection, or W, of all."""
    model = tiny_models.model("bert")
    host = model.bert.encoder.layer[0].attention.self.query
    weight, bias = host.weight.detach().clone(), host.bias.detach().clone()
    x = torch.randn(4, 32)
    for spec in ("bitfit(sites=['attn.q'], layers=0)", "full"):
        adapter = ah.attach(model, spec)
        tiny_models.scramble(adapter, std=2.0)
        tensors = {name.rpartition(".")[2]: tensor for name, tensor in adapter.tensors().items()
                   if name.startswith("encoder.0.attn.q.")}  # fmt: skip
        assert not torch.allclose(tensors["bias"], bias, atol=1e-2)
        expected = x @ tensors.get("weight", weight).T + tensors["bias"]
        torch.testing.assert_close(host(x), expected, atol=1e-5, rtol=1e-5)
        ah.activate(model)
        torch.testing.assert_close(host(x), x @ weight.T + bias, atol=1e-5, rtol=1e-5)
        adapter.detach()
        assert torch.equal(host.weight, weight)


def test_outside_excludes_the_norms_outside_the_layers():
    names = trained_names("mbart", "norms(outside=False)")
    outside = trained_names("mbart", "norms") - names
    assert all(name.startswith(("encoder.", "decoder.")) for name in names)
    assert {name.rsplit(".", 3)[1] for name in outside} == {"layer_norm", "layernorm_embedding"}


def test_a_part_of_a_shared_bias_is_refused():
    with pytest.raises(SiteError, match="share one") as error:
        trained_names("gpt2", "bitfit(sites=['attn.q', 'attn.o'])")
    assert error.value.offenders == ("attn.q",)
    assert trained_names("gpt2", error.value.hint)


# Tables that several modules use.


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
