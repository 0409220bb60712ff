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
from tests.kit.tiny_adapters import check_rows


def test_the_prefix_of_the_last_adapter_of_a_stack_comes_first():
    model = tiny_models.model("mpnet")
    adapters = [ah.attach(model, f"prefix(length={n})", name=str(n)) for n in (2, 3)]
    expected = torch.cat([adapter.placed[0].module.prefix for adapter in adapters[::-1]], dim=1)
    ah.activate(model, "2", "3")
    joined = model.mpnet.encoder.layer[0].attention.attn.adapterhub.joined(4, None)
    assert torch.equal(torch.stack([joined.key[0], joined.value[0]]), expected)
    assert joined.own is joined.gate is None


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


@pytest.mark.parametrize("positions", ["true", "keys", "keys, reparametrize=true, middle=4"])
@pytest.mark.parametrize("architecture", ["t5", "umt5"])
def test_generation_is_independent_of_the_cache_and_of_files(architecture, positions, tmp_path):
    model = tiny_models.model(architecture, "seq2seq")

    def generated(**cache):
        return model.generate(
            **tiny_models.batch(), **cache, max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        ).logits  # fmt: skip

    bare = generated()
    adapter = ah.attach(model, f"prefix(length=3, positions={positions})")
    tiny_models.scramble(adapter)
    expected = generated(use_cache=False)
    adapter.save(tmp_path / "saved")
    adapter.detach()
    ah.load(model, tmp_path / "saved")
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
    check_rows(model, ["keys", "none", "tokens"], lambda: model(**inputs).logits, rtol=1e-5)


def test_a_position_table_skips_the_prefix():
    """BART's stacks take no position_ids; tokens after a prefix of 3 use the rows 3, 4, ..."""
    model = tiny_models.model("bart", "seq2seq")
    ah.attach(model, "prefix(length=3, positions=true)")
    tables = [stack.embed_positions for stack in (model.model.encoder, model.model.decoder)]
    seen = {table: [] for table in tables}
    for table in tables:
        table.register_forward_hook(lambda table, _, rows: seen[table].append(rows[0]))
    for names in (["default"], []):
        ah.activate(model, *names)
        tiny_models.logits(model)
    for table, (behind_prefix, bare) in seen.items():
        rows = table.weight[table.offset :]
        assert torch.equal(behind_prefix, rows[3 : 3 + len(behind_prefix)])
        assert torch.equal(bare, rows[: len(bare)])
    ah.detach(model)
    assert not model.model.decoder.embed_positions._forward_pre_hooks
