"""Tiny random models of every architecture that has a row: real transformers
classes, no download."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from adapterhub.backbones import FAMILIES

VOCAB = 64
PAD, EOS = 1, 2
WORDS = range(5, VOCAB - 4)  # ids that no architecture gives a meaning to

_PLAIN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "initializer_range": 0.15,
}  # fmt: skip
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_T5 = {
    "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48, "d_kv": 8,
    "decoder_start_token_id": PAD, "tie_word_embeddings": False,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "init_std": 0.15, "decoder_start_token_id": EOS,
    "forced_bos_token_id": None, "forced_eos_token_id": None,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "bert": _PLAIN,
    "roberta": _PLAIN,
    "xlm-roberta": _PLAIN,
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
        "initializer_range": 0.15,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15},
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "t5": _T5,
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "bart": _BART,
    "mbart": _BART,
}  # fmt: skip
_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "attention_dropout", "activation_dropout", "seq_classif_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout_rate",
)  # fmt: skip
NO_DROPOUT = dict.fromkeys(_DROPOUTS, 0.0)
ARCHITECTURES = tuple(FAMILIES)
ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart")
DECODERS = ("gpt2", "llama", "mistral", "qwen2")
GENERATORS = tuple(a for a in ARCHITECTURES if a in DECODERS + ENCODER_DECODERS)
# Cells that a method refuses on purpose, with an error: T5, Llama and Mistral have no biases.
REFUSED = {("bitfit", a) for a in ("llama", "mistral", "t5", "mt5")}
_AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "features": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def model(
    architecture: str, task: str = "classification", seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A tiny model in evaluation mode; the same seed gives the same weights."""
    tokens = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 3}
    options = SIZES[architecture] | tokens | {"num_labels": 3} | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = getattr(transformers, _AUTO[task])
        return auto.from_config(AutoConfig.for_model(architecture, **options)).eval()


def cells(methods: Iterable[str], architectures: Iterable[str]) -> list[tuple[str, str]]:
    """Every method on every architecture, but for what is refused on purpose."""
    every = itertools.product(sorted(methods), architectures)
    return [cell for cell in every if cell not in REFUSED]


def language_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model that can generate."""
    return model(architecture, "seq2seq" if architecture in ENCODER_DECODERS else "causal-lm", seed)


def batch(rows: int = 3, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """A classification batch without padding; every row ends with EOS, which BART's
    head looks for."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS.start, WORDS.stop, (rows, length), generator=generator)
    ids[:, -1] = EOS
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def scramble(adapter: Any, seed: int = 1, std: float = 0.2) -> None:
    """Move every tensor of an adapter away from its start, so that it has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(adapter.tensors().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            backbone_own = any(name == changed.name for changed in adapter.changed)
            tensor.add_(noise, alpha=std / 10 if backbone_own else std)
