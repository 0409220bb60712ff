"""The rows: each is complete, valid, and used by the models it names."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.families import decoders, encoder_decoders, encoders, rows_of
from adapterhub.anatomy.sites import ROLES
from tests.kit import tiny_models

MODULES = (encoders, decoders, encoder_decoders)


def test_every_row_is_registered_under_all_its_model_types():
    rows = [row for module in MODULES for row in rows_of(module)]
    model_types = [model_type for row in rows for model_type in row.model_types]
    assert len(model_types) == len(set(model_types)) == len(FAMILIES) > 30
    assert all(FAMILIES[model_type] in rows for model_type in model_types)


def test_rows_use_valid_names(subtests):
    for architecture in FAMILIES:
        with subtests.test(architecture):
            check_names(architecture)


def check_names(architecture):
    row = FAMILIES[architecture]
    assert row.below
    for stack in row.stacks:
        assert set(stack.sites) <= set(ROLES)
        assert set(stack.fused) <= set(stack.sites)
        model = tiny_models.usual_model(architecture)
        assert stack.norms in (None, "pre", "post") or isinstance(
            getattr(model.config, stack.norms), bool
        )


def test_each_model_has_the_stacks_and_constants_of_its_row(subtests):
    for architecture in FAMILIES:
        with subtests.test(architecture):
            check_stacks_and_constants(architecture)


def check_stacks_and_constants(architecture):
    anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
    assert anatomy.family is FAMILIES[architecture]
    assert set(anatomy.stacks) == {stack.name for stack in anatomy.family.stacks}
    for path in anatomy.family.constants:
        assert anatomy.model.base_model.get_parameter(path) is not None
    below = [path for path in anatomy.parameters() if anatomy.layer_of(path) == "below"]
    assert below, "the row names modules below the first layer"
