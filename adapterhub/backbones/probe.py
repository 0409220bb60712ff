"""Run a small batch through a model, to compare its outputs before and after a change.

A probe also shows whether a language model predicts each token only from the tokens before it. The
class of a causal language model does not guarantee this: BERT's attends to both sides unless its
configuration is a decoder, and XLNet's unless it gets a mask. Such a model reads the answer.

Nor does the loss guarantee it. The decoders of BART, Pegasus, Marian and others expect labels that
the caller has shifted. With unshifted labels, they compare the logits at a token with that token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import Backbone, device_of
from adapterhub.backbones.compare import same
from adapterhub.backbones.processor import (
    SOUND_INPUTS,
    image_placeholder,
    picture_inputs,
    sampling_rate,
    sound_inputs,
)
from adapterhub.backbones.task_models import task_kind
from adapterhub.errors import BackboneError

ROWS, TOKENS = 4, 16
_SIDE = 48  # pixels of the noise images


def probe_batch(
    model: PreTrainedModel, seed: int = 0, rows: int = ROWS, tokens: int = TOKENS
) -> dict[str, Tensor]:
    """Make a batch of random token ids, without special tokens except EOS at the end of each row.

    An encoder-decoder gets them as input of both stacks. An image model gets random pixels of its
    input size, and no tokens. An audio model gets processed noise, and tokens only in its decoder.

    Returns:
        Tensors of shape (rows, tokens), or (1, rows, tokens) if the rows are the choices of one
        question; or (rows, channels, height, width), or the inputs that an audio processor returns.
    """
    if model.main_input_name == "pixel_values":
        return _pixels(model, seed, rows)
    if model.main_input_name in SOUND_INPUTS:
        return _noise(model, seed, rows)
    # New tokens of active adapters lack rows there, and are in the configuration.
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    size = max(size, getattr(model.config.get_text_config(), "vocab_size", size))
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id")}
    usual = torch.tensor([i for i in range(size) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    ids = usual[torch.randint(len(usual), (rows, tokens), generator=generator)]
    if isinstance(end := getattr(model.config, "eos_token_id", None), int):
        ids[:, -1] = end  # the classifiers of BART and T5 pool at EOS
    if task_kind(model) == "multiple-choice":
        ids = ids[None]
    ids = ids.to(device_of(model))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    parameters = inspect.signature(model.forward).parameters
    return batch | ({"decoder_input_ids": ids} if "decoder_input_ids" in parameters else {})


def _pixels(model: PreTrainedModel, seed: int, rows: int) -> dict[str, Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(seed)
    size = getattr(config, "image_size", 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = rows, getattr(config, "num_channels", 3), height, width
    pixels = torch.randn(shape, generator=generator)
    return {"pixel_values": pixels.to(device_of(model), model.dtype)}


def _noise(model: PreTrainedModel, seed: int, rows: int) -> dict[str, Tensor]:
    """Return audio inputs of half a second of noise each."""
    numbers, processor = np.random.default_rng(seed), Backbone.of(model).processor
    rate = 16_000 if processor is None else sampling_rate(processor)
    noise = numbers.normal(0, 0.1, (rows, rate // 2)).astype(np.float32)
    if processor is None:
        inputs = {model.main_input_name: torch.from_numpy(noise)}
    else:
        inputs = sound_inputs(processor, list(noise))
    if model.config.is_encoder_decoder and model.can_generate():
        start = model.config.decoder_start_token_id
        inputs["decoder_input_ids"] = torch.full((rows, 1), start)
    inputs[model.main_input_name] = inputs[model.main_input_name].to(model.dtype)
    return {name: tensor.to(device_of(model)) for name, tensor in inputs.items()}


def picture_batch(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of noise images with a question, for an image-text model.

    Returns:
        The inputs that the processor makes from the images and texts; {} for other models.
    """
    processor = Backbone.of(model).processor
    placeholder = image_placeholder(processor)
    if placeholder is None:
        return {}
    numbers = np.random.default_rng(seed)
    noise = numbers.integers(0, 256, (ROWS, _SIDE, _SIDE, 3), dtype=np.uint8)
    pictures = [[Image.fromarray(pixels)] for pixels in noise]
    texts = [f"{placeholder} {row} {row + 1}" for row in range(ROWS)]
    batch = picture_inputs(processor, pictures, texts)
    device, dtype = device_of(model), model.dtype
    return {
        name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in batch.items()
    }


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside; restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Run a model in evaluation mode on a small batch and return its outputs by name.

    The batch comes from `probe_batch`, or from `picture_batch` for an image-text model. The outputs
    are the logits, or all floating point outputs without logits; in fp32 on the CPU.
    """
    batch = picture_batch(model) or probe_batch(model)
    tensors = outputs_on(model, {**batch, "return_dict": True})
    return {n: t for n, t in tensors.items() if n.endswith("logits")} or tensors


def outputs_on(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Run any module in evaluation mode on a batch and return its floating point outputs by name.

    `batch` is a tensor, a tuple of arguments, or a mapping of named arguments. Unnamed outputs are
    numbered. All outputs are in fp32 on the CPU.
    """
    named = batch if isinstance(batch, Mapping) else {}
    args = () if named else batch if isinstance(batch, tuple) else (batch,)
    device = str(device_of(module)).partition(":")[0]
    with evaluation_mode(module), torch.no_grad(), torch.autocast(device, enabled=False):
        output = module(*args, **named)
    if isinstance(output, Tensor):
        output = (output,)
    pairs = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {
        str(name): value.to("cpu", torch.float32)
        for name, value in pairs
        if isinstance(value, Tensor) and value.is_floating_point()
    }


_TOKENS = 4


def check_causal(model: PreTrainedModel, backbone: str) -> None:
    """Refuse a causal language model that reads ahead.

    Raises:
        BackboneError: the output at a token depends on later tokens.
    """
    if reads_ahead(model):
        raise BackboneError(
            f"{backbone!r} is not a causal language model: its {type(model).__name__} attends "
            f"to the "
            "tokens that it should predict",
            expected="a decoder, such as GPT-2 or Llama",
            hint="--task masked-lm, or --task classification, with this backbone",
        )


def reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether logits depend on later tokens."""
    device = device_of(model)
    if device is None or device.type == "meta":
        return False
    batch = probe_batch(model, rows=1, tokens=_TOKENS + 1)
    ids = batch["input_ids"][:, :_TOKENS].repeat(2, 1)
    ids[1, -1] = ids[0, 0] if ids[0, 0] != ids[0, -1] else ids[0, 1]
    with evaluation_mode(model), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
    first, second = ({"logits": each} for each in logits[:, :-1])
    return not same(first, second, model.dtype)  # differences of BERT: 0.3 to 0.5


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model's loss compares the logits at a token with the next label.

    Both losses of a probe are computed here; the model's loss is closer to one of them.
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
