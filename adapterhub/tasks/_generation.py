"""Text generation and token loss, for tasks with a language model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.tasks._base import IGNORED, Encoded, Generated, by_length, forward, in_order, pad

if TYPE_CHECKING:
    from transformers import PreTrainedModel
TOKEN_METRICS = frozenset({"loss", "perplexity"})


@dataclass(frozen=True)
class Generation:
    """Options of generation: greedy search or beam search."""

    new_tokens: int = option(64, "longest generated text, in tokens")
    beams: int = option(1, "beams of the search; 1 is greedy")

    def __post_init__(self) -> None:
        if not (0 < self.new_tokens <= 100_000 and 0 < self.beams <= 1000):
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, beams is {self.beams}",
                expected="1 to 100000 tokens, 1 to 1000 beams",
            )


def generate(
    model: PreTrainedModel, prompts: Encoded, batch_size: int, how: Generation
) -> list[Generated]:
    """Generate a text for each prompt, in order, without special tokens.

    Args:
        model: a causal or sequence-to-sequence language model.
        prompts: encoded prompts, one row each.
        batch_size: prompts per call of `model.generate`.
        how: the length and the search.
    """
    import torch  # slow to import

    tokenizer = prompts.setting.tokenizer
    # A decoder continues from the last position, which must not be padding.
    side = "right" if model.config.is_encoder_decoder else "left"
    generated: dict[int, Generated] = {}
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
        generated |= zip(indices, (Generated(text.strip()) for text in texts), strict=True)
    return in_order(generated)


def token_loss(
    model: PreTrainedModel, data: Encoded, batch_size: int, *, shifted: bool = False
) -> dict[str, float]:
    """Return `loss`, the mean negative log-likelihood per labelled token in nats, and `perplexity`.

    Args:
        model: a language model whose loss is a mean over labelled tokens.
        data: encoded examples with labels.
        batch_size: rows per forward pass.
        shifted: whether the model predicts each token from the ones before it, so that the label
            of the first position does not count.
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
