"""A discovered row: its stacks and their names, and methods on architectures without a row."""

import copy
from dataclasses import replace

import every_type
import pytest
import sweep_cells
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family
from adapterhub.anatomy.build import build_anatomy
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.discovery.row import discovered_stack, layer_lists, named
from adapterhub.anatomy.family import Stack
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.selection import long_table

_PLAIN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "initializer_range": 0.15,
}  # fmt: skip


def plain(family: Family) -> bool:
    """Tell whether a row follows from structure: projections are separate modules, called once."""
    return all(
        "attn.q" in stack.sites and not any(">" in path for path in stack.sites.values())
        for stack in family.stacks
    )


PLAIN_ROWS = [a for a in tiny_models.ARCHITECTURES if plain(FAMILIES[a])]
assert len(PLAIN_ROWS) >= 25


@long_table("architecture", PLAIN_ROWS, 2)
def test_discovery_agrees_with_the_row(architecture):
    model = tiny_models.usual_model(architecture)
    discovered, row = discover(model), FAMILIES[architecture]
    # Structure does not show whether a norm is applied before or after a sublayer.
    row = replace(row, stacks=tuple(replace(stack, norms=None) for stack in row.stacks))
    by_row, by_structure = build_anatomy(model, row), build_anatomy(model, discovered)
    assert by_structure.sites == by_row.sites
    assert discovered.positions_from_padding == row.positions_from_padding
    assert [s.body for s in discovered.stacks] == [s.body for s in row.stacks]
    assert set(row.constants) <= set(discovered.constants)
    for path in by_row.parameters():
        assert by_structure.layer_of(path) == by_row.layer_of(path), path


# A fused projection whose parts are not known, layers in pieces, convolutions in place of
# projections, no layers at all: what is there, and methods that do not fit.
PARTIAL = {
    "codegen": ({"attn.qkv", "attn.o", "attn.kv", "ffn.up", "ffn.down", "attn", "ffn"}, set()),
    "flaubert": ({"attn.q", "attn.k", "attn.v", "attn.o", "attn.kv", "attn"}, set()),
    "squeezebert": (set(), {"lora", "pfeiffer", "prefix"}),
}


@pytest.mark.parametrize("model_type", PARTIAL)
def test_what_is_not_found_is_no_site_and_methods_without_sites_fit(model_type):
    roles, refused = PARTIAL[model_type]
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    found = {site.role for site in ah.anatomy_of(model).sites.values() if site.kind != "norm"}
    assert found >= roles
    assert ("attn.kv" in found) == ("prefix" not in refused)
    for method in refused:
        with pytest.raises(SiteError, match=f"{method} does not fit") as error:
            ah.attach(model, method)
        assert {"full", "norms", "unfreeze"} <= set(error.value.hint.replace(",", "").split())
    inputs = sweep_cells.inputs_for(model)
    for method in {"lora", "pfeiffer", "prefix", "norms", "full"} - refused:
        assert sweep_cells.cell(model, method, inputs) == "ok", method


def test_stacks_are_named_after_what_they_read(subtests):
    cases = [
        ([("encoder", "text_model.layers")], True, ["encoder"]),
        ([("encoder", "image_a.layers"), ("encoder", "image_b.layers")], False,
         ["vision", "vision2"]),
        ([("encoder", "audio_tower.layers"), ("decoder", "layers")], True, ["audio", "decoder"]),
    ]  # fmt: skip
    for stacks, by_input, names in cases:
        with subtests.test(stacks=stacks):
            found = named([Stack(name, path, {}) for name, path in stacks], by_input)
            assert [stack.name for stack in found] == names
            assert [stack.layers for stack in found] == [path for _, path in stacks]


