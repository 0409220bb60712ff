"""One row an architecture family: where T5 differs from BERT, and nowhere else.

Paths start at the base model (stacks) or at one layer (sites). A path that a model does not have is
skipped, so that one row serves a family's variants (gated or plain feed-forward networks).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.backbones.anatomy import Anatomy, Family, Stack, build
from adapterhub.errors import BackboneError, did_you_mean

BERT = Family(
    ("bert",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer",
            {
                "attn.q": "attention.self.query",
                "attn.k": "attention.self.key",
                "attn.v": "attention.self.value",
                "attn.o": "attention.output.dense",
                "attn.kv": "attention.self",
                "attn.norm": "attention.output.LayerNorm",
                "ffn.up": "intermediate.dense",
                "ffn.down": "output.dense",
                "ffn.norm": "output.LayerNorm",
            },
            pooler="pooler",
        ),
    ),
    below=("embeddings",),
)

ROBERTA = Family(("roberta", "xlm-roberta"), BERT.stacks, BERT.below, positions_from_padding=True)

DISTILBERT = Family(
    ("distilbert",),
    stacks=(
        Stack(
            "encoder",
            "transformer.layer",
            {
                "attn.q": "attention.q_lin",
                "attn.k": "attention.k_lin",
                "attn.v": "attention.v_lin",
                "attn.o": "attention.out_lin",
                "attn.kv": "attention",
                "attn.norm": "sa_layer_norm",
                "ffn.up": "ffn.lin1",
                "ffn.down": "ffn.lin2",
                "ffn.norm": "output_layer_norm",
            },
        ),
    ),
    below=("embeddings",),
)

GPT2 = Family(
    ("gpt2",),
    stacks=(
        Stack(
            "decoder",
            "h",
            {
                "attn.qkv": "attn.c_attn",
                "attn.o": "attn.c_proj",
                "attn.kv": "attn",
                "attn.norm": "ln_1",
                "ffn.up": "mlp.c_fc",
                "ffn.down": "mlp.c_proj",
                "ffn.norm": "ln_2",
            },
        ),
    ),
    below=("wte", "wpe"),
)

LLAMA = Family(
    ("llama", "mistral", "qwen2"),
    stacks=(
        Stack(
            "decoder",
            "layers",
            {
                "attn.q": "self_attn.q_proj",
                "attn.k": "self_attn.k_proj",
                "attn.v": "self_attn.v_proj",
                "attn.o": "self_attn.o_proj",
                "attn.kv": "self_attn",
                "attn.norm": "input_layernorm",
                "ffn.gate": "mlp.gate_proj",
                "ffn.up": "mlp.up_proj",
                "ffn.down": "mlp.down_proj",
                "ffn.norm": "post_attention_layernorm",
            },
        ),
    ),
    below=("embed_tokens",),
)

_T5_ATTENTION = {
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "attn.kv": "layer.0.SelfAttention",
    "attn.norm": "layer.0.layer_norm",
}


def _t5_ffn(layer: int) -> dict[str, str]:
    # The plain network has wi, the gated one wi_0 (gate) and wi_1; a missing path is skipped.
    module = f"layer.{layer}.DenseReluDense"
    return {
        "ffn.gate": f"{module}.wi_0",
        "ffn.up": f"{module}.wi|{module}.wi_1",
        "ffn.down": f"{module}.wo",
        "ffn.norm": f"layer.{layer}.layer_norm",
    }


T5 = Family(
    ("t5", "mt5"),
    stacks=(
        Stack("encoder", "encoder.block", _T5_ATTENTION | _t5_ffn(1), root="encoder"),
        Stack(
            "decoder",
            "decoder.block",
            _T5_ATTENTION
            | {
                "cross.q": "layer.1.EncDecAttention.q",
                "cross.k": "layer.1.EncDecAttention.k",
                "cross.v": "layer.1.EncDecAttention.v",
                "cross.o": "layer.1.EncDecAttention.o",
                "cross.kv": "layer.1.EncDecAttention",
                "cross.norm": "layer.1.layer_norm",
            }
            | _t5_ffn(2),
            root="decoder",
        ),
    ),
    below=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
)


def _bart_attention(sublayer: str, module: str) -> dict[str, str]:
    return {
        f"{sublayer}.q": f"{module}.q_proj",
        f"{sublayer}.k": f"{module}.k_proj",
        f"{sublayer}.v": f"{module}.v_proj",
        f"{sublayer}.o": f"{module}.out_proj",
        f"{sublayer}.kv": module,
        f"{sublayer}.norm": f"{module}_layer_norm",
    }


_BART_FFN = {"ffn.up": "fc1", "ffn.down": "fc2", "ffn.norm": "final_layer_norm"}
_BART_BELOW = ("embed_tokens", "embed_positions", "layernorm_embedding")

BART = Family(
    ("bart", "mbart"),
    stacks=(
        Stack(
            "encoder",
            "encoder.layers",
            _bart_attention("attn", "self_attn") | _BART_FFN,
            root="encoder",
        ),
        Stack(
            "decoder",
            "decoder.layers",
            _bart_attention("attn", "self_attn")
            | _bart_attention("cross", "encoder_attn")
            | _BART_FFN,
            root="decoder",
        ),
    ),
    below=("shared", *(f"{s}.{m}" for s in ("encoder", "decoder") for m in _BART_BELOW)),
)

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (BERT, ROBERTA, DISTILBERT, GPT2, LLAMA, T5, BART)
    for model_type in family.model_types
}


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """The anatomy of a model, by its family's row.

    Raises:
        BackboneError: no row for this architecture; the error tells the row to write.
    """
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise BackboneError(
            f"no anatomy for the architecture {model_type!r}{did_you_mean(model_type, FAMILIES)}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            hint="add a Family row to adapterhub/backbones/families.py that names, for one layer, "
            "the paths of attn.q attn.k attn.v attn.o ffn.up ffn.down",
        )
    return build(model, FAMILIES[model_type])
