"""Sites: their inputs and outputs on every architecture, and how they are selected and grouped."""

import every_type
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.anatomy import sites as anatomy_sites
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import dropped_modules, layer_numbers, sites_option
from adapterhub.errors import SiteError
from tests.kit import media, tiny_models
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


T5 = anatomy_of(tiny_models.model("t5", "seq2seq"))


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (lambda s: s.role == "attn.q", ["attn.q"]),
        (lambda s: s.role in ("attn.q", "attn.v"), ["attn.q", "attn.v"]),
        (lambda s: s.role == "attn.q" and s.stack == "decoder", ["decoder.attn.q"]),
        (lambda s: s.id == "decoder.0.attn.q", ["decoder.0.attn.q"]),
        (lambda s: False, []),
    ],
)
def test_the_shortest_exact_patterns_are_used(names, option):
    assert sites_option(T5, [site for site in T5.sites.values() if names(site)]) == option


@given(st.sets(st.sampled_from(sorted(T5.sites)), min_size=1))
def test_the_patterns_select_exactly_the_sites(ids):
    patterns = sites_option(T5, [T5.sites[i] for i in ids])
    assert {site.id for site in T5.select(patterns)} == ids


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("all", [0, 1, 2, 3, 4, 5]), ("top 2", [4, 5]), ("top 9", [0, 1, 2, 3, 4, 5]),
        ("first 2", [0, 1]), ("first 0", []), ("1..3", [1, 2, 3]), (" 4 ", [4]), (5, [5]),
        ((0, 5), [0, 5]),
    ],
)  # fmt: skip
def test_a_selection_of_six_layers(layers, numbers):
    assert sorted(layer_numbers(layers, 6)) == numbers


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("0..6", "'0..6' do not exist"),
        ("0..999999999", "do not exist"),
        ((0, 6, -1), r"\[-1, 6\] do not exist"),
        ("6", r"\[6\] do not exist"),
        ("last", "cannot parse layers 'last'"),
        ("top ten", "cannot parse"),
        ("", "cannot parse"),
    ],
)
def test_a_bad_selection_is_refused(layers, problem):
    with pytest.raises(SiteError, match=f"{problem}.* in a stack of 6 layers") as error:
        layer_numbers(layers, 6)
    assert "top 4" in error.value.expected


def groups_of(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    return anatomy_sites.layer_groups(ah.anatomy_of(every_type.build(model_type, auto)))


def test_layers_of_two_kinds_are_two_groups():
    mixers, attention = groups_of("qwen3_next")
    assert attention.layers == (3,)
    assert mixers.layers == (0, 1, 2, 4, 5)
    assert "attn.kv" in attention.found
    assert "mixer" in {role.partition(".")[0] for role in mixers.found}
    assert attention.experts == mixers.experts == 512
    assert {"ffn.experts.gate_up", "ffn.experts.down", "ffn.router"} <= {*attention.found}
    assert not [path for path in attention.other_weights if "experts." in path or "gate" in path]


@pytest.mark.parametrize(
    ("model_type", "missing", "others"),
    [
        ("llama", (), ()),
        ("gpt_oss", (), tuple(f"mlp.experts.{n}_proj_bias" for n in ("gate_up", "down"))),
        ("persimmon", ("q, k and v in attn.qkv",), None),
        ("nystromformer", ("keys and values in attn",), None),
        ("rembert", (), None),
        ("mamba", ("a feed-forward network",), None),
    ],
)
def test_what_was_not_found_in_a_group_of_equal_layers(model_type, missing, others):
    (group,) = groups_of(model_type)
    assert group.layers == tuple(range(len(group.layers)))
    assert group.missing == missing
    assert others is None or group.other_weights == others


def llava(read):
    vision = {**media.VISION, "num_hidden_layers": 3}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, projection_dim=32),
        text_config=transformers.LlamaConfig(**media.TEXT, vocab_size=40),
        image_token_index=5,
        vision_feature_layer=read,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def without_gradient(model):
    """Return the parameters that a loss on a picture does not reach."""
    ids, pixels = torch.tensor([[7, *[5] * 16, 8]]), torch.randn(1, 3, 16, 16)
    model(input_ids=ids, pixel_values=pixels, labels=ids).loss.backward()
    return {name: p for name, p in model.named_parameters() if p.grad is None}


@pytest.mark.parametrize(
    ("read", "first"), [(-2, 2), (-3, 1), (1, 1), ([-3, -2], 2), (-1, None), ([0, 3], None)]
)
def test_layers_of_pictures_that_get_no_gradient_are_dropped(read, first):
    """A language model reads an encoder before its last layer."""
    model = llava(read)
    dropped = dropped_modules(anatomy_of(model))
    layers = "model.vision_tower.encoder.layers"
    expected = [f"{layers}.{i}" for i in range(first, 3)] if first else []
    assert list(dropped[: len(expected)]) == expected
    inside = tuple(f"{path}." for path in dropped)
    names, without = dict(model.named_parameters()), without_gradient(model)
    assert {name for name in names if name.startswith(inside)} <= without.keys()
    assert not first or all(name.startswith(inside) for name in without)
    assert dropped_modules(anatomy_of(tiny_models.model("bert"))) == ()


@pytest.mark.parametrize("method", ["lora", "pfeiffer", "ia3", "prefix", "full", "norms", "bitfit"])
def test_methods_train_only_what_is_read(method):
    model = llava(-2)
    adapter = ah.attach(model, method, name="one")
    dropped = tuple(f"{path}." for path in dropped_modules(anatomy_of(model)))
    assert not any(f"{p.site.host}.".startswith(dropped) for p in adapter.placed)
    assert any(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in without_gradient(model).values())


def test_the_decoder_is_above_the_encoder_and_a_pooler_at_the_top():
    anatomy = ah.anatomy_of(tiny_models.usual_model("bart"))
    above = anatomy.layers_above()
    assert anatomy.layer_count() == 4
    depths = [
        above[f"model.{stack}.layers.{n}.fc1.weight"]
        for stack in ("encoder", "decoder")
        for n in (0, 1)
    ]
    assert depths == [3, 2, 1, 0]
    assert above["model.shared.weight"] == 4
    above = ah.anatomy_of(tiny_models.model("bert", "features")).layers_above()
    assert above["pooler.dense.weight"] == above["encoder.layer.1.output.dense.weight"] == 0
