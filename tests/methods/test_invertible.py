"""Invertible adapters: their equation, at the places where the library `adapters` has them."""

import copy

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.methods.invertible import Coupling
from tests.kit import tiny_models

# The module whose output `adapters` couples, by names that no site of ours is derived from.
EMBEDDINGS = {
    "bert": "bert.embeddings",
    "albert": "albert.embeddings",
    "electra": "electra.embeddings",
    "gpt2": "transformer.drop",
    "llama": "model.embed_tokens",
    "bart": "model.encoder.layernorm_embedding",
}
MASKED = ("bert", "albert", "electra")


def language_model(architecture):
    if architecture not in MASKED:
        return tiny_models.language_model(architecture)
    plain = tiny_models.model(architecture, "features").config
    torch.manual_seed(0)
    return transformers.AutoModelForMaskedLM.from_config(plain).eval()


def network(adapter, name, x):
    """Compute up(relu(down x)) from the tensors of a file."""
    own = {n.partition(f".{name}.")[2]: t for n, t in adapter.tensors().items()}
    hidden = torch.relu(x @ own["down.weight"].T + own["down.bias"])
    return hidden @ own["up.weight"].T + own["up.bias"]


def coupled(adapter, x):
    """Compute equation 1 of NICE."""
    first, second = x.tensor_split([x.shape[-1] // 2], dim=-1)
    first = first + network(adapter, "f", second)
    return torch.cat([first, second + network(adapter, "g", first)], dim=-1)


def restored(adapter, y):
    first, second = y.tensor_split([y.shape[-1] // 2], dim=-1)
    second = second - network(adapter, "g", first)
    return torch.cat([first - network(adapter, "f", second), second], dim=-1)


def scores(model, **inputs):
    inputs = inputs or tiny_models.batch()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("architecture", EMBEDDINGS)
def test_embeddings_are_coupled_and_restored_below_the_output_layer(architecture):
    model = language_model(architecture)
    plain = copy.deepcopy(model)
    adapter = ah.attach(model, "invertible")
    assert torch.equal(scores(model), scores(plain))
    tiny_models.scramble(adapter)
    plain.get_submodule(EMBEDDINGS[architecture]).register_forward_hook(
        lambda _, args, output: coupled(adapter, output)
    )
    plain.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: restored(adapter, args[0])
    )
    torch.testing.assert_close(scores(model), scores(plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [6, 7])
def test_the_inverse_is_exact(width):
    torch.manual_seed(0)
    coupling = Coupling(width, reduction=2, activation="relu").double()
    for parameter in coupling.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, width, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.allclose(coupling(x), x)
        torch.testing.assert_close(coupling.inverse(coupling(x)), x)


def test_a_language_adapter_is_used_below_a_classifier(tmp_path):
    """The file of a language model has the tensors that a classifier needs."""
    writer, reader = language_model("bert"), tiny_models.model("bert")
    reader.bert.load_state_dict(writer.bert.state_dict(), strict=False)
    adapter = ah.attach(writer, "madx(size=4)", name="language")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "language")
    ah.load(reader, tmp_path / "language", any_backbone=True)
    with torch.no_grad():
        states = [m.bert(**tiny_models.batch()).last_hidden_state for m in (writer, reader)]
    torch.testing.assert_close(*states)


def test_new_tokens_are_scored_with_the_restored_states(backbones):
    """The output layer has one slot for rows of new tokens and for the inverse."""
    model, tokenizer = ah.load_backbone(str(backbones("llama")), task="causal-lm")
    tiny_models.scramble(ah.attach(model, "invertible", name="first"))
    inputs = tokenizer("the movie", return_tensors="pt")
    before = scores(model, **inputs)
    tokenizer.add_tokens(["<a>"])
    adapter = ah.attach(model, "invertible", name="second", tokenizer=tokenizer)
    tiny_models.scramble(adapter, seed=2)
    states = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, args, output: states.append(args[0]))
    new = tokenizer.convert_tokens_to_ids("<a>")
    found = scores(model, **inputs)[..., new]
    handle.remove()
    row = adapter.tensors()["tokens.output"][0]
    torch.testing.assert_close(found, states[0] @ row, atol=1e-5, rtol=1e-5)
    adapter.detach()
    ah.activate(model, "first")
    assert torch.equal(scores(model, **inputs), before)
