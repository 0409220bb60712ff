"""Structural discovery: compared with the rows, on architectures without one, and when it fails."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family
from adapterhub.anatomy.build import build_anatomy
from adapterhub.anatomy.discovery import discover
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import AT_EMBEDDINGS, OF_TEXTS, example
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

_PLAIN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "initializer_range": 0.15,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}  # fmt: skip
CLASSIFIER, CAUSAL, SEQ2SEQ = (
    f"AutoModelFor{task}" for task in ("SequenceClassification", "CausalLM", "Seq2SeqLM")
)
# Architectures without a row, and the class to test.
ROWLESS: dict[str, tuple[str, dict]] = {
    "cohere": (CAUSAL, _PLAIN),
    "data2vec-text": (CLASSIFIER, _PLAIN),
    "ernie": (CLASSIFIER, _PLAIN),
    "glm": (CLASSIFIER, _PLAIN | {"head_dim": 8}),
    "granite": (CAUSAL, _PLAIN),
    "marian": (SEQ2SEQ, _BART),
    "nemotron": (CLASSIFIER, _PLAIN),
    "olmoe": (CAUSAL, _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi": (CLASSIFIER, _PLAIN),
    # The first layer has a plain network, the second a mixture of experts and a shared expert.
    "qwen2_moe": (
        CLASSIFIER,
        _PLAIN | {
            "num_experts": 4, "mlp_only_layers": [0], "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "rembert": (CLASSIFIER, _PLAIN | {"input_embedding_size": 16}),
    "stablelm": (CLASSIFIER, _PLAIN),
    "starcoder2": (CLASSIFIER, _PLAIN),
}  # fmt: skip


def rowless(architecture, options=None, kind=CLASSIFIER):
    kind, options = ROWLESS.get(architecture, (kind, options or _PLAIN))
    tokens = {
        "vocab_size": tiny_models.VOCAB,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "bos_token_id": 3,
    }
    config = AutoConfig.for_model(architecture, **options, **tokens, num_labels=3)
    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(config).eval()


def labelled(model):
    inputs = tiny_models.batch()
    classifies = "Classification" in type(model).__name__
    return inputs | {"labels": torch.tensor([0, 1, 2]) if classifies else inputs["input_ids"]}


def plain(family: Family) -> bool:
    """Tell whether a row follows from structure: projections are separate modules, called once."""
    return all(
        "attn.q" in stack.sites and not any(">" in path for path in stack.sites.values())
        for stack in family.stacks
    )


PLAIN_ROWS = [a for a in tiny_models.ARCHITECTURES if plain(FAMILIES[a])]


def test_most_rows_are_plain_and_the_rowless_have_none():
    assert len(PLAIN_ROWS) >= 25
    assert set(FAMILIES) - set(PLAIN_ROWS) >= {
        "deberta", "deberta-v2", "modernbert", "xlnet", "openai-gpt", "gpt2", "gpt_neox", "bloom",
        "phi3",
    }  # fmt: skip
    assert not FAMILIES.keys() & {*ROWLESS, *PARTIAL}
    assert len(ROWLESS) >= 5


def test_discovery_agrees_with_the_row(subtests):
    for architecture in PLAIN_ROWS:
        with subtests.test(architecture):
            check_discovery(architecture)


def check_discovery(architecture):
    model = tiny_models.usual_model(architecture)
    discovered, row = discover(model), FAMILIES[architecture]
    # Structure does not show whether a norm is applied before or after a sublayer.
    row = replace(row, stacks=tuple(replace(stack, norms=None) for stack in row.stacks))
    assert build_anatomy(model, discovered).sites == build_anatomy(model, row).sites
    assert discovered.positions_from_padding == row.positions_from_padding
    assert [s.body for s in discovered.stacks] == [s.body for s in row.stacks]
    assert set(row.constants) <= set(discovered.constants)
    by_row, by_structure = build_anatomy(model, row), build_anatomy(model, discovered)
    for path in by_row.parameters():
        assert by_structure.layer_of(path) == by_row.layer_of(path), path


CELLS = list(itertools.product(ROWLESS, ("lora", "houlsby", "parallel", "prefix", "mam", "prompt")))


@long_table(("architecture", "method"), CELLS, 5)
def test_an_architecture_without_a_row_works(architecture, method):
    model = rowless(architecture)
    before, state = logits(model, **labelled(model)), copy.deepcopy(model.state_dict())
    anatomy = ah.anatomy_of(model)
    adapter = ah.attach(model, method)
    assert ah.anatomy_of(model).sites == anatomy.sites, "adapters are not part of the structure"
    if method in ("lora", "parallel"):
        assert torch.equal(logits(model, **labelled(model)), before)
    tiny_models.scramble(adapter)
    assert not torch.allclose(logits(model, **labelled(model)), before, atol=1e-3)
    model(**labelled(model)).loss.backward()
    assert adapter.placed
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.parameters())
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in adapter.parameters()
    }
    adapter.detach()
    assert torch.equal(logits(model, **labelled(model)), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def picture_model():
    config = transformers.ViTConfig(**_PLAIN, image_size=8, patch_size=4, num_labels=3)
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    return transformers.ViTForImageClassification(config).eval(), inputs


def speech_model():
    sizes = _BART | {"num_mel_bins": 8, "max_source_positions": 10, "vocab_size": tiny_models.VOCAB}
    tokens = {"pad_token_id": 1, "bos_token_id": 3, "eos_token_id": 2}
    config = transformers.WhisperConfig(**sizes, **tokens)
    inputs = {"input_features": torch.randn(2, 8, 20), "labels": torch.tensor([[5, 6], [7, 8]])}
    return transformers.WhisperForConditionalGeneration(config).eval(), inputs


# A ViT has no tokens, nor the encoder of Whisper, which has no task head.
NOT_APPLICABLE = {(method, picture_model) for method in (*AT_EMBEDDINGS, *OF_TEXTS)}
NOT_APPLICABLE |= {("head", speech_model), ("alora", speech_model)}


MADE = (picture_model, speech_model)


@long_table(("make", "method"), list(itertools.product(MADE, sorted(METHODS))))
def test_pictures_and_speech(make, method, tmp_path):
    model, inputs = make()
    with torch.no_grad():
        before = model(**inputs).logits
    if (method, make) in NOT_APPLICABLE:
        with pytest.raises((SiteError, AttachError), match=r"does not fit|nothing would train"):
            ah.attach(model, example(method))
        return
    adapter = ah.attach(model, example(method), name="seen")
    tiny_models.scramble(adapter)
    output = model(**inputs)
    assert not torch.allclose(output.logits, before, atol=1e-3)
    output.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in adapter.parameters())
    adapter.save(tmp_path / "seen")
    adapter.detach()
    assert torch.equal(model(**inputs).logits, before)
    ah.load(model, tmp_path / "seen")
    assert torch.equal(model(**inputs).logits, output.logits)


def test_virtual_tokens_need_a_model_with_tokens():
    model, _ = picture_model()
    with pytest.raises(SiteError, match="prompt does not fit a vit backbone") as error:
        ah.attach(model, "prompt")
    assert {"lora", "prefix", "houlsby"} <= set(error.value.hint.replace(",", "").split())
    assert "prompt" not in error.value.hint


# A fused projection whose parts are not known, layers in pieces, convolutions in place of
# projections, no layers at all: what is there, and methods that do not fit.
PARTIAL = {
    "codegen": (
        CAUSAL,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
        {"attn.qkv", "attn.o", "attn.kv", "ffn.up", "ffn.down", "attn", "ffn"},
        set(),
    ),
    "flaubert": (
        CLASSIFIER,
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 64},
        {"attn.q", "attn.k", "attn.v", "attn.o", "attn.kv", "attn"},
        set(),
    ),
    "squeezebert": (
        CLASSIFIER,
        _PLAIN | {"embedding_size": 32},
        set(),
        {"lora", "pfeiffer", "prefix"},
    ),
}


@pytest.mark.parametrize("architecture", PARTIAL)
def test_what_is_not_found_is_no_site_and_methods_without_sites_fit(architecture):
    kind, sizes, roles, refused = PARTIAL[architecture]
    model = rowless(architecture, sizes, kind)
    before = logits(model, **labelled(model))
    found = {site.role for site in ah.anatomy_of(model).sites.values() if site.kind != "norm"}
    assert found >= roles
    assert ("attn.kv" in found) == ("prefix" not in refused)
    for method in ("lora", "pfeiffer", "prefix", "norms", "bitfit", "full", "unfreeze"):
        if method in refused:
            with pytest.raises(SiteError, match=f"{method} does not fit") as error:
                ah.attach(model, method)
            assert {"full", "norms", "unfreeze"} <= set(error.value.hint.replace(",", "").split())
            continue
        adapter = ah.attach(model, method)
        tiny_models.scramble(adapter)
        assert not torch.allclose(logits(model, **labelled(model)), before, atol=1e-4), method
        adapter.detach()
        assert torch.equal(logits(model, **labelled(model)), before)
