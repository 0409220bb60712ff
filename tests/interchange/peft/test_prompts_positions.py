"""A prefix of peft shifts positions as the backbone counts them, whatever the padding."""

from __future__ import annotations

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from tests.kit import tiny_models
from tests.kit.peers import KINDS, core, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# Architectures whose prefixes of decoders and encoders both libraries compute.
BOTH = (
    "bert", "camembert", "electra", "gpt2", "gpt_neox", "llama", "olmo", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "roberta", "xlm-roberta", "mixtral",
)  # fmt: skip
CORE = ("roberta", "opt", "gpt2", "bert")


def logits(model, inputs):
    """Return the logits of tokens that are not padding, or of whole texts."""
    with torch.no_grad():
        values = model.eval()(**inputs).logits
    mask = inputs.get("attention_mask", torch.ones(3, 9)).bool()
    return values[mask] if values.ndim == 3 else values


@pytest.mark.parametrize("task", ["causal-lm", "classification"])
@pytest.mark.parametrize("architecture", core(BOTH, *CORE))
def test_an_imported_prefix_with_padding(tmp_path, architecture, task):
    config = peft.PrefixTuningConfig(task_type=KINDS[task], num_virtual_tokens=4)
    folder = trained(tmp_path, architecture, config, task)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
    ours, bare = (tiny_models.model(architecture, task) for _ in range(2))
    ah.load(ours, folder)
    for side in (None, "right", "left"):
        found = logits(ours, tiny_models.padded_batch(side))
        torch.testing.assert_close(
            found, logits(theirs, tiny_models.padded_batch(side)), atol=1e-5, rtol=1e-5
        )
        assert not torch.allclose(found, logits(bare, tiny_models.padded_batch(side)), atol=1e-3)


@pytest.mark.parametrize("architecture", core(BOTH, *CORE))
def test_an_exported_prefix_with_padding(tmp_path, architecture):
    task = "classification"
    ours = tiny_models.model(architecture, task)
    adapter = ah.attach(ours, "prefix(length=4, positions=true, sites=['attn.kv'])")
    tiny_models.scramble(adapter)
    adapter.export(tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task), tmp_path / "peft"
    )
    for side in (None, "right", "left"):
        found = logits(theirs, tiny_models.padded_batch(side))
        torch.testing.assert_close(
            found, logits(ours, tiny_models.padded_batch(side)), atol=1e-5, rtol=1e-5
        )


@pytest.mark.skipif(not tiny_models.FULL_MATRIX, reason="the full matrix")
def test_all_other_architectures_are_refused_here_or_in_peft(tmp_path):
    for architecture in sorted(set(tiny_models.ARCHITECTURES) - set(BOTH)):
        config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
        try:
            folder = trained(tmp_path / architecture, architecture, config)
        except (ValueError, TypeError, AttributeError):
            continue  # peft or transformers refuse
        with pytest.raises(AdapterhubError):
            ah.load(tiny_models.model(architecture), folder)
