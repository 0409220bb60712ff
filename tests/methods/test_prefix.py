"""Prefix tuning: its equation, the network that reparametrizes it, its size and learning rate."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from one_site import attention_tensors

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.prefix import Prefix
from adapterhub.training.options import TrainOptions
from adapterhub.training.trainee import AdapterTrainee


def test_attention_reads_the_prefix_before_keys_and_values():
    """attention(Q, [P_k; K], [P_v; V])."""
    model = tiny_models.model("bert", "features")
    adapter = ah.attach(model, "prefix(length=3)")
    tiny_models.scramble(adapter, std=0.5)
    seen = attention_tensors(model, model.encoder.layer[0].attention.self)
    prefix = adapter.tensors()["encoder.0.attn.kv.prefix.prefix"].detach()
    rows, _, width = seen["query"].shape

    def heads(tensor):
        return tensor.unflatten(-1, (4, -1)).transpose(1, 2)

    key = heads(torch.cat([prefix[0].expand(rows, -1, -1), seen["key"]], dim=1))
    value = heads(torch.cat([prefix[1].expand(rows, -1, -1), seen["value"]], dim=1))
    shares = (heads(seen["query"]) @ key.transpose(2, 3) / (width / 4) ** 0.5).softmax(-1)
    expected = (shares @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen["output"], expected, atol=1e-5, rtol=1e-5)


def test_a_network_computes_the_reparametrized_prefix():
    """[P_k; P_v] = W_site tanh(W P' + b) + b_site."""
    spec = "prefix(length=3, reparametrize=true, middle=5)"
    adapter = ah.attach(tiny_models.model("bert", "features"), spec)
    tiny_models.scramble(adapter)
    tensors = {name: tensor.detach() for name, tensor in adapter.tensors().items()}
    trunk, path = "encoder.0.attn.kv.prefix.trunk", "encoder.1.attn.kv.prefix.outer"
    inner = tensors[f"{trunk}.prefix"] @ tensors[f"{trunk}.inner.weight"].T
    middle = (inner + tensors[f"{trunk}.inner.bias"]).tanh()
    both = middle @ tensors[f"{path}.weight"].T + tensors[f"{path}.bias"]
    (module,) = (p.module for p in adapter.placed if p.site.id == "encoder.1.attn.kv")
    expected = torch.stack([both[:, :32], both[:, 32:]])
    torch.testing.assert_close(module().detach(), expected, atol=1e-5, rtol=1e-5)


def test_the_count_is_its_formula():
    plain = ah.attach(tiny_models.model("bert"), "prefix(length=3)")
    assert plain.count() == 2 * (2 * 3 * 32)
    network = ah.attach(tiny_models.model("bart"), "prefix(length=3, reparametrize=true, middle=5)")
    # Three trunks: encoder attention, decoder attention and cross-attention, in two layers each.
    assert network.count() == 3 * (3 * 32 + 5 * (32 + 1)) + 6 * 2 * 32 * (5 + 1)
    for adapter in (plain, network):
        assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_a_reparametrized_prefix_has_a_lower_learning_rate():
    def rate(spec):
        adapter = ah.attach(tiny_models.model("bert"), spec)
        (group,) = (
            g for g in AdapterTrainee(adapter).param_groups(TrainOptions()) if g["name"] != "head"
        )
        return group["lr"]

    assert rate("prefix(reparametrize=true, middle=4)") == pytest.approx(0.1 * rate("prefix"))


@pytest.mark.parametrize("option", ["length", "middle"])
def test_a_size_of_zero_is_refused(option):
    with pytest.raises(ConfigError) as error:
        Prefix(**{option: 0})
    assert option in str(error.value)
