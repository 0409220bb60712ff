"""Sites: their inputs and outputs on every architecture, and how they are selected."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.sites import FeatureSlice, names_a_role
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.selection import long_table


@long_table("architecture", tiny_models.ARCHITECTURES, 4)
def test_a_sublayer_receives_its_own_input(architecture):
    """The x of a sublayer has the caller's rows and tokens and the sublayer's width, even if its
    projections are called several times."""
    model = tiny_models.usual_model(architecture)
    roles = {site.role for site in ah.anatomy_of(model).sites.values()}
    sites = sorted(roles & {"attn", "cross", "ffn"})
    adapter = ah.attach(model, {"parallel": {"sites": sites}})
    seen: dict = {}
    for placed in adapter.placed:
        placed.module.register_forward_pre_hook(
            lambda _, args, site=placed.site: seen.setdefault(site, args)
        )
    inputs = tiny_models.batch()
    model(**inputs, **tiny_models.decoder_inputs(model, inputs))
    assert len(seen) == len(adapter.placed) > 0
    for site, (x, y) in seen.items():
        assert x.shape[-1] == site.d_in
        assert y.shape[-1] == site.d_out
        # XLNet puts tokens first; mixtures of experts may flatten rows and tokens.
        assert x.shape[:-1] == y.shape[:-1]
        assert x.shape[:-1].numel() in (27, 12)


def test_a_prompt_keeps_the_length_of_every_output(subtests):
    for architecture in tiny_models.MATRIX:
        with subtests.test(architecture=architecture):
            model = tiny_models.usual_model(architecture)
            adapter = ah.attach(model, "prompt")
            tiny_models.scramble(adapter)
            inputs = tiny_models.batch()
            with torch.no_grad():
                output = model(
                    **inputs, **tiny_models.decoder_inputs(model, inputs), output_hidden_states=True
                )
            lengths = {9, 4} if model.config.is_encoder_decoder else {9}
            states = [
                state
                for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
                for state in output.get(name) or ()
            ]
            assert len(states) >= 3
            assert {state.shape[1] for state in states} <= lengths


@pytest.mark.parametrize("architecture", [a for a in tiny_models.ARCHITECTURES if "pegasus" in a])
def test_constants_do_not_train(architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, "full")
    constants = ah.anatomy_of(model).family.constants
    assert constants
    for path in constants:
        table = model.base_model.get_parameter(path)
        assert not table.requires_grad
        assert all(table is not changed.original for changed in adapter.changed)


def test_layers_that_share_weights_are_one_layer():
    """ALBERT's two groups of two layers are four sites per role, called sixteen times."""
    model = tiny_models.model("albert", num_hidden_layers=8, num_hidden_groups=2, inner_group_num=2)
    adapter = ah.attach(model, {"lora": {"sites": ["attn.q"]}})
    assert ah.anatomy_of(model).depth("encoder") == 4
    hosts = [p.site.host for p in adapter.placed]
    assert [p.site.layer for p in adapter.placed] == [0, 1, 2, 3]
    assert hosts[2] == "albert.encoder.albert_layer_groups.1.albert_layers.0.attention.query"
    calls = []
    for placed in adapter.placed:
        placed.module.register_forward_hook(lambda *_, site=placed.site: calls.append(site.layer))
    model(**tiny_models.batch())
    assert len(calls) == 16
    assert set(calls) == {0, 1, 2, 3}
    paths = ah.anatomy_of(model).parameters()
    layers = {ah.anatomy_of(model).layer_of(path) for path in paths}
    assert layers == {"below", "above", *(("encoder", number) for number in range(4))}


def selected(model, *patterns, **options):
    return [site.id for site in ah.anatomy_of(model).select(patterns, **options)]


