"""UniPELT: gates follow their equations.

tests/interchange/adapters_library compares outputs with those of the `adapters` library.
"""

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.selection import long_table


@pytest.mark.parametrize("method", ["lora", "pfeiffer"])
def test_an_update_is_scaled_by_its_gate(method):
    model = tiny_models.model("bert", "features")
    adapter = ah.attach(model, "unipelt")
    tiny_models.scramble(adapter)
    (placed, *_) = [p for p in adapter.placed if p.method.name == method]
    site = placed.site
    x, y = torch.randn(2, 5, site.d_in), torch.randn(2, 5, site.d_out)
    gate, update = placed.module.gate, placed.module.update
    assert gate.weight.shape == (1, site.d_out if method == "pfeiffer" else site.d_in)
    g = torch.sigmoid((y if method == "pfeiffer" else x) @ gate.weight[0] + gate.bias)
    expected = y + g[..., None] * (update(x, y) - y)
    torch.testing.assert_close(placed.module(x, y), expected)
    if method == "lora":
        torch.testing.assert_close(update(x, y), y + x @ update.A.T @ update.B.T)


@pytest.mark.parametrize(
    ("sites", "parts"),
    [
        (["attn.kv", "ffn"], {"attn.kv": "prefix", "ffn": "pfeiffer"}),
        (["encoder.0.attn.q", "encoder.1.attn"], {"attn.q": "lora", "attn": "pfeiffer"}),
        (["ffn.down", "encoder.attn.kv"], {"ffn.down": "lora", "attn.kv": "prefix"}),
    ],
)
def test_the_kind_of_a_site_selects_the_method(sites, parts):
    model = tiny_models.model("bert", "features")
    adapter = ah.attach(model, {"unipelt": {"sites": sites, "source": "block"}})
    assert {p.site.role: p.method.name for p in adapter.placed} == parts
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(m.count(adapter.state.anatomy) for m in adapter.methods) == trained


def test_a_sequence_gate_is_refused_in_generation():
    for architecture in ("llama", "bart"):
        model = tiny_models.language_model(architecture)
        with pytest.raises(SiteError, match="reads later tokens") as error:
            ah.attach(model, "unipelt(gate=sequence)")
        assert error.value.hint == "gate=token"
        assert not hasattr(model, "_adapterhub")
    # A classifier reads all tokens at once.
    ah.attach(tiny_models.model("llama"), "unipelt(gate=sequence)")


@long_table(("combined", "architecture", "other", "first"), [
    (c, a, o, f) for c in ("unipelt", "mam") for a in ("bert", "gpt2", "llama", "t5")
    for o in ("pfeiffer", "houlsby", "madx", "prefix", "lora", "scaled-parallel", "mam", "unipelt")
    for f in (True, False)
], 16, nightly=4)  # fmt: skip
def test_combined_methods_beside_others_work_or_are_refused(combined, architecture, other, first):
    """Two methods of one kind at one site would have one place: the second would hide the first."""
    model, inputs = tiny_models.model(architecture), tiny_models.batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    methods = [METHODS[combined].example(), METHODS[other].example()]
    try:
        adapter = ah.attach(model, methods if first else methods[::-1])
    except AttachError as error:
        refusal = str(error)
        adapters = [ah.attach(model, each, name=f"a{n}") for n, each in enumerate(methods)]
        ah.activate(model, *(each.name for each in adapters))
    else:
        adapters, refusal = [adapter], ""
    assert not refusal or "as two adapters" in refusal
    for each in adapters:
        each.train_mode()
    model(**inputs).logits.pow(2).sum().backward()
    missing = [
        name
        for each in adapters
        for name, tensor in each.tensors().items()
        if tensor.requires_grad and tensor.grad is None and not name.startswith("head.")
    ]
    assert not missing
    ah.detach(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
