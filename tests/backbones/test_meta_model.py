"""Models without values, and stand-ins with random ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import adapterhub as ah
from adapterhub.backbones.meta_model import skeleton, stand_in
from tests.kit import tiny_models
from tests.kit.own_models import Everything


def test_it_has_the_sizes_and_no_values():
    net = Everything()
    empty = skeleton(net)
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in net.named_parameters()
    }
    assert all(p.is_meta for p in empty.parameters())
    assert not any(p.is_meta for p in net.parameters())
    empty.fc = nn.Identity()
    assert isinstance(net.fc, nn.Linear)
    ah.attach(net, "lora(sites=['conv', 'fc'])")
    without = {n for n, _ in skeleton(net).named_parameters()}
    assert without == {n for n, _ in Everything().named_parameters()}, "adapters are left out"


def test_what_is_tied_stays_tied():
    model = tiny_models.model("gpt2", "causal-lm")
    empty = skeleton(model)
    assert type(empty) is type(model)
    assert len(list(empty.parameters())) == len(list(model.parameters()))
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight


class Packed(nn.Module):
    """A projection whose weight is codes, as a quantized one's."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 6, 4
        codes = torch.zeros(12, 1, dtype=torch.uint8)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), None


def test_a_quantized_projection_is_a_plain_one():
    host = skeleton(nn.Sequential(Packed()))[0]
    assert isinstance(host, nn.Linear)
    assert (host.weight.shape, host.bias) == ((4, 6), None)
    assert host.weight.is_meta


def test_a_stand_in_takes_almost_no_memory():
    size = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 100_000}
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=8, **size))
    made = stand_in(model)
    parameters = list(made.parameters())
    assert sum(p.numel() for p in parameters) > 140_000_000
    assert sum(p.untyped_storage().nbytes() for p in parameters) < 2_000_000
    assert torch.linalg.matrix_rank(made.encoder.layer[0].attention.self.query.weight) == 1024


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_a_stand_in_computes(architecture):
    model = tiny_models.usual_model(architecture)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    made, again = stand_in(model), stand_in(model.to("meta"))
    assert {name: parameter.shape for name, parameter in made.named_parameters()} == shapes
    buffers = dict(tiny_models.usual_model(architecture).named_buffers())
    for name, buffer in made.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], equal_nan=True)
    inputs = tiny_models.batch()
    inputs |= tiny_models.decoder_inputs(made, inputs)
    with torch.no_grad():
        logits, repeated = made(**inputs).logits, again(**inputs).logits
    assert torch.equal(logits, repeated)
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def is_whole(model):
    return not any(parameter.is_meta for parameter in model.parameters())


def test_models_made_at_the_same_time_have_their_weights(backbones):
    """Without the lock some had parameters without values, and so had all that came later."""
    folder, other = str(backbones("bert")), tiny_models.language_model("llama")

    def load(task):
        return ah.load_backbone(folder, task=task)[0] if task else stand_in(other)

    with ThreadPoolExecutor(6) as pool:
        models = list(pool.map(load, ["masked-lm", None, "features"] * 8))
    assert all(map(is_whole, models))
    assert is_whole(ah.load_backbone(folder, task="masked-lm")[0])
