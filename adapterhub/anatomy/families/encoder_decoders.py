"""Rows of encoder-decoders."""

from __future__ import annotations

from adapterhub.anatomy.family import Family, Stack

_T5_ATTENTION = {
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "attn.kv": "layer.0.SelfAttention",
    "attn.norm": "layer.0.layer_norm",
}
_T5_BIAS = "layer.0.SelfAttention.relative_attention_bias"


def _t5_ffn(layer: int) -> dict[str, str]:
    # The plain network has wi, the gated one wi_0 (gate) and wi_1 (up); missing paths are skipped.
    module = f"layer.{layer}.DenseReluDense"
    return {
        "ffn.gate": f"{module}.wi_0",
        "ffn.up": f"{module}.wi|{module}.wi_1",
        "ffn.down": f"{module}.wo",
        "ffn.norm": f"layer.{layer}.layer_norm",
    }


T5 = Family(
    ("t5", "mt5", "umt5"),
    stacks=(
        Stack(
            "encoder",
            "encoder.block",
            _T5_ATTENTION | _t5_ffn(1),
            root="encoder",
            norms="pre",
            bias=_T5_BIAS,
        ),
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
            norms="pre",
            bias=_T5_BIAS,
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


def _bart_stacks(norms: str) -> tuple[Stack, Stack]:
    attention = _bart_attention("attn", "self_attn")
    cross = _bart_attention("cross", "encoder_attn")
    encoder, decoder = attention | _BART_FFN, attention | cross | _BART_FFN
    return (
        Stack("encoder", "encoder.layers", encoder, root="encoder", norms=norms),
        Stack("decoder", "decoder.layers", decoder, root="decoder", norms=norms),
    )


BART = Family(
    ("bart", "plbart"),
    _bart_stacks("post"),
    below=("shared", *(f"{s}.{m}" for s in ("encoder", "decoder") for m in _BART_BELOW)),
)

MBART = Family(("mbart", "m2m_100"), _bart_stacks("pre"), BART.below)

PEGASUS = Family(
    ("pegasus",),
    MBART.stacks,
    BART.below,
    constants=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
)
