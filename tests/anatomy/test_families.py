"""The rows: each is complete, valid, frozen, and used by the models it names."""

from __future__ import annotations

import dataclasses

import pytest

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.families import decoders, encoder_decoders, encoders, rows_of
from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.sites import ROLES
from tests.kit import tiny_models

# Module -> the stacks of its rows, and roles in each layer of the first or of the last one.
MODULES = {
    encoders: (["encoder"], {"attn.q", "attn.v", "ffn.up", "ffn.down"}),
    decoders: (["decoder"], {"attn.q", "attn.v", "attn.o"}),
    encoder_decoders: (["encoder", "decoder"], {"cross.q"}),
}
ARCHITECTURES = [(m, t) for m in MODULES for row in rows_of(m) for t in row.model_types]
# XLNet multiplies by plain parameters, which are no projections.
WITHOUT_PROJECTIONS = {"xlnet": {"attn.q", "attn.v"}}


def test_every_row_is_registered_under_all_its_model_types():
    assert [name for _, name in ARCHITECTURES] == list(dict.fromkeys(t for _, t in ARCHITECTURES))
    assert {name for _, name in ARCHITECTURES} == FAMILIES.keys()
    counts = {module: sum(m is module for m, _ in ARCHITECTURES) for module in MODULES}
    assert all(counts[m] >= n for m, n in {encoders: 12, decoders: 17, encoder_decoders: 8}.items())
    assert all(FAMILIES[t] in rows_of(module) for module, t in ARCHITECTURES)


@pytest.mark.parametrize(("module", "architecture"), ARCHITECTURES)
def test_a_model_has_the_stacks_sites_and_constants_of_its_row(module, architecture):
    row, (stacks, roles) = FAMILIES[architecture], MODULES[module]
    model = tiny_models.usual_model(architecture)
    anatomy = ah.anatomy_of(model)
    assert anatomy.family is row
    assert list(anatomy.stacks) == stacks == [stack.name for stack in row.stacks]
    for stack in row.stacks:
        assert set(stack.fused) <= set(stack.sites) <= set(ROLES)
        assert stack.norms in (None, "pre", "post") or isinstance(
            getattr(model.config, stack.norms), bool
        )
    for layer in range(anatomy.depth(stacks[-1])):
        for role in roles - WITHOUT_PROJECTIONS.get(architecture, set()):
            site = anatomy.sites[f"{stacks[-1]}.{layer}.{role}"]
            assert model.get_submodule(site.host) is not None
    cross = {site.stack for site in anatomy.sites.values() if site.role.startswith("cross")}
    assert cross == set(stacks[1:])
    assert all(model.base_model.get_parameter(path) is not None for path in row.constants)
    below = [path for path in anatomy.parameters() if anatomy.layer_of(path) == "below"]
    assert row.below
    assert below, "the row names modules below the first layer"


@pytest.mark.parametrize(
    ("architecture", "there", "missing"),
    [
        ("llama", "decoder.0.ffn.gate", None),
        ("opt", "decoder.0.ffn.up", "decoder.0.ffn.gate"),
        ("gpt2", "decoder.0.attn.qkv", None),
    ],
)
def test_the_sites_of_a_family(architecture, there, missing):
    sites = ah.anatomy_of(tiny_models.language_model(architecture)).sites
    assert there in sites
    assert missing not in sites


def test_the_facts_of_a_family():
    """Fused parts, relative positions, positions that are counted from the padding index."""
    gpt2, t5, bart = (
        ah.anatomy_of(tiny_models.usual_model(name)).sites for name in ("gpt2", "t5", "bart")
    )
    parts = [gpt2[f"decoder.0.attn.{name}"] for name in "qkv"]
    assert {part.host for part in parts} == {"transformer.h.0.attn.c_attn"}
    assert all(part.part is not None for part in parts)
    assert gpt2["decoder.0.attn.qkv"].part is None
    assert t5["decoder.1.attn.kv"].bias is not None
    assert bart["decoder.1.attn.kv"].bias is None
    assert FAMILIES["roberta"].positions_from_padding
    assert not FAMILIES["bert"].positions_from_padding


def test_rows_are_immutable_and_claim_nothing_that_they_do_not_state():
    stack = Stack("encoder", "layers", {"attn.q": "q"})
    for value in (Family(("new",), (stack,), ("embeddings",)), stack):
        for name in (field.name for field in dataclasses.fields(value)):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, name, None)
    assert stack.norms is stack.bias is stack.body is None
    assert (stack.root, dict(stack.fused)) == ("", {})
