"""aLoRA: its equation, the cache in front of the invocation, and where it is looked for."""

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import attach_at

EVERYWHERE = ["attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down"]
INVOCATION = [50, 51]


def text():
    """Return two texts of eight tokens, which are invoked at the tokens 4 and 2."""
    ids = torch.randint(5, 45, (2, 8), generator=torch.Generator().manual_seed(3))
    ids[0, 1:3] = ids[0, 4:6] = ids[1, 2:4] = torch.tensor(INVOCATION)
    return ids


def invoked(architecture, **options):
    model = tiny_models.model(architecture, "causal-lm")
    adapter = ah.attach(
        model, {"alora": {"invocation": INVOCATION, "sites": EVERYWHERE, **options}}
    )
    tiny_models.scramble(adapter)
    return model


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_update_applies_from_the_invocation_on(architecture):
    one = attach_at(architecture, "decoder.0.attn.v", "alora", rank=4, alpha=6,
                    invocation=INVOCATION)  # fmt: skip
    tiny_models.scramble(one.adapter)
    seen = []
    one.host.register_forward_hook(lambda host, args, y: seen.append((args[0], y)))
    one.adapter.model(text())
    x, y = seen[0]
    y = y if one.site.part is None else one.site.part.read(y)
    weight = one.weight + 1.5 * one.module.B @ one.module.A
    for row, begin in ((0, 4), (1, 2)):
        for part, matrix in ((slice(0, begin), one.weight), (slice(begin, 8), weight)):
            expected = torch.nn.functional.linear(x[row, part], matrix, one.bias)
            torch.testing.assert_close(y[row, part], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_cache_in_front_is_that_of_the_backbone(architecture):
    """Keys and values before the invocation are equal to the bit, and differ behind it."""
    model, ids = invoked(architecture), text()
    with torch.no_grad():
        adapted = model(ids, use_cache=True)
        ah.activate(model)
        bare = model(ids, use_cache=True)
    for found, expected in zip(adapted.past_key_values.layers, bare.past_key_values.layers,
                               strict=True):  # fmt: skip
        for own, theirs in ((found.keys, expected.keys), (found.values, expected.values)):
            assert torch.equal(own[0, :, :4], theirs[0, :, :4])
            assert torch.equal(own[1, :, :2], theirs[1, :, :2])
            assert not torch.allclose(own[0, :, 4:], theirs[0, :, 4:], atol=1e-3)
    assert torch.equal(adapted.logits[0, :4], bare.logits[0, :4])


@pytest.mark.parametrize("whole", [False, True])
def test_a_cache_of_the_backbone_is_continued(whole):
    """Also where the cache has the beginning of the text alone, and `generate` gets all of it."""
    model, ids = invoked("llama"), text()[:1]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        expected = model(ids).logits[:, 4:]
        texts = model.generate(ids, **options)
        ah.activate(model)
        cache = model(ids[:, :4], use_cache=True).past_key_values
        ah.activate(model, "default")
        if whole:
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), texts)
        else:
            found = model(ids[:, 4:], past_key_values=cache).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_an_invocation_in_two_calls_is_found():
    model, ids = invoked("llama"), text()[1:]
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :3], use_cache=True).past_key_values
        split = model(ids[:, 3:], past_key_values=cache).logits
        ah.activate(model)
        bare = model(ids).logits
    assert not torch.allclose(split, bare[:, 3:], atol=1e-3)
    # The first token of the invocation was read before it was one.
    assert not torch.equal(split, whole[:, 3:])


def test_what_is_generated_invokes_nothing():
    model = invoked("llama")
    ids = torch.full((1, 4), 7)

    def forced(batch, written):
        return [INVOCATION[len(written) % 2]]

    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
               "output_logits": True, "return_dict_in_generate": True,
               "prefix_allowed_tokens_fn": forced}  # fmt: skip
    for cache in (True, False):
        found = model.generate(ids, use_cache=cache, **options)
        ah.activate(model)
        bare = model.generate(ids, use_cache=cache, **options)
        ah.activate(model, "default")
        assert torch.equal(found.sequences, bare.sequences)
        assert found.sequences[0, -2:].tolist() == INVOCATION
        assert all(map(torch.equal, found.logits, bare.logits))


def test_without_invocation_tokens_it_begins_at_the_end_of_the_prompt():
    model, ids = invoked("llama", invocation=()), text()
    labels = ids.clone()
    labels[:, :5] = -100
    with torch.no_grad():
        adapted = model(ids, labels=labels).logits
        ah.activate(model)
        bare = model(ids).logits
    assert torch.equal(adapted[:, :4], bare[:, :4])
    assert not torch.allclose(adapted[:, 4], bare[:, 4], atol=1e-3)


def test_projections_of_relative_positions_are_refused():
    model = tiny_models.model("deberta-v2")
    ah.attach(model, "alora")
    with pytest.raises(SiteError, match="not those of 3 rows of 9 tokens"):
        model(**tiny_models.batch())
