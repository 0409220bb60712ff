"""Adapters of each class of pipelines of diffusers: UNets, and transformers of several kinds."""

from __future__ import annotations

import copy

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import loadable_in
from adapterhub.errors import AttachError, MismatchError, SiteError
from tests.kit.compare import difference
from tests.kit.pipelines import KINDS, diffusers, picture, pipeline
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_life
from tests.kit.tiny_models import scramble_parameters

pytestmark = pytest.mark.filterwarnings("ignore")
ALMOST = 5e-6
# Of each class, roles that its attention and networks must have.
ROLES = {
    "StableDiffusionPipeline": {"attn.q", "cross.k", "ffn.up"},
    "StableDiffusionXLPipeline": {"attn.q", "cross.k", "ffn.up"},
    "StableDiffusion3Pipeline": {"attn.q", "added.q", "added.o", "ffn.up"},
    "FluxPipeline": {"attn.q", "added.q", "added.o", "ffn.up"},
    "PixArtAlphaPipeline": {"attn.q", "cross.k", "ffn.down"},
    "DiTPipeline": {"attn.q", "ffn.up"},
}
SPECS = (
    "lora(sites=['attn.*', '*.proj_out*', 'ffn.*', '*embed*.linear_1'])",
    "dora(sites=['attn.q', 'ffn.up'])",
    "loha(sites=['attn.*', 'ffn.*'])",
    "houlsby(size=4)",
    "ia3",
)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_networks_have_their_roles(kind):
    sites = ah.anatomy_of(pipeline(kind=kind)).sites
    roles = {site.role for site in sites.values()}
    assert roles >= ROLES[kind]
    assert not roles & {"to_q", "to_k", "to_v", "to_add_out", "add_q_proj", "net"}
    if kind == "FluxPipeline":
        block = "transformer.single_transformer_blocks.1"
        assert sites[f"{block}.proj_mlp"].role == "ffn.up"
        assert sites[f"{block}.proj_out"].role == "ffn.down"
        assert (sites[block].role, sites[block].layer) == ("ffn", 1)
        assert sites["transformer.transformer_blocks.0.ff_context"].role == "ffn"


@pytest.mark.parametrize("kind", KINDS)
@long_table("spec", SPECS, 4)
def test_the_life_of_an_adapter_of_a_pipeline(kind, spec, tmp_path):
    pipe, sequential = pipeline(kind=kind), "houlsby" in spec
    adapter = check_life(
        pipe, picture, spec, tmp_path / "a", again=lambda: pipeline(kind=kind), loaded=ALMOST,
        start=1e-3 if sequential else 1e-5, merged=None if sequential else 2e-5,
    )  # fmt: skip
    parts = {name.partition(".")[0] for name in adapter.tensors()}
    assert parts >= {"unet" if hasattr(pipe, "unet") else "transformer"}
    assert ("text_encoder" in parts) == (kind != "DiTPipeline")
    with pytest.raises(MismatchError, match="different backbone"):
        ah.load(pipeline(seed=1, kind=kind), tmp_path / "a")


def test_a_copy_has_adapters_of_its_own():
    pipe = pipeline()
    bare = picture(pipe)
    scramble_parameters(
        ah.attach(pipe, "lora(sites=['*.to_q', 'text_encoder.*.q_proj'])", name="a")
    )
    styled = picture(pipe)
    other = copy.deepcopy(pipe)
    assert [*ah.adapters(other)] == ["a"]
    assert ah.adapters(other)["a"] is not ah.adapters(pipe)["a"]
    ah.detach(other)
    assert torch.equal(picture(other), bare)
    assert torch.equal(picture(pipe), styled)
    again = type(pipe)(**pipe.components, requires_safety_checker=False)  # of the same parts
    assert ah.adapters(again) == ah.adapters(pipe)
    ah.detach(again)
    assert torch.equal(picture(pipe), bare)