@pytest.mark.parametrize(
    ("model_type", "options", "stack"),
    [
        # In none of transformers' lists of language models, or in the other one.
        ("qwen3_vl_text", _PLAIN | {"head_dim": 8}, "decoder"),
        ("granite_docling_text", _PLAIN, "decoder"),
        ("bert-generation", _PLAIN, "encoder"),
        ("bert-generation", _PLAIN | {"is_decoder": True}, "decoder"),
        ("roberta-prelayernorm", _PLAIN, "encoder"),
        ("roberta-prelayernorm", _PLAIN | {"is_decoder": True}, "decoder"),
    ],
)
def test_a_stack_with_causal_attention_is_a_decoder(model_type, options, stack):
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "bos_token_id": 3}
    config = AutoConfig.for_model(model_type, **options, **tokens, eos_token_id=2)
    model = transformers.AutoModel.from_config(config).eval()
    assert [found.name for found in ah.anatomy_of(model).family.stacks] == [stack]
    ids = tiny_models.batch()["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = 7
    with torch.no_grad():
        first, second = (model(input_ids=i).last_hidden_state[:, :5] for i in (ids, changed))
    assert torch.allclose(first, second, atol=1e-5) == (stack == "decoder")


def test_a_stack_inside_a_model_has_its_root():
    model = every_type.build("bart", "AutoModel")
    layers = list(model.decoder.layers)
    stack = discovered_stack(model, "decoder.layers", layers, alone=False)
    assert (stack.name, stack.root, stack.own) == ("decoder", "decoder", {})
    assert stack.sites["cross.q"] == "encoder_attn.q_proj"


def test_layers_with_other_paths_for_a_role_are_kept_apart():
    model = every_type.build("bert", "AutoModel")
    layers = list(model.encoder.layer)
    layers[1].intermediate.dense = nn.Identity()
    stack = discovered_stack(model, "encoder.layer", layers, alone=True)
    assert stack.sites["ffn.up"] == "intermediate.dense"
    assert {n: "ffn.up" in sites for n, sites in stack.own.items()} == {1: False}


# Vision and sound encoders whose stages have sizes of their own, and layers that change the size.
STAGES = (
    "convnext", "cvt", "focalnet", "fun_asr_nano_encoder", "hiera", "segformer", "swin", "swinv2"
)  # fmt: skip


def auto_model(model_type):
    return every_type.build(model_type, "AutoModel", tiny=True)


@long_table("model_type", STAGES, 3)
def test_each_layer_of_stages_is_found_by_its_own_size(model_type):
    model = auto_model(model_type)
    anatomy = ah.anatomy_of(model)
    roles = [site.role for site in anatomy.sites.values()]
    depth = anatomy.depth("encoder")
    assert [roles.count(role) for role in ("ffn", "ffn.up", "ffn.down")] == [depth] * 3
    attends = "attn.q" in roles
    assert roles.count("attn") == roles.count("attn.o") == (depth if attends else 0)
    sizes = {site.d_out for site in anatomy.sites.values() if site.role == "ffn"}
    assert len(sizes) > (model_type != "fun_asr_nano_encoder"), "stages of several sizes"
    for method in ("lora", "pfeiffer", "houlsby", "scaled-parallel"):
        adapter = ah.attach(model, method)
        assert {placed.site.layer for placed in adapter.placed} == set(range(depth))
        adapter.detach()


@pytest.mark.parametrize("model_type", ["moshi", "moonshine", "modernbert-decoder"])
def test_a_fused_projection_with_another_name_has_no_parts(model_type):
    """Which half is the gate is not known; networks have an input and an output all the same."""
    model = auto_model(model_type)
    decoder = [s for s in ah.anatomy_of(model).sites.values() if s.stack == "decoder"]
    roles = {site.role for site in decoder}
    assert {"ffn", "ffn.gate_up", "ffn.down"} <= roles
    assert not {"ffn.up", "ffn.gate"} & roles
    (width,) = {site.d_in for site in decoder if site.role == "ffn.gate_up"}
    assert {(s.d_in, s.d_out) for s in decoder if s.role == "ffn"} == {(width, width)}


def test_networks_stand_in_for_attention_only_where_there_is_none():
    """FNet has none; XLNet's is of parameters, which are no projections."""
    adapter = ah.attach(every_type.build("fnet", "AutoModel", tiny=True), "lora")
    assert {placed.site.role for placed in adapter.placed} == {"ffn.up", "ffn.down"}
    with pytest.raises(SiteError, match="no such site"):
        ah.attach(every_type.build("xlnet", "AutoModel", tiny=True), "lora")


A = nn.ModuleDict({f"{name}_proj": nn.Linear(4, 4) for name in "qkvo"})  # attention
F, C = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), nn.Conv2d(2, 2, 1)


def built(parts):
    """Build lists and mappings of modules; each mention of a module is a copy of it."""
    if isinstance(parts, list):
        return nn.ModuleList(map(built, parts))
    if isinstance(parts, dict):
        return nn.ModuleDict({name: built(part) for name, part in parts.items()})
    return copy.deepcopy(parts)


@pytest.mark.parametrize(
    ("parts", "lists"),
    [
        (nn.Sequential(nn.Linear(2, 2)), {}),
        # Convolutions, where there are no other layers; and no list in which a module is missing.
        ({"stages": [C, C]}, {"stages": 2}),
        ({"stages": [C, C], "blocks": [F, F]}, {"blocks": 2}),
        ({"layers": [F, F], "convolutions": [F, None]}, {"layers": 2}),
        # A shorter or deeper list next to layers with attention belongs to them.
        ({"blocks": [A] * 3, "others": [F] * 2}, {"blocks": 3}),
        ({"blocks": [A] * 3, "others": [F] * 3}, {"blocks": 3, "others": 3}),
        ({"blocks": [A] * 3, "others": {"mergers": [F] * 3}}, {"blocks": 3}),
        ({"others": {"mergers": [F] * 3}}, {"others.mergers": 3}),
        # A sequence is a list if each module attends.
        ({"blocks": nn.Sequential(A, A), "head": nn.Sequential(F, F)}, {"blocks": 2}),
        ({"blocks": nn.Sequential(A, nn.ReLU())}, {}),
        # The layers of stages, where each stage has some; else the stages.
        ({"stages": [{"layers": [F]}, {"layers": [F, F]}]}, {"stages.*.layers": 3}),
        ({"stages": [{"layers": [F]}, {"parts": [F, F]}]}, {"stages": 2}),
    ],
)
def test_the_layers_of_a_model_of_lists(parts, lists):
    assert {path: len(layers) for path, layers in layer_lists(built(parts))} == lists