def test_patterns_select_sites_in_the_order_of_the_backbone():
    model = tiny_models.usual_model("bart")
    assert selected(model, "encoder.attn.v", "encoder.1.attn.q") == [
        "encoder.0.attn.v", "encoder.1.attn.q", "encoder.1.attn.v"
    ]  # fmt: skip
    assert selected(model, "*.ffn.up", layers="top 1") == ["encoder.1.ffn.up", "decoder.1.ffn.up"]
    everywhere = selected(model, "attn.q")
    assert everywhere == [f"{stack}.{n}.attn.q" for stack in ("encoder", "decoder") for n in (0, 1)]
    # The sites of a stack are in no layer, so a selection of layers does not exclude them.
    assert "encoder.embed" in selected(model, "embed", "attn.q", layers=0)


def test_all_patterns_that_match_nothing_are_in_one_error():
    model = tiny_models.usual_model("bert")
    with pytest.raises(SiteError, match="bert backbone has no such site") as error:
        selected(model, "attn.q", "atn.v", "cross.q")
    assert [line.split(";")[0] for line in error.value.offenders] == ["'atn.v'", "'cross.q'"]
    assert "attn.v" in error.value.offenders[0]
    assert selected(model, "attn.q", "cross.q", strict=False) == [
        "encoder.0.attn.q",
        "encoder.1.attn.q",
    ]
    with pytest.raises(SiteError):
        selected(model, "attn.q", "atn.v", strict=False)
    with pytest.raises(SiteError, match="in layers"):
        selected(model, "attn.q", layers=())


def test_names_of_peft_select_the_modules_that_they_name(subtests):
    for architecture in tiny_models.MATRIX:
        with subtests.test(architecture):
            check_names_of_peft(architecture)


def check_names_of_peft(architecture):
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


def test_valid_roles_are_recognized_on_any_backbone():
    assert names_a_role("cross.q")
    assert names_a_role("decoder.3.cross.*")
    assert not names_a_role("atn.q")


def test_a_parameter_is_named_by_site_else_by_layer_else_by_path():
    anatomy = ah.anatomy_of(tiny_models.usual_model("bert"))
    layer = "bert.encoder.layer.1"
    assert anatomy.key(f"{layer}.attention.self.query.weight") == "encoder.1.attn.q.weight"
    anatomy = ah.anatomy_of(tiny_models.usual_model("gpt2"))
    assert anatomy.key("transformer.wpe.weight") == "backbone.wpe.weight"
    # A fused projection has no site of its own parts in files.
    assert anatomy.key("transformer.h.1.attn.c_attn.weight") == "decoder.1.attn.qkv.weight"
    anatomy = ah.anatomy_of(tiny_models.usual_model("qwen3"))
    assert (
        anatomy.key("model.layers.0.self_attn.q_norm.weight") == "decoder.0.self_attn.q_norm.weight"
    )


def test_keys_of_parameters_are_unique():
    for architecture in tiny_models.MATRIX:
        anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
        paths = list(anatomy.parameters())
        assert len({anatomy.key(path) for path in paths}) == len(paths) > 10, architecture


@pytest.mark.parametrize("part", [FeatureSlice(2, 4, 12), FeatureSlice(1, 3, 4)])
def test_writing_a_slice_changes_only_its_features(part):
    y = torch.randn(2, 3, 12)
    piece = torch.zeros_like(part.read(y))
    written = part.write(y, piece)
    assert torch.equal(part.read(written), piece)
    changed = [i for i in range(12) if part.start <= i % part.period < part.stop]
    kept = [i for i in range(12) if i not in changed]
    assert torch.equal(written[..., kept], y[..., kept])
    assert torch.equal(part.write(y, part.read(y)), y)


def test_every_use_of_a_tied_parameter_has_a_path():
    anatomy = ah.anatomy_of(tiny_models.language_model("gpt2"))
    once, uses = anatomy.parameters(), anatomy.parameters(every_use=True)
    assert uses.keys() - once.keys() == {"lm_head.weight"}
    assert uses["lm_head.weight"] is once["transformer.wte.weight"]
