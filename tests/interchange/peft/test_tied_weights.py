"""Checkpoints of models that got new tokens: peft saves the resized tables with them."""

from __future__ import annotations

import itertools

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MismatchError
from tests.kit import tiny_models
from tests.kit.selection import long_table

peft = pytest.importorskip("peft")
from tests.kit.peers import linear_names, lora_config  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NEW = [64, 65, 66]
WAYS = {
    "attention only": lambda embedding: {},
    "rows": lambda embedding: {"trainable_token_indices": NEW},
    "embedding": lambda embedding: {"modules_to_save": [embedding]},
    "both": lambda embedding: {"modules_to_save": [embedding, "lm_head"]},
    "adapted": lambda embedding: {"target_modules": [embedding, "lm_head"]},
}
# After resizing, the stacks of an encoder-decoder have the same embedding module, of which peft
# replaces one place.
ONE_MODULE = {(a, way) for a in ("t5", "bart") for way in ("embedding", "both", "adapted")}
MODELS = (
    ("gpt2", "llama", "gemma3_text", "t5", "bart") if tiny_models.FULL_MATRIX else ("gpt2", "t5")
)


@pytest.fixture
def resized(architecture, tmp_path):
    """Return the task of an architecture, and a function that loads its checkpoint, resized."""
    task = "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"
    backbone = tiny_models.model(architecture, task, tie_word_embeddings=True)
    backbone.save_pretrained(tmp_path / "backbone")

    def load(seed):
        model = type(backbone).from_pretrained(tmp_path / "backbone").eval()
        torch.manual_seed(seed)  # of the new rows
        model.resize_token_embeddings(67, mean_resizing=False)
        return model

    return task, load


def logits(model, task):
    inputs = tiny_models.batch()
    inputs["input_ids"][:, 2:4] = torch.tensor(NEW[:2])
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        return model.eval()(**inputs).logits


@long_table(("architecture", "way"), list(itertools.product(MODELS, WAYS)), 2)
def test_new_tokens(architecture, way, resized, tmp_path):
    task, load = resized
    model = load(seed=0)
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    config = lora_config(task, **{"target_modules": linear_names(model)[:1]} | WAYS[way](embedding))
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for _, parameter in sorted(theirs.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    theirs.save_pretrained(tmp_path / "theirs")
    if (architecture, way) in ONE_MODULE:
        with pytest.raises(MismatchError, match="the same module as"):
            ah.load(load(seed=1), tmp_path / "theirs", any_backbone=True)
        return
    expected = logits(peft.PeftModel.from_pretrained(load(seed=1), tmp_path / "theirs"), task)
    ours = load(seed=1)
    adapter = ah.load(ours, tmp_path / "theirs", any_backbone=True)
    torch.testing.assert_close(logits(ours, task), expected, atol=5e-5, rtol=1e-5)
    adapter.save(tmp_path / "ours")
    again = load(seed=2)
    ah.load(again, tmp_path / "ours")
    assert torch.equal(logits(again, task), logits(ours, task))


def test_a_model_without_the_new_rows_is_refused(tmp_path):
    config = lora_config("causal-lm", target_modules=["c_attn"], modules_to_save=["wte"])
    model = tiny_models.model("gpt2", "causal-lm")
    model.resize_token_embeddings(67, mean_resizing=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(AdapterhubError, match=r"shape \(67, 32\)"):
        ah.load(tiny_models.model("gpt2", "causal-lm"), tmp_path)
