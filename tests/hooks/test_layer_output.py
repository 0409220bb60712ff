"""The hook that collects the outputs of all layers and replaces the last one."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.matrix import example


def scores(model):
    """Generate two tokens; return their scores."""
    ids = tiny_models.batch(2, 6)["input_ids"]
    with torch.no_grad():
        return model.generate(
            input_ids=ids, max_new_tokens=2, do_sample=False, output_scores=True,
            return_dict_in_generate=True, eos_token_id=None, pad_token_id=tiny_models.PAD,
        ).scores  # fmt: skip


def test_a_mix_is_refused_where_heads_read_another_stream():
    """XLNet's generate passes target_mapping: its head reads the second stream."""
    model = tiny_models.model("xlnet", "causal-lm")
    bare, inputs = scores(model), tiny_models.batch()
    with torch.no_grad():
        outputs = model(**inputs).logits
    for method in ("loreft", "scalar-mix"):
        tiny_models.scramble(ah.attach(model, method, name=method), std=0.5)
        with torch.no_grad():
            assert not torch.allclose(model(**inputs).logits, outputs, atol=1e-3)
        with pytest.raises(SiteError, match="stream of hidden states") as error:
            scores(model)
        assert "target_mapping" in error.value.expected
    ah.activate(model)
    assert all(torch.equal(a, b) for a, b in zip(scores(model), bare, strict=True))


def test_other_methods_have_an_effect_on_what_xlnet_generates(subtests):
    for method in ["bitfit", "compacter", "full", "houlsby", "ia3", "norms"]:
        with subtests.test(method=method):
            model = tiny_models.model("xlnet", "causal-lm")
            bare = scores(model)
            tiny_models.scramble(ah.attach(model, example(method)), std=0.5)
            assert all(
                not torch.allclose(a, b, atol=1e-3)
                for a, b in zip(scores(model), bare, strict=True)
            )
