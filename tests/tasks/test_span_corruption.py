"""span-corruption: which spans are dropped, and their sentinels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.span_corruption import span_lengths
from tests.kit.data import SENTINELS, word_tokenizer, words_of


def test_dropped_spans_follow_their_sentinels():
    tokenizer = word_tokenizer(end="</s>")
    text = "the movie was very good a film is dull bad poor plot actor scene end fine great awful"
    task = parse_task("span-corruption(rate=0.3, span=2)")
    encoded = task.encode([Example(text)], Setting(tokenizer, 64), labelled=True)
    for epoch in range(20):
        batch = encoded.batch([0], epoch)
        inputs, target = (
            words_of(tokenizer, batch[key][0].tolist()) for key in ("input_ids", "labels")
        )
        assert inputs[-1] == target[-1] == "</s>"
        assert target[-2] in SENTINELS, "a sentinel more ends the target"
        parts: dict[str, list[str]] = {}
        for word in target[:-2]:
            if word in SENTINELS:
                parts[word] = []
            else:
                parts[list(parts)[-1]].append(word)
        assert list(parts) == SENTINELS[: len(parts)] == [w for w in inputs if w in SENTINELS]
        whole = [w for word in inputs[:-1] for w in parts.get(word, [word])]
        assert " ".join(whole) == text
        assert sum(map(len, parts.values())) == 5
        assert len(parts) == 2


@given(st.integers(2, 600), st.floats(0.01, 0.99), st.floats(1, 10), st.integers(1, 99))
def test_span_lengths(tokens, rate, span, most):
    kept, dropped = span_lengths(tokens, rate, span, most, np.random.default_rng(0))
    assert len(kept) == len(dropped) <= most
    assert min(*kept, *dropped) >= 1
    assert sum(kept) + sum(dropped) == tokens
    assert sum(dropped) == min(max(round(tokens * rate), 1), tokens - 1)


def test_a_tokenizer_without_what_the_task_needs():
    tokenizer = word_tokenizer()
    vocabulary = {k: v for k, v in tokenizer.get_vocab().items() if k not in SENTINELS}
    tokenizer.get_vocab = lambda: vocabulary
    examples = [Example("the movie was good")]
    with pytest.raises(ConfigError, match="sentinels"):
        parse_task("span-corruption").encode(examples, Setting(tokenizer, 32), labelled=True)
