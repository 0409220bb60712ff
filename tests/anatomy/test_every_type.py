"""Every model type of transformers: a method works, or is refused with an error of adapterhub.

By default a few types whose structure is irregular; all that can be built with
ADAPTERHUB_MATRIX=full. test_sweep.py trains, saves and loads methods on popular types.
"""

import contextlib
import functools
import inspect

import every_type
import pytest
import torch
from transformers import PreTrainedConfig

import adapterhub as ah
from adapterhub.anatomy import anatomy_of
from adapterhub.anatomy.backbone import new_base_model
from adapterhub.anatomy.projections import call_order
from adapterhub.errors import AdapterhubError, SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.selection import cases_of, long_table

METHOD_NAMES = ("lora", "pfeiffer", "prefix", "prompt", "bitfit", "mam", "head")
# Why a type is here: what discovery or a method stumbled over.
SOME = (
    "afmoe",  # experts in all layers but one; names the mask in calls of the attention function
    "canine",  # no table of tokens
    "clip",  # two stacks of one kind
    "convnext",  # no attention; of a network, the inner size may be that of most layers
    "doge",  # a mask of another form
    "fsmt",  # stacks that are no models of transformers
    "gpt_oss",  # experts whose output is a tuple
    "focalnet",  # the same, with layers in several lists
    "ibert",  # projections whose output is a tuple
    "kimi_linear",  # attention of two kinds
    "jetmoe",  # experts in two modules; projections of attention are experts
    "layoutlm",  # each token has a box
    "nllb-moe",  # experts in some layers
    "qwen3_next",  # attention in some layers
    "switch_transformers",  # experts deep in a layer, in some layers
    "t5gemma",  # two configurations without a common size
    "wav2vec2",  # sound
    "xmod",  # adapters of its own in each layer
    "zaya",  # experts whose output is a tuple
)  # fmt: skip
# Its head reshapes an output of its own, which keeps the virtual positions: torch raises.
NOT_REFUSED = {("prophetnet", "AutoModelForCausalLM"): ("prompt",)}
TYPES = every_type.TYPES if tiny_models.FULL_MATRIX else SOME
MODELS = [(t, a) for t in TYPES for a in every_type.autos(t)]
if not tiny_models.FULL_MATRIX:  # the class of the first task only
    MODELS = list({t: (t, a) for t, a in reversed(MODELS)}.values())[::-1]
# By default, each type gets two or three of the methods.
CELLS = [(model, method) for model in MODELS for method in METHOD_NAMES]
CELLS = CELLS if tiny_models.FULL_MATRIX else cases_of(CELLS, 6, nightly=2)


@functools.cache
def build(model_type, auto):
    """Build a small model, or a large one without weights; skip what cannot be built."""
    model = every_type.build(model_type, auto, tiny=True) or every_type.build(model_type, auto)
    if model is None:
        pytest.skip("transformers cannot build it from its defaults here")
    return model


