"""Whether a language model predicts each token from the ones before it only.

The class of a causal language model does not say so: BERT's attends to both sides unless its
configuration is a decoder's, and XLNet's unless it gets a mask. Such a model reads the answer.

Nor does its loss: the decoders of BART, Pegasus, Marian and others expect labels that the caller
has shifted, and with the usual ones they compare the logits at a token with that token itself.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from adapterhub.backbones.probe import evaluation_mode, probe_batch
from adapterhub.backbones.same import same
from adapterhub.backbones.weights import device_of
from adapterhub.errors import BackboneError

_TOKENS = 4


def check_causal(model: PreTrainedModel, backbone: str) -> None:
    """Refuse a causal language model that reads ahead.

    Args:
        model: the model.
        backbone: where it was loaded from, for the error.

    Raises:
        BackboneError: the output at a token depends on later tokens.
    """
    if reads_ahead(model):
        raise BackboneError(
            f"{backbone!r} is no causal language model: its {type(model).__name__} attends to the "
            "tokens that it should predict",
            expected="a decoder, such as GPT-2 or Llama",
            hint="--task masked-lm, or --task classification, with this backbone",
        )


def reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether logits change with a later token."""
    device = device_of(model)
    if device is None or device.type == "meta":
        return False
    batch = probe_batch(model, rows=1, tokens=_TOKENS + 1)
    ids = batch["input_ids"][:, :_TOKENS].repeat(2, 1)
    ids[1, -1] = ids[0, 0] if ids[0, 0] != ids[0, -1] else ids[0, 1]
    with evaluation_mode(model), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
    first, second = ({"logits": each} for each in logits[:, :-1])
    return not same(first, second, model.dtype)  # of BERT: 0.3 to 0.5


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model's loss compares the logits at a token with the label after it.

    Both losses of a probe are computed by hand, and the model's is nearer to one of them.
    """
    device = device_of(model)
    if device is None or device.type == "meta":
        return True
    ids = probe_batch(model, rows=1, tokens=2 * _TOKENS)["input_ids"]
    with evaluation_mode(model), torch.no_grad():
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    logits = output.logits.float()[0]
    after = functional.cross_entropy(logits[:-1], ids[0, 1:])
    same = functional.cross_entropy(logits, ids[0])
    return bool((output.loss - after).abs() <= (output.loss - same).abs())
