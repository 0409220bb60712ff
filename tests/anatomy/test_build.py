"""A row applied to a model: hosts, alternative paths, the residual stream, sizes."""

from __future__ import annotations

import dataclasses

import every_type
import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.build import build_anatomy
from adapterhub.errors import BackboneError
from tests.kit import tiny_models
from tests.kit.selection import long_table


def test_the_first_existing_alternative_path_is_used():
    """T5's row has `wi` for the plain network and `wi_1` for the gated one."""
    for architecture, name in (("t5", "wi"), ("mt5", "wi_1")):
        sites = ah.anatomy_of(tiny_models.usual_model(architecture)).sites
        assert sites["encoder.0.ffn.up"].host.endswith(f"DenseReluDense.{name}")
        assert ("encoder.0.ffn.gate" in sites) == (architecture == "mt5")


def test_a_decoder_without_an_encoder_has_no_cross_attention_and_no_other_stack():
    """Its layers have the modules of cross-attention, and never run them."""
    anatomy = ah.anatomy_of(tiny_models.model("bart", "causal-lm", is_encoder_decoder=False))
    assert (set(anatomy.stacks), len(anatomy.family.stacks)) == ({"decoder"}, 2)
    assert "decoder.0.attn.q" in anatomy.sites
    assert not [name for name in anatomy.sites if ".cross" in name]


def test_layers_after_the_first_use_its_relative_positions():
    sites = ah.anatomy_of(tiny_models.usual_model("t5")).sites
    first = "encoder.block.0.layer.0.SelfAttention"
    assert sites["encoder.0.attn.kv"].bias.endswith(first)
    assert sites["encoder.1.attn.kv"].bias == sites["encoder.0.attn.kv"].bias
    assert sites["decoder.0.cross.kv"].bias is None


def test_a_row_that_does_not_fit_is_refused():
    stack = dataclasses.replace(FAMILIES["bert"].stacks[0], layers="nowhere.layer")
    row = dataclasses.replace(FAMILIES["bert"], stacks=(stack,))
    with pytest.raises(BackboneError, match=r"bert row .* does not fit") as error:
        build_anatomy(tiny_models.usual_model("bert"), row)
    assert "nowhere.layer" in error.value.expected


# A config option decides in BLOOM; in GPT-J one norm serves two sublayers.
UNKNOWN = {("bloom", "attn"), ("bloom", "ffn"), ("gptj", "ffn"), ("xlnet", "attn")}
PARALLEL = {"gpt_neox": {"use_parallel_residual": False}, "falcon": {"parallel_attn": False}}


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
        architecture, **tiny_models.NO_DROPOUT, **PARALLEL.get(architecture, {})
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
            torch.testing.assert_close(total, inputs[norm], atol=1e-5, rtol=1e-5)
            total = outputs[norm]
        if following and (following.stack, following.layer) == (site.stack, site.layer):
            residual = inputs[following.stream.input_host or following.host]
            torch.testing.assert_close(total, residual.view_as(total), atol=1e-5, rtol=1e-5)


def test_a_config_option_of_opt_moves_its_norms():
    pre, post = (
        ah.anatomy_of(tiny_models.usual_model("opt", do_layer_norm_before=flag)).sites[
            "decoder.0.ffn"
        ]
        for flag in (True, False)
    )
    assert pre.stream.norm is None
    assert post.stream.norm.endswith("final_layer_norm")


def test_a_mixer_has_the_hidden_size_though_attention_reads_more():
    """The attention of Zamba 2 reads the embeddings too, and is twice as wide."""
    auto = every_type.autos("zamba2", every_type.ADAPTED)[0]
    sites = ah.anatomy_of(every_type.build("zamba2", auto, tiny=True)).sites
    mixers = [site for site in sites.values() if site.role == "mixer"]
    assert len(mixers) == 6
    assert {(site.d_in, site.d_out) for site in mixers} == {(32, 32)}
    assert {site.d_in for site in sites.values() if site.role == "attn.q"} == {64}
