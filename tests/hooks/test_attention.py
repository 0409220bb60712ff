"""Prefixes in attention: by the interface of transformers, and in products of torch's functions."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

import adapterhub as ah
import adapterhub.hooks.attention as attention
from adapterhub.anatomy.projections import attends
from adapterhub.errors import AttachError, SiteError
from adapterhub.hooks.attention import SUPPORTED, WatchedProducts
from adapterhub.hooks.keyvalue import JoinedPrefixes, RelativeBias
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.site_module import PrefixModule
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_rows
from tests.kit.tiny_models import logits

PREFIXES = ("prefix(length=3)", "prefix(length=2)", "unipelt(length=3, sites=['attn.kv'])")


def test_a_prefix_is_visible_to_every_token_of_a_causal_model():
    """Without a mask from the caller, transformers relies on torch's causal flag."""
    model = usual_model("llama", "sdpa", PREFIXES[0])
    ids = tiny_models.batch()["input_ids"]
    expected = logits(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(logits(model, input_ids=ids), expected)
    bare = usual_model("llama", "sdpa")
    hidden = [m.model(ids).last_hidden_state for m in (model, bare)]
    assert not torch.allclose(hidden[0][:, 0], hidden[1][:, 0], atol=1e-3)


def test_eager_attention_returns_weights_over_prefix_and_tokens():
    model = usual_model("bert", "eager", PREFIXES[0])
    with torch.no_grad():
        output = model(**tiny_models.batch(), output_attentions=True)
    weights = output.attentions[0]
    assert weights.shape[-2:] == (9, 3 + 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def is_routed(architecture):
    model = tiny_models.usual_model(architecture)
    sites = ah.anatomy_of(model).sites.values()
    hosts = [model.get_submodule(site.host) for site in sites if site.kind == "keyvalue"]
    return bool(hosts) and all(attends(host) == "interface" for host in hosts)


ROUTED = list(filter(is_routed, tiny_models.MATRIX))
SWITCHES = [(a, *pair) for a in ROUTED for pair in itertools.permutations(SUPPORTED)]
assert len(SWITCHES) >= 2 * (28 if tiny_models.FULL_MATRIX else 9)  # most have a prefix


def set_by_method(model, implementation):
    model.set_attn_implementation(implementation)


def set_in_config(model, implementation):
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = implementation


def usual_model(architecture, implementation, spec=None):
    model = tiny_models.usual_model(architecture)
    set_in_config(model, implementation)
    if spec:
        torch.manual_seed(0)
        tiny_models.scramble(ah.attach(model, spec), std=0.5)
    return model


def implementations(model):
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


@long_table(
    ("architecture", "before", "after", "switch"),
    [(*each, switch) for each in SWITCHES for switch in (set_by_method, set_in_config)],
    3,
)
def test_a_prefix_follows_a_later_change_of_the_implementation(architecture, before, after, switch):
    spec = PREFIXES[0]
    expected = logits(usual_model(architecture, after, spec))
    bare = logits(usual_model(architecture, after))
    assert not torch.allclose(bare, expected, atol=1e-3)
    model = usual_model(architecture, before, spec)
    assert not torch.allclose(logits(model), bare, atol=1e-3)
    switch(model, after)
    assert implementations(model) >= {after}
    assert torch.equal(logits(model), expected)
    ah.activate(model)
    assert torch.equal(logits(model), bare)
    ah.detach(model)
    assert implementations(model) == {after}
    assert torch.equal(logits(model), bare)
    switch(model, before)
    assert implementations(model) == {before}
    assert torch.equal(logits(model), logits(usual_model(architecture, before)))


@long_table("architecture", ROUTED, 3)
def test_models_that_share_a_config_keep_their_own_prefixes(architecture):
    one = usual_model(architecture, "sdpa")
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    assert other.config is one.config
    bare = logits(other)
    for model, seed in ((one, 1), (other, 2)):
        tiny_models.scramble(ah.attach(model, "prefix(length=3)"), seed=seed, std=0.5)
    with_prefix = logits(other)
    assert not torch.allclose(with_prefix, bare, atol=1e-3)
    assert not torch.allclose(with_prefix, logits(one), atol=1e-3)
    ah.detach(one)
    assert torch.equal(logits(one), bare)
    assert torch.equal(logits(other), with_prefix)
    ah.detach(other)
    assert torch.equal(logits(other), bare)


@pytest.mark.parametrize(
    ("architecture", "spec"), [("bert", PREFIXES[2]), ("t5", PREFIXES[0]), ("llama", PREFIXES[0])]
)
def test_a_copied_or_pickled_model_has_its_own_prefix_and_config(architecture, spec):
    """All implementations of attention have equal outputs."""
    assert sorted(SUPPORTED) == ["eager", "sdpa"]
    model = usual_model(architecture, "sdpa", spec)
    expected = logits(model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    ah.detach(model)
    for twin in twins:
        assert torch.equal(logits(twin), expected)
        twin.set_attn_implementation("eager")
        assert implementations(model) == {"sdpa"}
        torch.testing.assert_close(logits(twin), expected, atol=1e-5, rtol=1e-4)
        ah.detach(twin)
        assert implementations(twin) == {"eager"}


def test_an_unsupported_implementation_is_refused_at_the_next_forward():
    model = usual_model("llama", "sdpa", PREFIXES[0])
    expected = logits(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SiteError, match="flash_attention_2"):
        logits(model)
    ah.activate(model)
    view = model.model.layers[0].self_attn.config  # an attention has that of its model
    assert view._attn_implementation == "flash_attention_2"
    assert view.hidden_size == model.config.hidden_size
    view.note = "written"
    assert model.config.note == "written"
    with pytest.raises(AttributeError, match="no_such_field"):
        view.no_such_field  # noqa: B018
    ah.activate(model, "default")
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), expected)


# Keys and values of all heads; of fewer heads than queries; with biases of relative positions;
# encoder and decoder.
WATCHED = ("bert", "gpt2", "llama", "qwen3", "t5", "bart")
ROUTE = ["2", "0", None, "1", ["0", "1"]]


def padded_logits(model, rows=5, **options):
    inputs = tiny_models.batch(rows) | options
    inputs["attention_mask"][0, -3:] = 0
    with torch.no_grad():
        return model(**inputs, **tiny_models.decoder_inputs(model, inputs)).logits


def prefixed(architecture, implementation):
    model = tiny_models.usual_model(architecture)
    model.set_attn_implementation(implementation)
    for number, spec in enumerate(PREFIXES):
        torch.manual_seed(number)
        tiny_models.scramble(ah.attach(model, spec, name=str(number)), std=0.5, seed=number)
    return model


@pytest.fixture
def of_torch(monkeypatch):
    """Let transformers' own eager and sdpa functions be watched, as those of a module's own."""
    monkeypatch.setattr(attention, "attends", lambda module: "torch")


@long_table(
    ("architecture", "implementation"), list(itertools.product(WATCHED, ("eager", "sdpa"))), 3
)
def test_it_computes_what_the_interface_computes(architecture, implementation, of_torch):
    watched = prefixed(architecture, implementation)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(attention, "attends", attends)
        routed = prefixed(architecture, implementation)
    for names in (["0"], ["2"], ["0", "2", "1"], []):
        for model in (watched, routed):
            ah.activate(model, *names)
        torch.testing.assert_close(
            padded_logits(watched), padded_logits(routed), atol=2e-5, rtol=1e-4
        )
    with ah.route(watched, ROUTE):
        found = padded_logits(watched)
    with ah.route(routed, ROUTE):
        torch.testing.assert_close(found, padded_logits(routed), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["falcon", "bloom", "mpt", "gptj", "gpt_neo"])
def test_rows_have_their_own_prefixes_in_generation(architecture):
    model = tiny_models.language_model(architecture)
    for number, spec in enumerate(PREFIXES):
        tiny_models.scramble(ah.attach(model, spec, name=str(number)), std=0.5, seed=number)
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2, "pad_token_id": 1}
    inputs = tiny_models.batch(3) | options | {"min_new_tokens": 5}
    check_rows(model, list("012"), lambda: model.generate(**inputs))


