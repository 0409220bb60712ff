"""Write a merged model that pools as a sentence-transformers model: encoder, pooling, dense.

A plain checkpoint of a classifier pools in the way of its class, and one without a head not at all.
Where an adapter's head reads another pooling, or its task is embedding, the merged model is written
as sentence-transformers does: the base model as a plain checkpoint, and a folder each for the
pooling and for the head, whose outputs are the logits, or for the length of the vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activate import activate
from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.identity import ORIGIN
from adapterhub.backbones.pooling import POOLS, trained_length, vector_length
from adapterhub.backbones.probe import evaluation_mode, probe_batch
from adapterhub.backbones.quantized_layers import keep_4bit_layout
from adapterhub.backbones.task_models import text_config
from adapterhub.errors import MergeError
from adapterhub.patch import Patch
from adapterhub.tasks import Task
from adapterhub.tasks.embedding import Embedding

_POOLING, _HEAD, _LENGTH = "1_Pooling", "2_Dense", "2_Normalize"
_TYPES = {"": "Transformer", _POOLING: "Pooling", _HEAD: "Dense", _LENGTH: "Normalize"}
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
        head: maps the pooled vector to the logits; None: the vector is the output.
        normalize: whether the vector has length 1.
        prompts: what is put before texts, by the name of the use.
        trained: the length that the backbone was trained with, which a merged model does not tell.
    """

    how: str
    head: nn.Linear | None
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    trained: int | None = None

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
        left_out = {_HEAD} if self.head is None else set[str]()
        left_out |= set() if self.normalize else {_LENGTH}
        types = {path: name for path, name in _TYPES.items() if path not in left_out}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(types.items())
        ]
        longest = min(vector_length(model, tokenizer), self.trained or 1 << 30)
        size = {"word_embedding_dimension": text_config(model).hidden_size}
        configs: dict[str, Any] = {
            "modules.json": modules,
            "config_sentence_transformers.json": {"prompts": dict(self.prompts)},
            "sentence_bert_config.json": {"max_seq_length": longest},
            f"{_POOLING}/config.json": size | {f: how == self.how for how, f in _FLAGS.items()},
        }
        if self.normalize:
            configs[f"{_LENGTH}/config.json"] = {}
        if self.head is not None:
            configs[f"{_HEAD}/config.json"] = {
                "in_features": self.head.in_features,
                "out_features": self.head.out_features,
                "bias": self.head.bias is not None,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
        for name, content in configs.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
        if self.head is not None:
            named = self.head.named_parameters()
            tensors = {f"linear.{n}": p.detach().float().cpu().contiguous() for n, p in named}
            save_file(tensors, folder / _HEAD / "model.safetensors")

    def merged_outputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the outputs on the probe batch of a merged model with this pooling and head."""
        head = {} if self.head is None else dict(self.head.named_parameters())
        return self._outputs(model.base_model, head, model)

    def outputs(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the folder, and return the outputs on the probe batch of the merged model.

        Args:
            model: the merged model.
            folder: what `save` wrote.
        """
        base = AutoModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        keep_4bit_layout(base, Patch())
        head: dict[str, Tensor] = {}
        if self.head is not None:
            tensors = load_file(folder / _HEAD / "model.safetensors", device=str(model.device))
            head = {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
        return self._outputs(base, head, model)

    def _outputs(
        self, base: Any, head: Mapping[str, Tensor], model: PreTrainedModel
    ) -> dict[str, Tensor]:
        batch = probe_batch(model)
        with evaluation_mode(base), torch.inference_mode():
            states = base(**batch).last_hidden_state
            pooled = POOLS[self.how](states.float(), batch["attention_mask"].bool())
            if not head:
                vectors = F.normalize(pooled, dim=-1) if self.normalize else pooled
                return {"vectors": vectors.float().cpu()}
            pooled = pooled.to(states.dtype).float()
            logits = F.linear(pooled, head["weight"].float(), head.get("bias"))
        return {"logits": logits.float().cpu()}


def sentence_encoder(adapter: Adapter, task: Task | None) -> SentenceEncoder | None:
    """Return the pooling that a merged adapter needs beside its weights, or None.

    Args:
        adapter: an attached adapter; a pooling of its own is taken off, as `take_pooling` does.
        task: the task that the adapter was trained for, if it is known.

    Raises:
        MergeError: as `take_pooling`.
    """
    if adapter.pooling:
        return take_pooling(adapter)
    if not isinstance(task, Embedding):
        return None
    prompts = {"query": task.query_prefix, "passage": task.passage_prefix}
    prompts = {use: text for use, text in prompts.items() if text}
    return SentenceEncoder(
        task.pooling or "mean",
        None,
        task.normalize,
        prompts,
        trained_length(Path(getattr(adapter.model, ORIGIN))),
    )


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