@pytest.mark.parametrize(
    ("kind", "modules", "parts"),
    [
        ("KandinskyV22PriorPipeline", "prior image_encoder text_encoder", "prior text_encoder"),
        ("StableCascadeDecoderPipeline", "decoder text_encoder vqgan", "decoder text_encoder"),
        ("WanPipeline", "text_encoder vae transformer transformer_2", "transformer transformer_2"),
        ("StableUnCLIPPipeline", "prior text_encoder unet vae", "unet text_encoder"),
        ("PRXPipeline", "transformer text_encoder vae", "unet text_encoder transformer"),
    ],
)
def test_the_parts_are_what_its_class_names_or_what_removes_noise(kind, modules, parts):
    """That of PRX names a UNet, which it does not have."""
    found = loadable_in(getattr(diffusers, kind), modules.split())
    assert found == tuple(parts.split())


def test_other_modules_of_a_pipeline_have_adapters_of_their_own(tmp_path):
    """A T5 and a VAE are no parts: not adapted by default, and exchanged without a refusal."""
    pipe, other = pipeline(kind="FluxPipeline"), pipeline(kind="FluxPipeline")
    bare = picture(pipe)
    with pytest.raises(SiteError) as error:
        ah.attach(pipe, "lora(sites=['text_encoder_2.*.q'])")
    assert error.value.offenders == (
        "'text_encoder_2.*.q'; text_encoder_2 is not part of a FluxPipeline: "
        "ah.attach(pipe.text_encoder_2, ...)",
    )
    pictures = []
    for name in (None, "text_encoder_2", "vae"):
        scramble_parameters(ah.attach(getattr(pipe, name) if name else pipe, "lora", name="a"))
        pictures.append(picture(pipe))
    assert min(difference(*pair) for pair in zip(pictures, [bare, *pictures], strict=False)) > 1e-4
    for name in (None, "text_encoder_2", "vae"):
        here, there = ((getattr(p, name) if name else p) for p in (pipe, other))
        ah.adapters(here)["a"].save(tmp_path / str(name))
        ah.load(there, tmp_path / str(name))
        ah.detach(here)
    assert difference(picture(other), pictures[-1]) <= ALMOST
    assert torch.equal(picture(pipe), bare)
    pipe.vae = pipeline(seed=1, kind="FluxPipeline").vae
    ah.load(pipe, tmp_path / "None")


# Where a pipeline has torch.compile(part), and where the part is compiled in place.
COMPILED = {
    "another module": lambda pipe: setattr(
        pipe, "transformer", torch.compile(pipe.transformer, backend="eager")
    ),
    "in place": lambda pipe: pipe.transformer.compile(backend="eager"),
}
SWAPS = {
    "an average": lambda pipe: ah.activate(pipe, ah.Average(["a", "b"], [0.7, 0.3])),
    "one is left": lambda pipe: (ah.activate(pipe, "a"), ah.detach(pipe, "b")),
    "merged": ah.merge,
    "unmerged": ah.unmerge,
    "detached": ah.detach,
}


@long_table("way", COMPILED)
def test_a_compiled_part_follows_every_swap(way):
    """And takes no new adapter: torch would not see its hooks."""
    torch._dynamo.reset()
    pipes = []
    for _ in range(2):
        pipes.append(pipe := pipeline(kind="DiTPipeline"))
        scramble_parameters(ah.attach(pipe, "lora(sites=['attn.*'])", name="a"))
        scramble_parameters(ah.attach(pipe, "lora(sites=['attn.q', 'ffn.up'])", name="b"), seed=2)
    compiled, plain = pipes
    COMPILED[way](compiled)
    assert difference(picture(compiled), picture(plain)) <= ALMOST
    for name, swap in SWAPS.items():
        for pipe in pipes:
            swap(pipe)
        assert difference(picture(compiled), picture(plain)) <= ALMOST, name
    with pytest.raises(AttachError, match="compiled") as error:
        ah.attach(compiled, "lora")
    torch._dynamo.reset()
    if way == "in place":
        return
    assert "pipe.transformer = pipe.transformer._orig_mod; attach; " in error.value.hint
    compiled.transformer = compiled.transformer._orig_mod
    for pipe in pipes:
        torch.manual_seed(0)
        scramble_parameters(ah.attach(pipe, "lora(sites=['ffn.down'])"))
    COMPILED[way](compiled)
    assert difference(picture(compiled), picture(plain)) <= ALMOST
    torch._dynamo.reset()
