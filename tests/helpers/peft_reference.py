"""Adapters saved by `peft`, and the outputs of its models, on tiny backbones."""

from __future__ import annotations

import peft
import tiny_models
import torch

KINDS = {
    "classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "features": "FEATURE_EXTRACTION",
}


def trained(folder, architecture, config, task="classification", seed=0, std=0.3, **options):
    """Save a peft adapter whose every tensor differs from its initial value; return the folder."""
    torch.manual_seed(seed)  # peft initializes at random
    model = peft.get_peft_model(tiny_models.model(architecture, task, seed, **options), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=std)
    model.save_pretrained(folder)
    return folder


def outputs(model, task="classification"):
    """Return the logits of a batch, or the last hidden state of a model without a head."""
    inputs = tiny_models.batch()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        result = model.eval()(**inputs)
    return result["last_hidden_state" if task == "features" else "logits"]


def core(cases, *names):
    """Return the named cases, or all cases in the full matrix."""
    assert set(names) <= set(cases)
    return list(cases) if tiny_models.FULL_MATRIX else list(names)
