"""A probe: a small batch that a backbone can read, to compare what it computes before and after."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.backbones.load import task_kind
from adapterhub.backbones.weights import device_of

ROWS, TOKENS = 4, 16


def probe_batch(
    model: PreTrainedModel, seed: int = 0, rows: int = ROWS, tokens: int = TOKENS
) -> dict[str, Tensor]:
    """Random token ids out of the vocabulary, without special ones but for an end in each row.

    An encoder-decoder reads them on both sides. Each: (rows, tokens), or (1, rows, tokens) where
    the rows are the choices of one question.
    """
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id")}
    usual = torch.tensor([i for i in range(size) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    ids = usual[torch.randint(len(usual), (rows, tokens), generator=generator)]
    if isinstance(end := getattr(model.config, "eos_token_id", None), int):
        ids[:, -1] = end  # where the classifiers of BART and T5 read
    if task_kind(model) == "multiple-choice":
        ids = ids[None]
    ids = ids.to(device_of(model))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    known = inspect.signature(model.forward).parameters
    return batch | ({"decoder_input_ids": ids} if "decoder_input_ids" in known else {})


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model computes on the probe batch, in evaluation mode: its logits by name, or, where
    it has none, its other outputs; in fp32 on the CPU."""
    modes = {module: module.training for module in model.modules()}
    device = str(device_of(model)).partition(":")[0]
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            outputs = model.eval()(**probe_batch(model), return_dict=True)
    finally:
        for module, mode in modes.items():
            module.training = mode
    found = {
        name: value.to("cpu", torch.float32)
        for name, value in outputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return {n: v for n, v in found.items() if n.endswith("logits")} or found
