"""What tasks with a language model share: generation, and the loss a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.tasks._base import IGNORED, Encoded, Generated, by_length, forward, pad


@dataclass(frozen=True)
class Generation:
    """How to generate: the most probable token each time, or beam search."""

    new_tokens: int = option(64, "longest generated text, in tokens")
    beams: int = option(1, "beams of the search; 1 takes the most probable token each time")

    def __post_init__(self) -> None:
        if not (0 < self.new_tokens <= 100_000 and 0 < self.beams <= 1000):
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, beams is {self.beams}",
                expected="1 to 100000 tokens, 1 to 1000 beams",
            )


def generate(
    model: PreTrainedModel, prompts: Encoded, batch_size: int, how: Generation
) -> list[Generated]:
    """What the model writes for each prompt, without special tokens, in their order."""
    tokenizer = prompts.setting.tokenizer
    # A decoder goes on from the last position, which must not be padding.
    side = "right" if model.config.is_encoder_decoder else "left"
    found: dict[int, Generated] = {}
    model.eval()
    for indices in by_length(prompts, batch_size):
        batch = pad([prompts.rows[i] for i in indices], tokenizer, side)
        inputs = {k: v.to(model.device) for k, v in batch.items() if k != "labels"}
        with torch.inference_mode():
            ids = model.generate(  # type: ignore[operator]
                **inputs,
                max_new_tokens=how.new_tokens,
                num_beams=how.beams,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        first = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        texts = tokenizer.batch_decode(ids[:, first:], skip_special_tokens=True)
        found |= zip(indices, (Generated(text.strip()) for text in texts), strict=True)
    return [found[i] for i in range(len(found))]


def token_loss(
    model: PreTrainedModel, data: Encoded, batch_size: int, *, shifted: bool = False
) -> dict[str, float]:
    """The mean negative log-likelihood of a token that has a label, in nats, and its exponential.

    `shifted`: the model predicts each label from the positions before it, so the first has none.
    """
    total, count = 0.0, 0
    for _, batch, output in forward(model, data, batch_size, labels=True):
        labels = batch["labels"][:, 1:] if shifted else batch["labels"]
        tokens = int((labels != IGNORED).sum())
        if tokens:
            total += float(output.loss) * tokens
            count += tokens
    loss = total / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
