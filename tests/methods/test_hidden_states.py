"""Methods that change hidden states: ReFT edits those of some tokens, a scalar mix adds layers."""

import copy

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MergeError
from adapterhub.hooks.composition import kept_values
from adapterhub.hooks.slot import Slot
from tests.kit import tiny_models
from tests.kit.data import train
from tests.kit.tiny_models import hidden_states

METHODS = ("loreft", "noreft", "direft")


def states(model, batch):
    """Return the output of the first layer, on which the second one has no effect."""
    with torch.no_grad():
        return model(**batch, output_hidden_states=True).hidden_states[1]


def basis(edit, method):
    """Return P by another way than the method's: QR with positive diagonal."""
    if method != "loreft":
        return edit.P.detach()
    q, r = torch.linalg.qr(edit.P.detach().T.double())
    return (q * r.diagonal().sign()).T.float()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_and_the_last_tokens_are_edited(method, shared):
    model = tiny_models.model("bert", "features")
    batch = tiny_models.padded_batch("right")
    bare = states(model, batch)
    options = {"rank": 3, "positions": "f2+l1", "layers": [0], "shared": shared}
    adapter = ah.attach(model, {method: options})
    assert torch.equal(states(model, batch), bare)
    tiny_models.scramble(adapter)
    (placed,) = adapter.placed
    edits = dict(placed.module.named_children())
    assert list(edits) == (["edit"] if shared else ["first", "last"])
    expected = bare.clone()
    for row, length in enumerate((9, 7, 5)):
        for token, name in ((0, "first"), (1, "first"), (length - 1, "last")):
            edit, h = edits["edit" if shared else name], bare[row, token]
            p = basis(edit, method)
            change = edit.W @ h + edit.b - (0 if method == "direft" else p @ h)
            expected[row, token] = h + p.T @ change
    torch.testing.assert_close(states(model, batch), expected, atol=1e-5, rtol=1e-4)


def test_rows_stay_orthonormal():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "loreft(rank=4)")
    train(adapter, 3, learning_rate=0.05)
    for placed in adapter.placed:
        rows = placed.module.edit.subspace()
        torch.testing.assert_close(rows @ rows.T, torch.eye(4), atol=1e-5, rtol=0)
        assert not torch.allclose(rows, placed.module.edit.W, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_the_start_of_the_paper_is_an_option(method):
    model, batch = tiny_models.model("bert", "features"), tiny_models.padded_batch("left")
    bare = states(model, batch)
    ah.attach(model, {method: {"init": "paper"}})
    assert not torch.allclose(states(model, batch), bare, atol=1e-3)


def test_a_token_in_both_sets_is_one_of_the_last():
    model = tiny_models.model("bert", "features")
    adapter = ah.attach(model, "direft(positions='f4+l4', shared=false, layers=[0])")
    tiny_models.scramble(adapter)
    (placed,) = adapter.placed
    ids = torch.full((1, 5), 7)
    edited = states(model, {"input_ids": ids})
    ah.activate(model)
    bare = states(model, {"input_ids": ids})
    expected = torch.cat([placed.module.first(bare[:, :1]), placed.module.last(bare[:, 1:])], 1)
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("method", "at"), [("loreft", "decoder.layer"), ("alora", "attn.q")])
def test_changes_of_some_tokens_are_neither_merged_nor_combined(method, at):
    model = tiny_models.model("llama", "causal-lm")
    ah.attach(model, method)
    with pytest.raises(MergeError, match=rf"{method} at .*{at}.*: it changes some tokens"):
        ah.merge(model)
    with pytest.raises(AdapterhubError):
        ah.combine(model, ["default"], name="sum")


def test_a_layer_that_any_method_names():
    model = tiny_models.model("llama")
    adapter = ah.attach(model, "lora(sites=[layer], rank=2)")
    assert [placed.site.id for placed in adapter.placed] == ["decoder.0.layer", "decoder.1.layer"]
    tiny_models.scramble(adapter)
    losses = train(adapter, 3)
    assert losses[-1] < losses[0]


# A scalar mix: its equation, on the hidden states that transformers returns.


def expected_mix(adapter, hidden):
    """Compute gamma sum_j softmax(w)_j h_j."""
    mix = adapter.placed[0].module
    shares = mix.w.detach().softmax(0)
    return mix.gamma.detach() * sum(s * h for s, h in zip(shares, hidden, strict=True))


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_the_output_is_the_mean_at_first_and_then_equation_1(architecture):
    model = tiny_models.model(architecture, "features")
    hidden = hidden_states(model)
    assert len(hidden) == 3
    adapter = ah.attach(model, "scalar-mix")
    with torch.no_grad():
        output = model(**tiny_models.batch()).last_hidden_state
        torch.testing.assert_close(output, sum(hidden) / 3, atol=1e-5, rtol=1e-5)
        tiny_models.scramble(adapter, std=1.0)
        output = model(**tiny_models.batch()).last_hidden_state
        torch.testing.assert_close(output, expected_mix(adapter, hidden), atol=1e-5, rtol=1e-5)
    (slot,) = (module for module in model.modules() if isinstance(module, Slot))
    assert not kept_values(slot), "nothing is kept behind a pass"


def test_the_mix_enters_below_a_final_norm():
    model = tiny_models.model("gpt2", "features")
    outputs = []
    handle = model.h[-1].register_forward_hook(lambda *a: outputs.append(a[2]))
    hidden = (*hidden_states(model)[:-1], outputs[0] if outputs[0].ndim == 3 else outputs[0][0])
    handle.remove()
    adapter = ah.attach(model, "scalar-mix")
    tiny_models.scramble(adapter, std=1.0)
    with torch.no_grad():
        output = model(**tiny_models.batch()).last_hidden_state
        expected = model.ln_f(expected_mix(adapter, hidden))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_model_in_training_can_be_copied():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "scalar-mix, lora(layers=0)")
    tiny_models.scramble(adapter)
    tiny_models.enable_gradient_checkpointing(model)
    model.train()
    model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    assert all(bool(p.grad.any()) for p in adapter.parameters()), "below the mix, too"
    other = copy.deepcopy(model).eval()
    model.eval()
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
        assert torch.equal(other(**tiny_models.batch()).logits, expected)