def forward(model):
    """Run a model on text; None if it takes something else, or fails without adapters."""
    ids = torch.full((2, 9), 5, device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    parameters = inspect.signature(model.forward).parameters
    inputs |= {"decoder_input_ids": ids} if "decoder_input_ids" in parameters else {}
    inputs |= {"bbox": ids[..., None].expand(2, 9, 4)} if "bbox" in parameters else {}
    if model.device.type == "meta" or "input_ids" not in parameters:
        return None
    with torch.no_grad():
        return model(**inputs)[0]


def runs(model):
    try:
        return forward(model)
    except Exception:  # an input that this class needs is missing
        return None


def structure(model):
    parameters = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    return parameters, [(name, len(m._forward_hooks)) for name, m in model.named_modules()]


def test_the_types_are_counted():
    assert len(every_type.TYPES) > 600
    assert len({t for t, _ in MODELS}) >= (500 if tiny_models.FULL_MATRIX else len(SOME))


@pytest.mark.parametrize(("model_type", "auto"), MODELS)
def test_a_method_works_or_is_refused_and_leaves_the_model_as_it_was(model_type, auto):
    model = build(model_type, auto)
    output = runs(model)  # BigBird replaces modules in its first forward pass
    before = structure(model)
    methods = [method for cell, method in CELLS if cell == (model_type, auto)]
    assert methods
    for method in set(methods).difference(NOT_REFUSED.get((model_type, auto), ())):
        try:
            adapter = ah.attach(model, METHODS[method].example())
        except AdapterhubError:
            assert structure(model) == before, method
            continue
        placed = {(p.site.stack, p.site.layer) for p in adapter.placed if p.site.layer is not None}
        layers = {(s, n) for s in adapter.anatomy.stacks for n in range(adapter.anatomy.depth(s))}
        if placed and method not in ("prefix", "mam"):  # keys and values: where there is attention
            assert placed == layers, method
        if output is not None:
            with contextlib.suppress(AdapterhubError):
                forward(model)
        adapter.detach()
        assert structure(model) == before, method
        if output is not None and not output.isnan().any():
            assert torch.equal(forward(model), output), method


@long_table("model_type", sorted({t for t, _ in MODELS}), 3)
def test_a_network_ends_in_its_last_projection(model_type):
    model = build(model_type, every_type.autos(model_type)[0])
    sites = anatomy_of(model).sites
    networks = {name.removesuffix(".down") for name, s in sites.items() if s.role == "ffn.down"}
    for network in networks:
        down = sites[f"{network}.down"].host
        around = model.get_submodule(down.rpartition(".")[0])
        order = [f"{down.rpartition('.')[0]}.{name}" for name in call_order(around)]
        for first in ("gate", "up", "gate_up"):
            site = sites.get(f"{network}.{first}")
            if site and {site.host, down} <= set(order):
                assert order.index(site.host) < order.index(down), network


@pytest.mark.parametrize("model_type", ["afmoe", "nllb-moe", "switch_transformers"])
def test_experts_are_the_feed_forward_of_their_layers(model_type):
    model = build(model_type, every_type.autos(model_type)[0])
    anatomy = anatomy_of(model)
    layers = [(stack, n) for stack in anatomy.stacks for n in range(anatomy.depth(stack))]
    hosts = [model.get_submodule(anatomy.sites[f"{s}.{n}.ffn"].host) for s, n in layers]
    whole = [hasattr(host, "experts") for host in hosts]
    assert any(whole)
    assert whole == [f"{s}.{n}.ffn.up" not in anatomy.sites for s, n in layers]


OF_TYPES = {  # the stacks, and the roles of some layer, among others
    "clip": ({"language", "vision"}, set()),
    "qwen2_vl": ({"language", "vision"}, set()),
    "qwen2_audio": ({"language", "audio"}, set()),
    "kimi_linear": ({"decoder"}, set()),
    "whisper": ({"encoder", "decoder"}, set()),
    "t5gemma": ({"encoder", "decoder"}, set()),
    "instructblip": ({"vision", "language", "encoder"}, set()),
    "deepseek_v3": ({"decoder"}, {"attn.q_a", "attn.q_b", "attn.kv_a", "attn.kv_b", "ffn.gate"}),
    "mamba": ({"decoder"}, {"mixer.in_proj", "mixer.out_proj", "mixer"}),
    "jamba": ({"decoder"}, {"mixer.in_proj", "mixer.norm", "ffn.norm", "ffn.up"}),
    "recurrent_gemma": ({"decoder"}, {"mixer.linear_x", "ffn.gate", "ffn.down"}),
    "lfm2": ({"decoder"}, {"attn.q", "ffn.gate", "ffn.up", "ffn.down"}),
    "gemma3n_text": ({"decoder"}, {"attn.q", "attn.o", "ffn.gate", "other.per_layer_input_gate"}),
    "xmod": ({"encoder"}, {"attn.q", "ffn.up", "ffn.down"}),
}


def test_the_stacks_and_sites_of_an_irregular_architecture(subtests):
    for model_type, (stacks, roles) in cases_of(OF_TYPES.items(), 2):
        with subtests.test(model_type=model_type):
            model = every_type.build(model_type, every_type.autos(model_type)[-1])
            anatomy = anatomy_of(model)
            assert set(anatomy.stacks) == stacks
            layers = {}
            for site in anatomy.sites.values():
                layers.setdefault((site.stack, site.layer), set()).add(site.role)
            assert any(roles <= found for found in layers.values())
            embeds = [site.stack for site in anatomy.sites.values() if site.role == "embed"]
            assert not {"vision", "audio"} & set(embeds)
            if embeds:
                placed = ah.attach(model, "prompt").placed
                assert [each.site.id for each in placed] == [f"{embeds[0]}.embed"]


def test_a_recurrence_next_to_attention_is_no_fused_projection():
    sites = anatomy_of(every_type.build("falcon_h1", "AutoModelForCausalLM")).sites
    assert {s.host for s in sites.values() if s.layer == 0 and s.role.startswith("attn.")} == {
        "model.layers.0.input_layernorm", "model.layers.0.self_attn",
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
    }  # fmt: skip


def test_biases_that_select_experts_are_no_bias_terms():
    with pytest.raises(SiteError, match="this afmoe backbone has none"):
        ah.attach(build("afmoe", "AutoModelForCausalLM"), "bitfit")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bert", "BertModel"),
        ("funnel", "FunnelModel"),  # two classes
        ("pop2piano", "Pop2PianoForConditionalGeneration"),  # a class of a task only
        ("encoder-decoder", "EncoderDecoderModel"),
    ],
)
def test_the_base_model_of_a_type(model_type, name):
    model = every_type.build(
        model_type, every_type.autos(model_type, every_type.ADAPTED)[0], tiny=True
    )
    with torch.device("meta"):
        assert type(new_base_model(model.config)).__name__ == name


def test_a_base_model_with_a_module_for_its_layers_has_no_task_head():
    model = every_type.build("dinov3_vit", "AutoModel", tiny=True)
    assert model.base_model is not model
    anatomy = anatomy_of(model)
    assert anatomy.head() == {}
    assert any(path.startswith("embeddings.") for path in anatomy.parameters())


def test_a_configuration_that_no_auto_class_has_is_refused():
    with pytest.raises(ValueError, match="no auto class of transformers has a"):
        new_base_model(PreTrainedConfig())
