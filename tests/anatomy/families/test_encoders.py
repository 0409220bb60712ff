"""Rows of encoders: every row names modules that exist, in one stack."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.anatomy.families import encoders, rows_of
from tests.kit import tiny_models

TYPES = [model_type for row in rows_of(encoders) for model_type in row.model_types]

# XLNet multiplies by plain parameters, which are no projections.
ATTENTION: dict[str, tuple[str, ...]] = {"xlnet": ()}


def test_the_rows_are_found():
    assert len(TYPES) >= 12
    assert len(set(TYPES)) == len(TYPES)


def test_an_encoder_has_one_stack_with_projections_in_every_layer(subtests):
    for architecture in TYPES:
        with subtests.test(architecture):
            check_stack(architecture)


def check_stack(architecture):
    model = tiny_models.usual_model(architecture)
    anatomy = ah.anatomy_of(model)
    assert list(anatomy.stacks) == ["encoder"]
    for layer in range(anatomy.depth("encoder")):
        for role in (*ATTENTION.get(architecture, ("attn.q", "attn.v")), "ffn.up", "ffn.down"):
            site = anatomy.sites[f"encoder.{layer}.{role}"]
            assert model.get_submodule(site.host) is not None
    assert not any(site.role.startswith("cross") for site in anatomy.sites.values())


def test_roberta_counts_positions_from_the_padding_index_and_bert_does_not():
    rows = {model_type: row for row in rows_of(encoders) for model_type in row.model_types}
    assert rows["roberta"].positions_from_padding
    assert not rows["bert"].positions_from_padding
