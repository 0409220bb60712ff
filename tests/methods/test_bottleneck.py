"""Bottleneck adapters in a BERT written by hand, after Houlsby et al. and He et al."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.bottleneck import Bottleneck
from tests.kit import tiny_models

ACTIVATION = {"houlsby": "gelu", "pfeiffer": "relu", "parallel": "relu", "scaled-parallel": "relu"}
SCALE = {"scaled-parallel": 4.0}
PLACES = {method: ("attn", "ffn") if method == "houlsby" else ("ffn",) for method in ACTIVATION}


def bottleneck(tensors, site, method, x):
    """Compute scale * up(f(down(x)))."""
    weight = {
        n: tensors[f"{site}.{method}.{n}"]
        for n in ("down.weight", "down.bias", "up.weight", "up.bias")
    }
    middle = getattr(F, ACTIVATION[method])(x @ weight["down.weight"].T + weight["down.bias"])
    return SCALE.get(method, 1.0) * (middle @ weight["up.weight"].T + weight["up.bias"])


def adapted(tensors, layer, method, sublayer, x, y):
    """Add the adapter of a sublayer: it reads the output (sequential) or the input (parallel)."""
    if sublayer not in PLACES[method]:
        return y
    source = x if "parallel" in method else y
    return y + bottleneck(tensors, f"encoder.{layer}.{sublayer}", method, source)


def attention(module, x):
    """Compute multi-head softmax attention; x: (batch, tokens, d)."""
    batch, tokens, width = x.shape
    heads = module.num_attention_heads

    def split(projected):
        return projected.view(batch, tokens, heads, width // heads).transpose(1, 2)

    query, key, value = (split(getattr(module, n)(x)) for n in ("query", "key", "value"))
    weights = (query @ key.transpose(-1, -2) / (width // heads) ** 0.5).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(batch, tokens, width)


@pytest.mark.parametrize("method", sorted(ACTIVATION))
def test_outputs_equal_the_reference(method):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, method)
    tiny_models.scramble(adapter)
    inputs, tensors, bert = tiny_models.batch(), adapter.tensors(), tiny_models.model("bert").bert
    with torch.no_grad():
        h = bert.embeddings(inputs["input_ids"])
        for number, layer in enumerate(bert.encoder.layer):
            out = layer.attention.output
            y = out.dense(attention(layer.attention.self, h))
            h = out.LayerNorm(adapted(tensors, number, method, "attn", h, y) + h)
            y = layer.output.dense(F.gelu(layer.intermediate.dense(h)))
            h = layer.output.LayerNorm(adapted(tensors, number, method, "ffn", h, y) + h)
        expected = model.classifier(torch.tanh(bert.pooler.dense(h[:, 0])))
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_count_is_its_formula(subtests):
    """2 d size + size + d per site."""
    for method in sorted(ACTIVATION):
        with subtests.test(method=method):
            adapter = ah.attach(tiny_models.model("bert"), f"{method}(size=5)")
            assert adapter.count() == 2 * len(PLACES[method]) * (2 * 32 * 5 + 5 + 32)
            assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), "pfeiffer(activation=swoosh)")
    assert "swoosh" in str(error.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_scale_is_no_symbol_that_inductor_cannot_lower(scale):
    """With dynamic=True a float attribute is a symbol; as `alpha` of addmm it needs `item()`."""
    targets = set()

    def record(graph, inputs):
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    module = Bottleneck(8, 8, 2, "relu", "output", scale)
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for tokens in (4, 7):
        x, y = torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)
        torch.testing.assert_close(compiled(x, y), module(x, y))
    compiled(x, y).sum().backward()
    assert targets
    assert torch.ops.aten._local_scalar_dense.default not in targets
