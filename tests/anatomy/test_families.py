"""The rows: each is complete, valid, frozen, and used by the models it names."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.families import decoders, encoder_decoders, encoders, rows_of
from adapterhub.anatomy.projections import reversible_stack
from adapterhub.anatomy.sites import ROLES, layer_groups, names_a_role
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


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_sites_layers_and_parameters_of_an_architecture(architecture):
    model = tiny_models.usual_model(architecture)
    anatomy, modules = ah.anatomy_of(model), dict(model.named_modules())
    assert len(anatomy.sites) > 8
    for site_id, site in anatomy.sites.items():
        assert site_id == site.id
        assert {site.host, site.input_host or site.host} <= modules.keys()
        assert min(site.d_in, site.d_out) > 0
    assert not any(reversible_stack(model, paths[0]) for paths in anatomy.layers.values())
    groups = layer_groups(anatomy)
    for stack in anatomy.stacks:
        numbers = [n for group in groups if group.stack == stack for n in group.layers]
        assert sorted(numbers) == list(range(anatomy.depth(stack)))
    sites = {(s.stack, s.layer, s.role) for s in anatomy.sites.values() if s.layer is not None}
    assert sites == {(g.stack, n, role) for g in groups for n in g.layers for role in g.found}
    paths, above = anatomy.parameters(), anatomy.layers_above()
    assert len({anatomy.key(path) for path in paths}) == len(paths) > 10
    assert above.keys() == paths.keys()
    assert set(above.values()) == set(range(anatomy.layer_count() + 1))
    assert Backbone.of(model).token_embedding.shape[0] == tiny_models.VOCAB


@pytest.mark.parametrize("architecture", FAMILIES)
def test_names_of_peft_select_the_modules_that_they_name(architecture):
    anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
    sites = [s for s in anatomy.sites.values() if s.kind == "linear" and s.part is None]
    for name in {site.host.rpartition(".")[2] for site in sites}:
        if names_a_role(name):
            continue  # a module of ALBERT is called ffn
        hosts = {
            path for path, _ in anatomy.model.named_modules() if f".{path}".endswith(f".{name}")
        }
        selected = {site.host for site in anatomy.select([name])}
        assert selected == {path for path in hosts if path.partition(".")[0] not in anatomy.head()}
        assert selected == {site.host for site in anatomy.select([f"*.{name}"])} | hosts & {name}
    every = [site for site in sites if site.role != "ffn.router"]
    assert [site.id for site in anatomy.select(["all-linear"])] == [site.id for site in every]