# Falcon's own eager attention adds the bias twice, so its implementations differ without adapters.
@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [("falcon", "eager"), ("falcon", "sdpa"), ("bloom", "eager"), ("mpt", "eager")],
)
def test_with_alibi_a_prefix_stands_where_the_first_token_does(architecture, implementation):
    """So a row does not depend on padding."""
    options = {"alibi": True} if architecture == "falcon" else {}
    model = tiny_models.usual_model(architecture, **options)
    model.config._attn_implementation = implementation
    ids = tiny_models.batch(1, 8)["input_ids"].repeat(3, 1)
    ids[1, :3], ids[2, -3:] = 1, 1
    rows = [slice(0, 8), slice(3, 8), slice(0, 5)]
    with torch.no_grad():
        bare = model.base_model(ids, attention_mask=(ids != 1).long()).last_hidden_state
        tiny_models.scramble(ah.attach(model, "prefix(length=3)"), std=0.5)
        hidden = model.base_model(ids, attention_mask=(ids != 1).long()).last_hidden_state
        alone = [model.base_model(ids[n : n + 1, r])[0][0] for n, r in enumerate(rows)]
    for n, r in enumerate(rows):
        torch.testing.assert_close(hidden[n, r], alone[n], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(bare, hidden, atol=1e-2)


def prefixes(own=None, gate=None):
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    return JoinedPrefixes(key, value, own, gate)


def projections():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 5, 4, generator=generator) for _ in range(3)]


