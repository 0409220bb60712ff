"""The prefixes of the rows of a call."""

from __future__ import annotations

import torch

import adapterhub as ah
from tests.kit import tiny_models

LENGTHS = {"a": 2, "b": 3, "c": 1}


def model_and_slot():
    model = tiny_models.model("mpnet")
    for name, length in LENGTHS.items():
        ah.attach(model, f"prefix(length={length})", name=name)
    return model, model.mpnet.encoder.layer[0].attention.attn.adapterhub


def prefix(model, name):
    slot = model.mpnet.encoder.layer[0].attention.attn.adapterhub
    ah.activate(model, name)
    (key,) = slot.keys
    return slot.placed(key).prefix


def test_the_prefix_of_the_last_adapter_of_a_stack_comes_first():
    model, slot = model_and_slot()
    expected = torch.cat([prefix(model, "b"), prefix(model, "a")], dim=1)
    ah.activate(model, "a", "b")
    joined = slot.joined(4, None)
    assert torch.equal(torch.stack([joined.key[0], joined.value[0]]), expected)
    assert joined.own is joined.gate is None


def test_rows_have_their_own_and_shorter_ones_are_padded_in_front():
    model, slot = model_and_slot()
    rows = ["b", "a", None, "a", ["a", "c"]]
    lengths = [3, 2, 0, 2, 3]
    for copies in (1, 2):
        with ah.route(model, rows):
            joined = slot.joined(len(rows) * copies, None)
        assert joined.key.shape == (len(rows) * copies, 3, 32)
        expected = torch.arange(3) >= 3 - torch.tensor(lengths)[:, None]
        assert torch.equal(joined.own, expected.repeat_interleave(copies, 0))
        assert torch.equal(joined.key[0], prefix(model, "b")[0])
        assert torch.equal(joined.value[3 * copies, 1:], prefix(model, "a")[1])
        assert not joined.key[2 * copies].any()


def test_prefixes_without_a_gate_have_open_ones_beside_others():
    model, slot = model_and_slot()
    gated = ah.attach(model, "unipelt(length=2, sites=['attn.kv'])", name="gated")
    tiny_models.scramble(gated)
    x = torch.randn(2, 5, 32)
    with ah.route(model, ["gated", "b"]):
        joined = slot.joined(2, x)
    assert joined.gate.shape == (2, 5, 3)
    assert torch.equal(joined.gate[1], torch.ones(5, 3))
    assert (joined.gate[0, :, 1:] < 1).all()
    assert joined.own.tolist() == [[False, True, True], [True, True, True]]
