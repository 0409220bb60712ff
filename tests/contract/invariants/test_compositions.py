"""Stacks and averages of adapters: what they compute, and which ones are refused."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import with_adapters
from tests.kit.tiny_models import logits


def test_two_active_adapters_form_a_stack():
    model = tiny_models.model("bert", "features")
    hidden = lambda: model(**tiny_models.batch()).last_hidden_state.detach()  # noqa: E731
    for name in "ab":
        tiny_models.scramble(ah.attach(model, "lora(sites=['attn.q'])", name=name), seed=ord(name))
    alone = hidden()
    ah.activate(model, "a", "b")
    both = hidden()
    assert not torch.allclose(both, alone)
    query = model.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    modules = [m for _, m in query.adapterhub.named_children()]
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    expected = y + sum(2.0 * x @ m.A.T @ m.B.T for m in modules)
    torch.testing.assert_close(query(x), expected)


def test_an_average_is_the_mean_of_the_outputs_at_a_site():
    model = with_adapters({"a": "lora", "b": "lora(rank=2)", "c": "pfeiffer"})
    ah.activate(model, ah.Average(["a", "b", "c"], weights=[0.5, 0.3, 0.2]))
    query = model.bert.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    a, b = (m for _, m in query.adapterhub.named_children())
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    updates = [m.scale * x @ m.A.T @ m.B.T for m in (a, b)]
    expected = y + 0.5 * updates[0] + 0.3 * updates[1]  # c has no module here, so it returns y
    torch.testing.assert_close(query(x), expected)


def test_the_head_of_an_average_is_the_mean_of_the_heads():
    model = with_adapters({"a": "head", "b": "head"})
    each = [(ah.activate(model, name), logits(model))[1] for name in "ab"]
    ah.activate(model, ah.Average(["a", "b"], weights=[0.25, 0.75]))
    torch.testing.assert_close(logits(model), 0.25 * each[0] + 0.75 * each[1])
    ah.activate(model, ah.Average(["a", "a"]))
    torch.testing.assert_close(logits(model), each[0])


def test_compositions_nest():
    """An average of a stack, and a stack on an average."""
    model = with_adapters({"a": "pfeiffer", "b": "houlsby", "c": "lora"})
    layer = model.bert.encoder.layer[0].output.dense
    x, y = torch.randn(1, 2, 48), None
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    a, b = (m for _, m in layer.adapterhub.named_children())
    ah.activate(model, ah.Average([("a", "b"), "b"]), "a")
    middle = 0.5 * b(x, a(x, y)) + 0.5 * b(x, y)
    torch.testing.assert_close(layer(x), a(x, middle))


def test_an_impossible_average_changes_nothing():
    model = with_adapters({"a": "lora", "p": "prefix", "v": "prompt", "full": "full", "n": "norms"})
    ah.activate(model, "a")
    expected = logits(model)
    with pytest.raises(AttachError, match="virtual tokens cannot be averaged") as error:
        ah.activate(model, ah.Average(["a", "p", "v"]))
    assert error.value.offenders == ("'p': prefix", "'v': prompt")
    with pytest.raises(AttachError, match="shared by the whole batch") as error:
        ah.activate(model, ah.Average(["full", "n", "a"]))
    assert error.value.offenders == ("'full': full", "'n': norms")
    assert "lora" in error.value.expected
    assert "norms" not in error.value.expected
    with pytest.raises(AttachError, match="sum to 1"):
        ah.Average(["a", "b"], weights=[1, 1])
    with pytest.raises(AttachError, match="is not the name of an adapter"):
        ah.activate(model, 3)
    assert torch.equal(logits(model), expected)


def test_an_average_of_different_labels_is_refused(tmp_path):
    other = tiny_models.model("bert", num_labels=2)
    ah.attach(other, "lora").save(tmp_path / "two")
    model = with_adapters({"three": "lora"})
    ah.load(model, tmp_path / "two", name="two", any_backbone=True)
    with pytest.raises(AttachError, match="different labels") as error:
        ah.activate(model, ah.Average(["two", "three"]))
    assert len(error.value.offenders) == 2


def test_a_member_of_the_active_average_cannot_be_detached():
    model = with_adapters({"a": "lora", "b": "lora"})
    keys = set(model.state_dict())
    ah.activate(model, ah.Average(["a", "b"]))
    with pytest.raises(AttachError, match="part of the active average"):
        ah.detach(model, "a")
    ah.activate(model, "a", "b")
    assert set(model.state_dict()) == keys
    ah.detach(model, "a")
    ah.activate(model, ah.Average(["b"]))
    ah.detach(model)
    assert not hasattr(model, "_adapterhub")
    assert not [n for n, m in model.named_modules() if n.endswith("adapterhub")]


def test_a_failed_attach_leaves_the_average_active():
    model = with_adapters({"a": "lora", "b": "lora"})
    ah.activate(model, ah.Average(["a", "b"]))
    expected = logits(model)
    with pytest.raises(ah.AdapterhubError):
        ah.attach(model, {"lora": {"sites": ["cross.q"]}}, name="c")
    assert torch.equal(logits(model), expected)