def by_hand(query, key, value, joined, mask=0.0):
    heads = (part.view(1, 3, 2, 4).transpose(1, 2) for part in joined[:2])
    own_key, own_value = (part.expand(2, -1, -1, -1) for part in heads)
    scores = torch.cat([query @ own_key.mT, query @ key.mT + mask], dim=-1) / 2
    return scores.softmax(-1) @ torch.cat([own_value, value], dim=-2)


def scaled_before(query, key, value, mask):
    return F.softmax((query / 2) @ key.mT + mask / 2, dim=-1) @ value


def scaled_key(query, key, value, mask):
    return torch.softmax(torch.matmul(query, key.mT / 2) + mask / 2, dim=-1).matmul(value)


def scaled_in_place(query, key, value, mask):
    scores = query @ key.mT
    scores += mask
    scores /= 2
    scores -= scores.max(-1, keepdim=True).values
    return nn.Softmax(dim=-1)(scores) @ value


def in_one_dimension_of_rows(query, key, value, mask):
    query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    scores = torch.baddbmm(mask.expand(4, 5, 5), query, key.mT, beta=0.5, alpha=0.5)
    scores = scores.view(2, 2, 5, 5).float()
    weights = scores.softmax(-1).type_as(query)
    returned = weights.view(4, 5, 5)
    return torch.bmm(F.dropout(returned, 0.5, training=False), value).view(2, 2, 5, 4)


def multiplied_by_a_mask(query, key, value, mask):
    shown = (mask == 0).float()
    return F.softmax((query @ key.mT / 2) * shown - 1e4 * (1 - shown), dim=-1) @ value


def fused(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask / 2, scale=0.5)


def fused_and_causal(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


FORMS = (
    scaled_before,
    scaled_key,
    scaled_in_place,
    in_one_dimension_of_rows,
    multiplied_by_a_mask,
    fused,
    fused_and_causal,
)
CAUSAL = torch.full((5, 5), -1e9).triu(1)


def test_forms_of_attention(subtests):
    """Also with gates and padding: a closed gate leaves a zero key and value, padding nothing."""
    open_, closed = torch.ones(2, 5, 3), torch.zeros(2, 5, 3)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    zero = JoinedPrefixes(*(torch.zeros(1, 3, 8) for _ in range(2)))
    given = (prefixes(), prefixes(gate=open_), zero, prefixes(gate=closed), prefixes(hidden))
    for form in FORMS:
        with subtests.test(form=form):
            query, key, value = projections()
            outputs = []
            for joined in given:
                with WatchedProducts(lambda joined=joined: joined, 2, "site") as watch:
                    outputs.append(form(query, key, value, CAUSAL))
                watch.check()
            plain, gated, of_zeros, shut, padded = outputs
            torch.testing.assert_close(plain, by_hand(query, key, value, prefixes(), CAUSAL))
            torch.testing.assert_close(gated, plain)
            torch.testing.assert_close(shut, of_zeros)
            bare = form(query, key, value, CAUSAL)
            torch.testing.assert_close(padded, bare)
            for one, other in ((plain, bare), (shut, padded)):
                assert not torch.allclose(one, other, atol=1e-3)


def two_softmaxes(query, key, value, mask):
    return scaled_before(query, key, scaled_before(query, key, value, mask), mask)


def over_queries(query, key, value, mask):
    return F.softmax(query @ key.mT, dim=-2) @ value


def by_einsum(query, key, value, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


def capped(query, key, value, mask):
    return F.softmax(torch.tanh(query @ key.mT), dim=-1) @ value


def of_other_sizes(query, key, value, mask):
    return F.softmax(query[..., :3] @ key[..., :3].mT, dim=-1) @ value


def test_attention_of_another_form_is_refused(subtests):
    for form in [two_softmaxes, over_queries, by_einsum, capped, of_other_sizes]:
        with subtests.test(form=form):

            def run(form=form):
                with WatchedProducts(prefixes, 2, "encoder.0.attn.kv") as watch:
                    form(*projections(), CAUSAL)
                watch.check()

            with pytest.raises(AttachError, match=r"encoder\.0\.attn\.kv"):
                run()


def test_an_error_ends_the_watch_and_a_copy_has_its_own_prefix():
    model = tiny_models.model("mpnet")
    adapter = ah.attach(model, "prefix")
    with pytest.raises(RuntimeError):
        model.mpnet.encoder.layer[0](torch.zeros(2, 3, 5))
    assert not _get_current_function_mode_stack()
    other = copy.deepcopy(model)
    before = padded_logits(other)
    tiny_models.scramble(adapter)
    assert torch.equal(padded_logits(other), before)
    assert not torch.allclose(padded_logits(model), before, atol=1e-3)


# The prefixes of the rows of a call, and their relative positions: the bias of T5 over them.


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
