"""The rows: complete, valid, used by the models they name; and what they are on a model."""

import dataclasses

import every_type
import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.build import build_anatomy
from adapterhub.anatomy.families import decoders, encoder_decoders, encoders, rows_of
from adapterhub.anatomy.projections import reversible_stack
from adapterhub.anatomy.sites import ROLES, layer_groups, names_a_role
from adapterhub.errors import BackboneError
from tests.kit import tiny_models
from tests.kit.selection import long_table

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
def test_a_model_has_the_stacks_sites_layers_and_parameters_of_its_row(module, architecture):
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
    modules = dict(model.named_modules())
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


@long_table("architecture", FAMILIES, 3)
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


def test_a_decoder_without_an_encoder_has_no_cross_attention_and_no_other_stack():
    """Its layers have the modules of cross-attention, and never run them."""
    anatomy = ah.anatomy_of(tiny_models.model("bart", "causal-lm", is_encoder_decoder=False))
    assert (set(anatomy.stacks), len(anatomy.family.stacks)) == ({"decoder"}, 2)
    assert "decoder.0.attn.q" in anatomy.sites
    assert not [name for name in anatomy.sites if ".cross" in name]


def test_a_row_that_does_not_fit_is_refused():
    stack = dataclasses.replace(FAMILIES["bert"].stacks[0], layers="nowhere.layer")
    row = dataclasses.replace(FAMILIES["bert"], stacks=(stack,))
    with pytest.raises(BackboneError, match=r"bert row .* does not fit") as error:
        build_anatomy(tiny_models.usual_model("bert"), row)
    assert "nowhere.layer" in error.value.expected


# A config option decides in BLOOM; in GPT-J one norm serves two sublayers.
UNKNOWN = {("bloom", "attn"), ("bloom", "ffn"), ("gptj", "ffn"), ("xlnet", "attn")}
OPTIONS = {
    "gpt_neox": {"use_parallel_residual": False},
    "falcon": {"parallel_attn": False},
    "opt": {"do_layer_norm_before": False},  # its norms are behind the sublayers
}


def recorded(model, paths):
    """Record the first inputs and outputs of modules in one forward pass."""
    inputs, outputs = {}, {}

    def record(path):
        def hook(module, args, output):
            inputs.setdefault(path, args[0])
            outputs.setdefault(path, output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [model.get_submodule(path).register_forward_hook(record(path)) for path in paths]
    batch = tiny_models.batch()
    with torch.no_grad():
        model(**batch, **tiny_models.decoder_inputs(model, batch))
    for handle in handles:
        handle.remove()
    return inputs, outputs


@long_table("architecture", tiny_models.ARCHITECTURES, 4)
def test_the_block_is_what_the_layer_continues_with(architecture):
    model = tiny_models.usual_model(
        architecture, **tiny_models.NO_DROPOUT, **OPTIONS.get(architecture, {})
    )
    anatomy = ah.anatomy_of(model)
    sublayers = [site for site in anatomy.sites.values() if site.kind == "sublayer"]
    unknown = {(architecture, site.role) for site in sublayers if site.stream is None}
    assert unknown <= UNKNOWN
    connected = [site for site in sublayers if site.stream]
    if not connected or architecture == "gptj":
        return
    paths = {p for site in connected for p in (site.host, site.input_host, *site.stream) if p}
    inputs, outputs = recorded(model, paths)
    for site, following in zip(connected, [*connected[1:], None], strict=True):
        input_host, norm, postnorm = site.stream
        residual = inputs[input_host or site.host]
        total = residual + (outputs[postnorm] if postnorm else outputs[site.host])
        if norm:
            torch.testing.assert_close(total, inputs[norm].view_as(total), atol=1e-5, rtol=1e-5)
            total = outputs[norm]
        if following and (following.stack, following.layer) == (site.stack, site.layer):
            residual = inputs[following.stream.input_host or following.host]
            torch.testing.assert_close(total, residual.view_as(total), atol=1e-5, rtol=1e-5)


def test_a_mixer_has_the_hidden_size_though_attention_reads_more():
    """The attention of Zamba 2 reads the embeddings too, and is twice as wide."""
    auto = every_type.autos("zamba2", every_type.ADAPTED)[0]
    sites = ah.anatomy_of(every_type.build("zamba2", auto, tiny=True)).sites
    mixers = [site for site in sites.values() if site.role == "mixer"]
    assert len(mixers) == 6
    assert {(site.d_in, site.d_out) for site in mixers} == {(32, 32)}
    assert {site.d_in for site in sites.values() if site.role == "attn.q"} == {64}
