"""A row with padding on the left computes what it computes alone, behind a prompt too."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family, Stack
from tests.kit import tiny_models

PADS = 3
_MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4, "mamba_d_head": 8}
HYBRIDS = {
    "falcon_h1": _MAMBA | {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "qwen3_next": {
        "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
DISCOVERED = {"roformer": {"embedding_size": 32}}
OTHERS = HYBRIDS | DISCOVERED
# The backbone itself computes otherwise, with its positions counted or given.
COUNTS_PADDING = (
    "bert", "electra", "albert", "distilbert", "deberta", "deberta-v2", "openai-gpt", "gpt2",
    "gpt_neo", "gpt_bigcode", "xglm", "bart", "mbart", "plbart", "pegasus",
)  # fmt: skip
WITHOUT_POSITIONS = (
    "xlnet", "bloom", "mpt", "roformer", *tiny_models.ENCODER_DECODERS,
)  # fmt: skip
ALL = (*tiny_models.ARCHITECTURES, *OTHERS)
SOME = ("llama", "gemma3_text", "t5", "gpt2", "modernbert", "mpnet", "m2m_100", "roformer", "jamba")
EVERY = [
    (architecture, given)
    for architecture in ALL
    for given in (False, True)
    if architecture not in (WITHOUT_POSITIONS if given else COUNTS_PADDING)
]
CELLS = [cell for cell in EVERY if tiny_models.FULL_MATRIX or cell[0] in SOME]


def build(architecture):
    if architecture in tiny_models.ARCHITECTURES:
        return tiny_models.model(architecture, "features")
    ids = {"vocab_size": tiny_models.VOCAB, "pad_token_id": tiny_models.PAD, "eos_token_id": 2}
    sizes = tiny_models.SIZES["llama"] | {"bos_token_id": 3} | ids | tiny_models.NO_DROPOUT
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(sizes | OTHERS[architecture]))
    return transformers.AutoModel.from_config(config).eval()


def hidden(model, ids, given):
    mask = ids.ne(tiny_models.PAD).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if given:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:1, -3:].expand(len(ids), -1)
    with torch.no_grad():
        return model(**inputs)[0]


def padded():
    """Return two texts, of which the first has padding on the left."""
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(5))
    ids[0, :PADS] = tiny_models.PAD
    return ids


@pytest.mark.parametrize(("architecture", "given"), CELLS)
def test_a_padded_row_equals_the_row_alone(architecture, given, monkeypatch):
    if architecture in HYBRIDS:
        stack = Stack("decoder", "layers", {})
        row = Family((architecture,), stacks=(stack,), below=("embed_tokens",))
        monkeypatch.setitem(FAMILIES, architecture, row)
    model, ids = build(architecture), padded()
    assert not given or "position_ids" in inspect.signature(model.forward).parameters
    first = 0 if model.config.is_encoder_decoder else PADS

    def check(found):
        alone = hidden(model, ids[:1, PADS:], given)[0]
        assert (alone - found[0, first:]).abs().max() < 1e-5

    check(hidden(model, ids, given))
    torch.manual_seed(0)
    tiny_models.scramble(ah.attach(model, "prompt(length=4)", name="short"))
    check(hidden(model, ids, given))
    tiny_models.scramble(ah.attach(model, "prompt(length=6)", name="long"), seed=2)
    if architecture in ("xlnet", "bloom", "mpt"):
        return  # prompts of different lengths
    with ah.route(model, ["short", "long"]):
        together = hidden(model, ids, given)
    ah.activate(model, "short")
    check(together)


def test_the_number_of_cells():
    """All architectures, with positions counted by the backbone, given, or both."""
    assert len(tiny_models.ARCHITECTURES) >= 37
    assert len(EVERY) >= 61
    assert {a for a, _ in EVERY} == set(ALL) - set(COUNTS_PADDING).intersection(WITHOUT_POSITIONS)
