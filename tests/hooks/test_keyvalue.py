"""The prefixes of the rows of a call, and their relative positions: T5's bias over them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.hooks.keyvalue import RelativeBias
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.site_module import PrefixModule
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


ARCHITECTURES = ("t5", "umt5")


class Distances(nn.Module):
    """A relative bias equal to the distance k_j - q_i."""

    def compute_bias(self, queries, keys, device=None, past_seen_tokens=0):
        distances = torch.arange(keys)[None] - torch.arange(queries)[:, None] - past_seen_tokens
        return distances[None, None].float()


def widened(positions, past, queries, keys):
    """Return the bias of the tokens alone, and the bias over {name: (length, positions)} too."""
    slot, lengths = Slot(), {}
    for name, (length, counts) in positions.items():
        module = PrefixModule()
        module.positions = counts
        slot.add_module(name, module)
        lengths[name] = length
    bias = RelativeBias(Distances())
    slot.keep("past", past)
    tokens = bias.source.compute_bias(queries, keys, past_seen_tokens=past)
    return tokens, bias.widen(tokens, lengths, slot)


@pytest.mark.parametrize(
    ("prefixes", "past", "shift", "distances"),
    [
        ({"a": (2, True)}, 3, 0, [[-5, -4], [-6, -5]]),  # queries at 2 + 3 and 2 + 4
        ({"a": (2, "keys")}, 3, 2, [[-3, -2], [-4, -3]]),
        # From the left: far at 0, two without a position, near at 1; the queries at 0 + 1, 1 + 1.
        ({"near": (1, True), "none": (2, False), "far": (1, "keys")}, 0, 1,
         [[-1, 0, 0, 0], [-2, 0, 0, -1]]),
    ],
)  # fmt: skip
def test_a_prefix_moves_queries_or_only_the_keys(prefixes, past, shift, distances):
    tokens, bias = widened(prefixes, past=past, queries=2, keys=5)
    width = len(distances[0])
    assert torch.equal(bias[..., width:], tokens + shift)
    assert bias[0, 0, :, :width].tolist() == distances


@pytest.mark.parametrize("positions", ["true", "keys"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generation_is_independent_of_the_cache(architecture, positions):
    model = tiny_models.model(architecture, "seq2seq")

    def generated(**cache):
        return model.generate(
            **tiny_models.batch(), **cache, max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        ).logits  # fmt: skip

    bare = generated()
    tiny_models.scramble(ah.attach(model, f"prefix(length=3, positions={positions})"))
    expected = generated(use_cache=False)
    for cache in ({}, {"cache_implementation": "static"}):
        torch.testing.assert_close(generated(**cache), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected[0], bare[0], atol=1e-3)


def test_each_row_has_its_own_positions():
    model = tiny_models.model("t5", "seq2seq")
    for name, spec in (
        ("none", "prefix(length=2)"),
        ("tokens", "prefix(length=3, positions=true)"),
        ("keys", "prefix(length=4, positions=keys)"),
    ):
        tiny_models.scramble(ah.attach(model, spec, name=name))
    inputs = tiny_models.batch()
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    rows = ["keys", "none", "tokens"][: len(inputs["input_ids"])]
    with torch.no_grad():
        with ah.route(model, rows):
            routed = model(**inputs).logits
        for number, name in enumerate(rows):
            ah.activate(model, name)
            alone = model(**{k: v[number : number + 1] for k, v in inputs.items()}).logits
            torch.testing.assert_close(routed[number], alone[0], atol=1e-5, rtol=1e-5)


def test_a_reparametrized_prefix_keeps_its_positions(tmp_path):
    model = tiny_models.model("t5", "seq2seq")
    spec = "prefix(length=3, positions=keys, reparametrize=true, middle=4)"
    tiny_models.scramble(adapter := ah.attach(model, spec))
    inputs = tiny_models.batch() | {"decoder_input_ids": tiny_models.batch()["input_ids"][:, :4]}
    with torch.no_grad():
        expected = model(**inputs).logits
        adapter.save(tmp_path / "saved")
        adapter.detach()
        ah.load(model, tmp_path / "saved")
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_position_table_skips_the_prefix():
    """BART's stacks take no position_ids; tokens after a prefix of 3 use the rows 3, 4, ..."""
    model = tiny_models.model("bart", "seq2seq")
    inputs = tiny_models.batch() | {"decoder_input_ids": tiny_models.batch()["input_ids"][:, :4]}
    seen = {}
    handles = [
        stack.embed_positions.register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: out})
        )
        for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder))
    ]
    ah.attach(model, "prefix(length=3, positions=true)")
    with torch.no_grad():
        model(**inputs)
        after_prefix = dict(seen)
        ah.activate(model)
        model(**inputs)
    for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        table = stack.embed_positions
        tokens = seen[name].shape[-2]
        start = table.offset
        rows = table.weight[start + 3 : start + 3 + tokens]
        assert torch.equal(after_prefix[name].reshape(-1, rows.shape[-1])[:tokens], rows)
        assert torch.equal(seen[name].reshape(-1, rows.shape[-1])[0], table.weight[start])
    for handle in handles:
        handle.remove()
    ah.detach(model)
    assert not model.model.decoder.embed_positions._forward_pre_hooks
