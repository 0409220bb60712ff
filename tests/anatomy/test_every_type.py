"""Every model type of transformers: a method works, or is refused with an error of adapterhub.

By default a few types whose structure is irregular; all that can be built with
ADAPTERHUB_MATRIX=full.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace

import every_type
import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family, Stack, anatomy_of
from adapterhub.anatomy.build import build_anatomy
from adapterhub.errors import AdapterhubError, BackboneError, SiteError
from adapterhub.methods import METHODS

METHOD_NAMES = ("lora", "pfeiffer", "prefix", "prompt", "bitfit", "mam", "head")
# Why a type is here: what discovery or a method stumbled over.
SOME = (
    "afmoe",  # experts in all layers but one; names the mask in calls of the attention function
    "canine",  # no table of tokens
    "clip",  # two stacks of one kind
    "doge",  # a mask of another form
    "fsmt",  # stacks that are no models of transformers
    "gpt_oss",  # experts whose output is a tuple
    "ibert",  # projections whose output is a tuple
    "kimi_linear",  # attention of two kinds
    "layoutlm",  # each token has a box
    "nllb-moe",  # experts in some layers
    "qwen3_next",  # attention in some layers
    "switch_transformers",  # experts deep in a layer, in some layers
    "t5gemma",  # two configurations without a common size
    "wav2vec2",  # sound
    "xmod",  # adapters of its own in each layer
)  # fmt: skip
# Its head reshapes an output of its own, which keeps the virtual positions: torch raises.
NOT_REFUSED = {("prophetnet", "AutoModelForCausalLM"): ("prompt",)}
TYPES = every_type.TYPES if tiny_models.FULL_MATRIX else SOME
MODELS = [(t, a) for t in TYPES for a in every_type.autos(t)]
if not tiny_models.FULL_MATRIX:  # the class of the first task only
    MODELS = list({t: (t, a) for t, a in reversed(MODELS)}.values())[::-1]
every_class = pytest.mark.parametrize(("model_type", "auto"), MODELS)


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


@every_class
def test_a_method_works_or_is_refused_and_leaves_the_model_as_it_was(model_type, auto):
    model = build(model_type, auto)
    output = runs(model)  # BigBird replaces modules in its first forward pass
    before = structure(model)
    for method in set(METHOD_NAMES).difference(NOT_REFUSED.get((model_type, auto), ())):
        try:
            adapter = ah.attach(model, METHODS[method].example())
        except AdapterhubError:
            assert structure(model) == before, method
            continue
        roles = {(p.site.stack, p.site.role) for p in adapter.placed if p.site.layer is not None}
        ids = {placed.site.id for placed in adapter.placed}
        for stack, role in roles:
            depth = adapter.anatomy.depth(stack)
            assert {f"{stack}.{n}.{role}" for n in range(depth)} <= ids, (method, role)
        if output is not None:
            with contextlib.suppress(AdapterhubError):
                forward(model)
        adapter.detach()
        assert structure(model) == before, method
        if output is not None and not output.isnan().any():
            assert torch.equal(forward(model), output), method


@every_class
def test_a_printed_row_works(model_type, auto):
    """With what is unknown left out; with it left open, the row is refused."""
    model = build(model_type, auto)
    try:
        anatomy_of(model)
    except BackboneError as error:
        if "Family(" not in error.hint:
            return
        row = eval(error.hint.partition("\n")[2], {"Family": Family, "Stack": Stack})
    else:
        return
    stacks = tuple(
        replace(
            stack,
            sites={role: path for role, path in stack.sites.items() if path is not ...},
            fused=dict.fromkeys(stack.fused, "blocks"),
        )
        for stack in row.stacks
    )
    filled = replace(row, stacks=stacks, below=() if row.below is ... else row.below)
    sites = build_anatomy(model, filled).sites
    modules = dict(model.named_modules())
    assert all(modules[s.host] is not None and s.d_in > 0 and s.d_out > 0 for s in sites.values())
    assert any(site.role == "attn.q" for site in sites.values())
    if filled != row:
        with pytest.raises(BackboneError, match="is incomplete"):
            build_anatomy(model, row)


@pytest.mark.parametrize("model_type", ["afmoe", "nllb-moe", "switch_transformers"])
def test_experts_are_the_feed_forward_of_their_layers(model_type):
    model = build(model_type, every_type.autos(model_type)[0])
    anatomy = anatomy_of(model)
    layers = [(stack, n) for stack in anatomy.stacks for n in range(anatomy.depth(stack))]
    hosts = [model.get_submodule(anatomy.sites[f"{s}.{n}.ffn"].host) for s, n in layers]
    whole = [hasattr(host, "experts") for host in hosts]
    assert any(whole)
    assert whole == [f"{s}.{n}.ffn.up" not in anatomy.sites for s, n in layers]


def test_default_sites_that_some_layers_lack_are_refused_until_they_are_named():
    model = build("qwen3_next", "AutoModelForCausalLM")
    with pytest.raises(SiteError, match="not all layers have the sites of lora") as error:
        ah.attach(model, "lora")
    assert "decoder.attn.q: in 1 of 6 layers (3)" in error.value.offenders
    layers, sites = "layers=[3]", "sites=['decoder.attn.q', 'decoder.attn.v']"
    assert f"{layers}, or {sites}" in error.value.expected
    for method in (f"lora({layers})", f"lora({sites})"):
        adapter = ah.attach(model, method)
        assert {placed.site.layer for placed in adapter.placed} == {3}
        adapter.detach()
    assert ah.attach(model, "pfeiffer").placed


def test_the_problem_of_an_irregular_architecture_is_named():
    expected = {
        "xmod": "which projection ends ffn in a layer of encoder.layer: ",
        "kimi_linear": "whether self_attn.q_proj is attn.q in every layer of layers that has it",
        "clip": "found 2 lists of equal layers with attention: ",
        "ibert": "found 0 lists of equal layers with attention: ",
    }
    for model_type, problem in expected.items():
        with pytest.raises(BackboneError) as error:
            anatomy_of(every_type.build(model_type, every_type.autos(model_type)[0]))
        assert any(problem in offender for offender in error.value.offenders), model_type
    assert not FAMILIES.keys() & expected.keys()


def test_a_recurrence_next_to_attention_is_no_fused_projection():
    sites = anatomy_of(every_type.build("falcon_h1", "AutoModelForCausalLM")).sites
    assert {s.host for s in sites.values() if s.layer == 0 and s.role.startswith("attn.")} == {
        "model.layers.0.input_layernorm", "model.layers.0.self_attn",
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
    }  # fmt: skip


def test_biases_that_select_experts_are_no_bias_terms():
    with pytest.raises(SiteError, match="this afmoe backbone has none"):
        ah.attach(build("afmoe", "AutoModelForCausalLM"), "bitfit")
