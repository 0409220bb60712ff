"""The first fingerprint: adapters of that time still match their backbones, and only these."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import transformers
from packed_codes import quantize

from adapterhub.adapters.state import new_state
from adapterhub.backbones.fingerprint_v1 import RUN, RUNS, first_fingerprint, sampled_runs
from adapterhub.errors import BackboneError

GOLDEN = "bf16-d36bf62e0032fb21fe25ab3b45d44a1b1e4e7ab7903e9b964d90ac7f59d006c2"


def saved(architecture, folder, task="classification", **config):
    tiny_models.model(architecture, task, **config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_each_load_has_it(architecture, tmp_path):
    """It is the same for every class and dtype, and differs for other weights."""
    tiny_models.usual_model(architecture).save_pretrained(tmp_path)
    expected = new_state(tiny_models.usual_model(architecture)).first_fingerprint()
    assert expected.startswith("bf16-")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype)
        assert new_state(model).first_fingerprint() == expected, dtype
    other = tiny_models.usual_model(architecture, seed=1)
    assert new_state(other).first_fingerprint() != expected


def test_the_definition_is_frozen():
    """Adapters of every past release must still match their backbones."""
    whole = ((torch.arange(24.0) * 7 % 31) - 15).reshape(4, 6) / 16
    wide = ((torch.arange(70 * 90) * 37 % 61) - 30).reshape(70, 90) / 256
    named = [("encoder.layer.0.q.weight", whole), ("encoder.layer.1.q.weight", wide),
             ("embeddings.word_embeddings.weight", wide.T), ("pooler.weight", whole)]  # fmt: skip
    assert first_fingerprint(named) == GOLDEN
    assert sampled_runs(RUN * RUNS) == [(0, RUN * RUNS)]
    assert sampled_runs(10**9)[0] == (0, RUN)
    assert sampled_runs(10**9)[-1] == (10**9 - RUN, RUN)


def test_a_quantized_load_has_the_fingerprint_of_its_files(tmp_path):
    saved("llama", tmp_path, "features")
    expected = new_state(tiny_models.model("llama", "features")).first_fingerprint()
    model = quantize(transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float16))
    named = list(model.named_parameters())
    assert first_fingerprint(named, tmp_path) == expected
    with pytest.raises(BackboneError, match="quantized"):
        first_fingerprint(named)
    with torch.no_grad():
        model.embed_tokens.weight.add_(1)
    with pytest.raises(BackboneError, match="quantized"):
        first_fingerprint(named, tmp_path)
