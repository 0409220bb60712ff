"""The residual stream that the rows describe matches what the model computes."""

from __future__ import annotations

import torch

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from tests.kit import tiny_models
from tests.kit.selection import long_table

# A config option decides in BLOOM; in GPT-J one norm serves two sublayers.
UNKNOWN = {("bloom", "attn"), ("bloom", "ffn"), ("gptj", "ffn"), ("xlnet", "attn")}
PARALLEL = {"gpt_neox": {"use_parallel_residual": False}, "falcon": {"parallel_attn": False}}
POST = ("bert", "roberta", "distilbert", "albert", "electra", "bart", "plbart", "openai-gpt")
PRE = ("gpt2", "llama", "t5", "mbart", "m2m_100", "pegasus", "modernbert", "olmo2")


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


def test_pre_norm_and_post_norm_differ():
    for architectures, post in ((POST, True), (PRE, False)):
        for architecture in architectures:
            assert architecture in FAMILIES
            anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
            streams = {site.stream for site in anatomy.sites.values() if site.kind == "sublayer"}
            assert all((stream.norm is not None) == post for stream in streams)


def test_a_config_option_of_opt_moves_its_norms():
    pre, post = (
        ah.anatomy_of(tiny_models.usual_model("opt", do_layer_norm_before=flag)).sites[
            "decoder.0.ffn"
        ]
        for flag in (True, False)
    )
    assert pre.stream.norm is None
    assert post.stream.norm.endswith("final_layer_norm")
