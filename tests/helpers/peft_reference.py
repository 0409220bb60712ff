"""Adapters that `peft` trained, and what it computes with them, on tiny models."""

from __future__ import annotations

import os

import peft
import tiny_models
import torch

FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"
KINDS = {
    "classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "features": "FEATURE_EXTRACTION",
}


def trained(folder, architecture, config, task="classification", seed=0, std=0.3, **options):
    """Save what peft would after training: every tensor of the adapter away from its start."""
    torch.manual_seed(seed)  # peft draws the start
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
    inputs = tiny_models.batch()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        found = model.eval()(**inputs)
    return found["last_hidden_state" if task == "features" else "logits"]


def core(cases, *names):
    """These of the cases, or all of them in the full matrix."""
    assert set(names) <= set(cases)
    return list(cases) if FULL else list(names)
