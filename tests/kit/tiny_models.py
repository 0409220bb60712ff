"""Tiny random models of every supported architecture: real transformers classes, no downloads."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from adapterhub.anatomy import FAMILIES

VOCAB = 64
PAD, EOS = 1, 2
WORDS = range(5, VOCAB - 4)  # ids without a special meaning in any architecture

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
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15}
_HEAD_DIM = {"head_dim": 8}
_DEBERTA = _PLAIN | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
SIZES: dict[str, dict[str, Any]] = {
    "bert": _PLAIN,
    "roberta": _PLAIN,
    "xlm-roberta": _PLAIN,
    "camembert": _PLAIN,
    "electra": _PLAIN | {"embedding_size": 16},
    "albert": _PLAIN | {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2},
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
        "initializer_range": 0.15,
    },
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA | {"share_att_key": True},
    "mpnet": _PLAIN,
    "modernbert": _PLAIN | {
        "cls_token_id": 3, "sep_token_id": 2, "local_attention": 8,
    },
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.15},
    "openai-gpt": _GPT2,
    "gpt2": _GPT2,
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "num_heads": 4, "max_position_embeddings": 64, "window_size": 4, "initializer_range": 0.15,
    },
    "gptj": _GPT2 | {"rotary_dim": 4},
    "gpt_neox": _PLAIN,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.15},
    "gpt_bigcode": _GPT2,
    "falcon": _PLAIN | {"ffn_hidden_size": 48},
    "mpt": {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "initializer_range": 0.15,
    },
    "opt": _PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.15},
    "xglm": {
        "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "init_std": 0.15,
        "max_position_embeddings": 64,
    },
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | _HEAD_DIM,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "gemma3_text": _GROUPED | _HEAD_DIM | {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    },
    "phi3": _GROUPED,
    "mixtral": _GROUPED | {"num_local_experts": 4},
    "t5": _T5,
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "umt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "bart": _BART,
    "mbart": _BART,
    "plbart": _BART,
    "pegasus": _BART,
    "m2m_100": _BART,
    "marian": _BART,
}  # fmt: skip
_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "attention_dropout", "activation_dropout", "seq_classif_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout_rate", "attention_probs_dropout", "pooler_dropout", "hidden_dropout",
    "summary_last_dropout", "embed_dropout", "classifier_dropout_prob", "embedding_dropout",
    "mlp_dropout", "resid_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
)  # fmt: skip
NO_DROPOUT = dict.fromkeys(_DROPOUTS, 0.0)
ARCHITECTURES = tuple(FAMILIES)
SIZES |= {name: _PLAIN for name in ARCHITECTURES if name not in SIZES}  # the usual names of options
# Each mechanism once: a plain encoder, fused blocks, fused heads, two stacks, ...
CORE = (
    "bert",
    "distilbert",
    "albert",  # shared layers; the embedding is narrower than a layer
    "deberta-v2",  # its own path to a sublayer; no attn.kv
    "modernbert",  # fused gate and up
    "gpt2",  # fused in blocks
    "gpt_neox",  # fused per head
    "llama",
    "gemma3_text",  # sliding windows; norms on the outputs of sublayers
    "t5",
    "bart",
)
_MATRICES = {"": CORE, "full": ARCHITECTURES, "smoke": ("llama", "t5")}
_MATRICES |= {architecture: (architecture,) for architecture in ARCHITECTURES}
MATRIX = _MATRICES[os.environ.get("ADAPTERHUB_MATRIX", "")]
FULL_MATRIX = MATRIX == ARCHITECTURES
_STACKS = {a: {stack.name for stack in family.stacks} for a, family in FAMILIES.items()}
ENCODER_DECODERS = tuple(a for a in ARCHITECTURES if len(_STACKS[a]) == 2)
DECODERS = tuple(a for a in ARCHITECTURES if _STACKS[a] == {"decoder"})
GENERATORS = tuple(a for a in MATRIX if a in DECODERS + ENCODER_DECODERS)
WITHOUT_CLASSIFIER = ("xglm", "pegasus", "m2m_100")
_AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "features": "AutoModel",
    "multiple-choice": "AutoModelForMultipleChoice",
    "tagging": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def model(
    architecture: str, task: str = "classification", seed: int = 0, **config: Any
) -> PreTrainedModel:
    """Build a tiny model in evaluation mode; its weights depend on the seed alone."""
    tokens = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 3}
    options = SIZES[architecture] | tokens | {"num_labels": 3} | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = getattr(transformers, _AUTO[task])
        return auto.from_config(AutoConfig.for_model(architecture, **options)).eval()


def language_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model that can generate."""
    return model(architecture, "seq2seq" if architecture in ENCODER_DECODERS else "causal-lm", seed)


def usual_model(architecture: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a tiny classifier, or a language model if transformers has no classifier."""
    if architecture not in WITHOUT_CLASSIFIER:
        return model(architecture, "classification", seed, **config)
    task = "seq2seq" if architecture in ENCODER_DECODERS else "causal-lm"
    return model(architecture, task, seed, **config)


def decoder_inputs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the extra inputs of an encoder-decoder language model; for others, nothing."""
    if model.config.model_type not in WITHOUT_CLASSIFIER or not model.config.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": inputs["input_ids"][:, :4]}


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the logits of inputs, by default of `batch()`, without gradients."""
    inputs = inputs or batch()
    with torch.no_grad():
        result: Tensor = model(**decoder_inputs(model, inputs) | inputs).logits
    return result


def labelled_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make a batch with labels for a `usual_model`."""
    inputs = batch()
    if model.config.model_type in WITHOUT_CLASSIFIER:
        return inputs | {"labels": inputs["input_ids"]}
    return inputs | {"labels": torch.tensor([0, 1, 2])}


def batch(rows: int = 3, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make a batch without padding whose rows end with EOS, which BART's head requires."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS.start, WORDS.stop, (rows, length), generator=generator)
    ids[:, -1] = EOS
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_batch(side: str | None, length: int = 9) -> dict[str, torch.Tensor]:
    """Make three rows that end with EOS; with a side, the second and third are padded there."""
    ids = batch(3, length, seed=5)["input_ids"]
    if side is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row, count in ((1, 2), (2, length // 2)):
        ids[row, :count], mask[row, :count] = PAD, 0
        if side == "right":
            ids[row], mask[row] = ids[row].roll(-count), mask[row].roll(-count)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def add_noise(tensors: Iterable[Tensor], std: float, seed: int) -> None:
    """Add noise to tensors, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=std)


def scramble(adapter: Any, seed: int = 1, std: float = 0.2) -> None:
    """Add noise to every tensor of an adapter, as training would, so that it has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(adapter.tensors().items()):
            if not tensor.is_floating_point():
                continue  # places
            noise = torch.randn(tensor.shape, generator=generator)
            of_backbone = any(name == changed.name for changed in adapter.changed)
            tensor.add_(noise, alpha=std / 10 if of_backbone else std)


def scramble_parameters(module: Any, seed: int = 1, std: float = 0.1) -> None:
    """Add noise to every parameter of an adapter, or of a module."""
    add_noise(module.parameters(), std, seed)


def enable_gradient_checkpointing(model: PreTrainedModel, **options: Any) -> None:
    """Enable gradient checkpointing; transformers renamed the method in 5.23."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)(options or None)


def hidden_states(model):
    """Return the hidden states of a batch."""
    with torch.no_grad():
        return model(**batch(), output_hidden_states=True).hidden_states


def codes(tensor: Any) -> list[Tensor]:
    """Return a tensor as plain ones: torchao's kind of its own keeps several."""
    if type(tensor.data) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
