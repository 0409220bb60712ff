"""Generation and token loss of small language models."""

from __future__ import annotations

import math

import pytest

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.language_models import Generation, generate, token_loss


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_generation_does_not_depend_on_the_batch(backbones, architecture):
    kind = {"llama": "causal-lm", "t5": "seq2seq"}[architecture]
    model, tokenizer = ah.load_backbone(str(backbones(architecture)), task=kind)
    task, setting = parse_task(f"{kind}(new_tokens=4)"), Setting(tokenizer, 16)
    examples = [Example("the movie was very good"), Example("a film"), Example("the plot")]
    together = generate(model, task.encode(examples, setting, labelled=False), 3, task)
    for example, generated in zip(examples, together, strict=True):
        (alone,) = generate(model, task.encode([example], setting, labelled=False), 1, task)
        assert generated == alone
        assert len(tokenizer(generated.text, add_special_tokens=False)["input_ids"]) <= 4


def test_the_loss_is_a_mean_over_tokens_and_not_over_batches(backbones):
    model, tokenizer = ah.load_backbone(str(backbones("llama")), task="causal-lm")
    examples = [Example("a", None, "good"), Example("b", None, "the movie was very dull")]
    data = parse_task("causal-lm").encode(examples, Setting(tokenizer, 32), labelled=True)
    whole, split = (token_loss(model, data, size, shifted=True) for size in (2, 1))
    assert whole["loss"] == pytest.approx(split["loss"], rel=1e-4)
    assert whole["perplexity"] == pytest.approx(math.exp(whole["loss"]))


@pytest.mark.parametrize("options", [{"new_tokens": 0}, {"beams": 0}, {"beams": 1001}])
def test_invalid_options(options):
    with pytest.raises(ConfigError, match="1 to 1000 beams"):
        Generation(**options)
