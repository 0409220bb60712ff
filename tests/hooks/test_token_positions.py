"""The places of tokens: prompts, padding, caches, packed rows, virtual tokens, other stacks."""

import pytest
import torch
from transformers import StaticCache

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.hooks import slot
from tests.kit import tiny_models

PAD = tiny_models.PAD


@pytest.fixture
def seen(monkeypatch):
    """Return the chosen tokens of each call of a slot, as lists of rows of 0 and 1."""
    calls = []
    as_states = slot.as_states

    def note(mask, *others):
        calls.append(None if mask is None else mask[..., 0].int().tolist())
        return as_states(mask, *others)

    monkeypatch.setattr(slot, "as_states", note)
    return calls


def edited(architecture, task, positions, **options):
    """Return a model with an edit at its first layer."""
    model = tiny_models.model(architecture, task)
    ah.attach(model, {"direft": {"positions": positions, "layers": [0], **options}})
    return model


def ids_of(*rows):
    return torch.tensor(rows)


def padded(side):
    ids = torch.full((2, 6), 7)
    ids[0, slice(0, 2) if side == "left" else slice(4, 6)] = PAD
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


SEVENS = torch.full((2, 5), 7)
LEARNED = ids_of([-100, -100, -100, 7, 7], [7, 7, -100, 7, 7])
WITH_END = padded("right")["input_ids"]
WITH_END[0, 3] = WITH_END[1, 5] = tiny_models.EOS
LAST = [[0, 0, 0, 1, 0, 0], [0] * 5 + [1]]  # of the rows of `padded("right")`
PLACES = [
    ("bert", "features", "f2+l1", padded("left"),
     [[[0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]], [[0] * 5 + [1]] * 2]),
    ("bert", "features", "f2+l1", padded("right"), [[[1, 1, 0, 0, 0, 0]] * 2, LAST]),
    # A text shorter than a set is in it as a whole.
    ("bert", "features", "f9", padded("left"), [[[0, 0, 1, 1, 1, 1], [1] * 6]]),
    # A prompt ends before the first learned token; the labels of classified tokens end none.
    ("llama", "causal-lm", "f1+l2", {"input_ids": SEVENS, "labels": LEARNED},
     [[[1, 0, 0, 0, 0]] * 2, [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]),
    ("llama", "tagging", "l1", {"input_ids": SEVENS[:1, :4], "labels": ids_of([-100, 1, 1, 1])},
     [[[0, 0, 0, 1]]]),
    # A decoder behind an encoder has its start as a prompt; that of a classifier reads the text.
    ("t5", "seq2seq", "l1", padded("right") | {"labels": torch.full((2, 4), 9)},
     [LAST, [[1, 0, 0, 0]] * 2]),
    ("bart", "classification", "l1", padded("right") | {"input_ids": WITH_END}, [LAST, LAST]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "task", "positions", "inputs", "expected"), PLACES)
def test_the_places_of_tokens(architecture, task, positions, inputs, expected, seen):
    edited(architecture, task, positions)(**inputs)
    assert seen[: len(expected)] == expected


def test_rows_of_several_texts(seen):
    """Positions that start again without a mask, as transformers reads them."""
    model = edited("llama", "causal-lm", "f1+l1")
    ids, positions = torch.full((1, 7), 7), ids_of([0, 1, 2, 0, 1, 2, 3])
    labels = ids_of([-100, 7, 7, -100, -100, 7, 7])
    model(ids, position_ids=positions, labels=labels, use_cache=False)
    assert seen == [[[1, 0, 0, 1, 0, 0, 0]], [[1, 0, 0, 0, 1, 0, 0]]]
    seen.clear()
    ah.detach(model)
    ah.attach(model, {"alora": {"invocation": [8, 9], "sites": ["decoder.0.attn.v"]}})
    model(ids_of([8, 9, 8, 9, 8, 9, 7]), position_ids=positions, use_cache=False)
    assert seen == [[[1, 1, 1, 0, 1, 1, 1]]]


def test_virtual_tokens_of_another_adapter_move_places(seen):
    model = edited("llama", "causal-lm", "f1")
    ah.attach(model, "prompt(length=3)", name="prompt")
    ah.activate(model, "prompt", "default")
    model(**padded("left"))
    assert seen == [[[0] * 5 + [1, 0, 0, 0], [0] * 3 + [1] + [0] * 5]]


@pytest.mark.parametrize("architecture", ["llama", "t5"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generation_edits_the_end_of_its_input_alone(architecture, options, seen):
    model = edited(architecture, "seq2seq" if architecture == "t5" else "causal-lm", "f1+l1",
                   sites=["decoder.layer"])  # fmt: skip
    model.generate(**padded("left"), max_new_tokens=3, min_new_tokens=3, **options)
    first, last = ([0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]), ([0] * 5 + [1],) * 2
    if architecture == "t5":
        first = last = ([1], [1])
    copies = options.get("num_beams", 1)
    expected = [[row for row in rows for _ in range(copies)] for rows in (first, last)]
    behind = [None, None]
    for step in range(3):
        found = seen[2 * step : 2 * step + 2]
        if step and options != {"use_cache": False}:
            assert found == behind
        else:
            assert found == [[row + [0] * step for row in rows] for rows in expected]


def test_prompts_in_chunks_and_with_candidates(seen):
    model = edited("llama", "causal-lm", "l1")
    ids = torch.arange(20, 28)[None]
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, prefill_chunk_size=3)
    assert seen[:3] == [[[0, 0, 0]], [[0, 0, 0]], [[0, 1]]]
    assert set(map(str, seen[3:])) == {"None"}
    seen.clear()
    ids = ids_of([20, 21, 22, 20, 21, 22, 20, 21])
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, prompt_lookup_num_tokens=2)
    assert seen[0][0][:8] == [0] * 7 + [1]
    assert not any(seen[0][0][8:])
    assert set(map(str, seen[1:])) == {"None"}


def test_a_static_cache_keeps_what_a_mask_showed(seen):
    model = tiny_models.model("llama", "causal-lm")
    ah.attach(model, {"alora": {"invocation": [8], "sites": ["decoder.0.attn.v"]}})
    ids = padded("left")["input_ids"]
    ids[0, 3] = 8
    mask = ids.ne(PAD).long()
    cache = StaticCache(config=model.config, max_cache_len=12)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3,
                   min_new_tokens=3)  # fmt: skip
    assert seen == [[[0, 0, 0, 1, 1, 1], [0] * 6], [[1], [0]], [[1], [0]]]


def test_what_shows_no_places_is_refused():
    model = edited("llama", "causal-lm", "l1")
    ids = torch.full((1, 4), 7)
    pairs = torch.ones(4, 4).tril().bool()[None, None]
    with pytest.raises(SiteError, match="does not show where texts begin"):
        model(ids, attention_mask=pairs)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(SiteError, match="the cache holds 1 row"):
        model(torch.full((2, 1), 7), past_key_values=cache)
    encoder = edited("bert", "features", "l1")
    with pytest.raises(SiteError, match="was not called with tokens"):
        encoder.encoder.layer[0](torch.randn(1, 4, 32))
    ah.detach(model)
    ah.attach(model, {"alora": {"invocation": [8]}})
    with pytest.raises(SiteError, match="of which there are none"):
        model(inputs_embeds=torch.randn(1, 4, 32))
