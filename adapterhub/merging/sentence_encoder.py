"""Write a merged model whose head pools as a sentence-transformers model: encoder, pooling, dense.

A plain checkpoint of a classifier pools in the way of its class. Where an adapter's head reads
another pooling, the merged model is written as sentence-transformers does: the base model as a
plain checkpoint, and a folder each for the pooling and for the head, whose outputs are the logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activate import activate
from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.pooling import POOLS
from adapterhub.backbones.probe import probe_batch
from adapterhub.backbones.quantized_training import keep_4bit_layout
from adapterhub.errors import MergeError

_POOLING, _HEAD = "1_Pooling", "2_Dense"
_TYPES = {"": "Transformer", _POOLING: "Pooling", _HEAD: "Dense"}
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}


@dataclass(frozen=True)
class SentenceEncoder:
    """The pooling and the linear head of a merged model.

    Attributes:
        how: the pooling: cls, mean, last or max.
        head: maps the pooled vector to the logits.
    """

    how: str
    head: nn.Linear

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        """Write the folder.

        Args:
            model: the merged model.
            tokenizer: its tokenizer.
            folder: a folder that does not exist.
        """
        base: Any = model.base_model
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(_TYPES.items())
        ]
        size = {"word_embedding_dimension": self.head.in_features}
        dense = {
            "in_features": self.head.in_features,
            "out_features": self.head.out_features,
            "bias": self.head.bias is not None,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        configs: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": _max_length(model, tokenizer)},
            f"{_POOLING}/config.json": size | {f: how == self.how for how, f in _FLAGS.items()},
            f"{_HEAD}/config.json": dense,
        }
        for name, content in configs.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
        named = self.head.named_parameters()
        tensors = {f"linear.{n}": p.detach().float().cpu().contiguous() for n, p in named}
        save_file(tensors, folder / _HEAD / "model.safetensors")

    def merged_outputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the logits on the probe batch of a merged model with this pooling and head."""
        return self._logits(model.base_model, dict(self.head.named_parameters()), model)

    def outputs(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the folder, and return the logits on the probe batch of the merged model.

        Args:
            model: the merged model.
            folder: what `save` wrote.
        """
        base = AutoModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        keep_4bit_layout(base)
        tensors = load_file(folder / _HEAD / "model.safetensors", device=str(model.device))
        head = {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
        return self._logits(base, head, model)

    def _logits(
        self, base: Any, head: Mapping[str, Tensor], model: PreTrainedModel
    ) -> dict[str, Tensor]:
        batch = probe_batch(model)
        with torch.inference_mode():
            states = base(**batch).last_hidden_state
            pooled = POOLS[self.how](states.float(), batch["attention_mask"].bool())
            pooled = pooled.to(states.dtype).float()
            logits = nn.functional.linear(pooled, head["weight"].float(), head.get("bias"))
        return {"logits": logits.float().cpu()}


def take_pooling(adapter: Adapter) -> SentenceEncoder:
    """Remove the pooling from an attached adapter, and return it with a copy of the head.

    The adapter, which then reads what the model's class pools, can be merged into its backbone.

    Raises:
        MergeError: the head is not one linear layer.
    """
    assert adapter.head is not None
    assert adapter.pooling is not None
    (head, *others) = adapter.head.own.values()
    if others or not isinstance(head, nn.Linear):
        raise MergeError(
            f"pooling={adapter.pooling.how}: a merged checkpoint pools like that only as a "
            "sentence-transformers model, whose head is one linear layer",
            offenders=[f"{n}: {type(m).__name__}" for n, m in adapter.head.own.items()],
            hint="train with pooling=model, or keep the adapter attached",
        )
    encoder = SentenceEncoder(adapter.pooling.how, head)
    activate(adapter.model)
    adapter.pooling.eject()
    adapter.pooling = None
    activate(adapter.model, adapter.name)
    return encoder


def _max_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(positions, tokenizer.model_max_length))
