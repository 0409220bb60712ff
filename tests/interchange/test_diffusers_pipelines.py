"""LoRA files of the pipelines of diffusers that read some: equal outputs in both directions.

Only what the files are for is built: the transformer or the UNet of each pipeline.
"""

import inspect

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.interchange.pipeline_files import FILE
from tests.kit import tiny_models
from tests.kit.compare import difference
from tests.kit.pipelines import diffusers, model, output
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 5e-6
PIPELINES = (
    "AnimateDiff", "AuraFlow", "Chroma", "CogVideoX", "CogView4", "ErnieImage", "Flux2",
    "FluxControl", "HiDreamImage", "HunyuanVideo", "IF", "Ideogram4", "Kandinsky5T2V", "Krea2",
    "LTX2", "LTX", "Lumina2", "Mochi", "QwenImage", "Sana", "SanaVideo", "SkyReelsV2",
    "StableDiffusion3ControlNet", "StableDiffusionXLInpaint", "WanImageToVideo", "Wan", "WanVACE",
    "ZImage",
)  # fmt: skip
# Where the class of the denoiser is not all that there is to say of it.
DENOISERS = {
    "AnimateDiff": "UNetMotionModel",
    "WanImageToVideo": "WanTransformer3DModel, image",
    "Wan": "WanTransformer3DModel",
}
ALL = ["to_q", "to_out.0", "q_proj", "to_qkv_mlp_proj", "w1", "to_query", "net.2", "add_k_proj"]


# Of these, those whose kohya names diffusers converts when they are made of its own.
KOHYA = {"IF", "QwenImage", "StableDiffusionXLInpaint", "ZImage"}


def options_of(kind):
    """Return the class of a pipeline, and the options that it is made of."""
    cls = getattr(diffusers, f"{kind}Pipeline")
    return cls, inspect.signature(cls.__init__).parameters


def name_of(kind):
    """Return the name of the model that removes noise."""
    _, options = options_of(kind)
    return (
        DENOISERS.get(kind) or options.get("transformer", options.get("unet")).annotation.__name__
    )


def made(kind, name=None, **parts):
    """Return a pipeline of a class that has its denoiser, and nothing else."""
    cls, options = options_of(kind)
    required = [n for n, option in options.items() if option.default is option.empty]
    denoiser = "transformer" if "transformer" in options else "unet"
    given = {each: None for each in required if each not in ("self", "kwargs")}
    return cls(**{**given, denoiser: model(name or name_of(kind)), **parts})


def denoiser(pipe):
    return getattr(pipe, "transformer", None) or pipe.unet


def trained(pipe, **options):
    sites = ah.anatomy_of(pipe).sites.values()
    roles = sorted({site.role for site in sites if site.kind == "linear" and "." in site.role})
    adapter = ah.attach(pipe, "lora", rank=2, alpha=3, **({"sites": roles} | options))
    tiny_models.scramble_parameters(adapter)
    return adapter


@long_table("kind", PIPELINES, 6, nightly=2)
def test_files_of_ours_give_equal_outputs(kind, tmp_path):
    pipe, name = made(kind), name_of(kind)
    bare = output(denoiser(pipe), name)
    adapter = trained(pipe)
    expected = output(denoiser(pipe), name)
    assert difference(expected, bare) > 1e-4
    for style in ("diffusers", "kohya"):
        if style == "kohya" and kind not in KOHYA:
            with pytest.raises(MismatchError, match="would not read kohya's names"):
                adapter.export(tmp_path / style, format=style)
            assert not (tmp_path / style).exists()
            continue
        adapter.export(tmp_path / style, format=style)
        for load in (ah.load, type(pipe).load_lora_weights):
            other = made(kind)
            load(other, tmp_path / style)
            assert difference(output(denoiser(other), name), expected) <= TOLERANCE


@long_table("kind", PIPELINES, 6, nightly=2)
def test_a_file_of_diffusers_gives_equal_outputs(kind, tmp_path):
    theirs, name = made(kind), name_of(kind)
    part = "transformer" if hasattr(theirs, "transformer") else "unet"
    options = {"r": 2, "lora_alpha": 3, "target_modules": ALL}
    torch.manual_seed(2)
    denoiser(theirs).add_adapter(peft.LoraConfig(init_lora_weights=False, **options))
    type(theirs).save_lora_weights(
        tmp_path,
        **{
            f"{part}_lora_layers": peft.get_peft_model_state_dict(denoiser(theirs)),
            f"{part}_lora_adapter_metadata": options,
        },
    )
    expected = output(denoiser(theirs), name)
    here = made(kind)
    assert difference(output(denoiser(here), name), expected) > 1e-4
    ah.load(here, tmp_path)
    assert difference(output(denoiser(here), name), expected) <= TOLERANCE


def test_the_names_of_the_authors_of_wan(tmp_path):
    """Diffusers' own conversion reads them."""
    pipe = made("Wan")
    trained(pipe, sites=["attn.q", "cross.o"]).export(tmp_path / "ours", format="diffusers")
    state = load_file(tmp_path / "ours" / FILE)
    changes = {"transformer.": "diffusion_model.", "attn1": "self_attn", "attn2": "cross_attn",
               "to_q": "q", "to_out.0": "o"}  # fmt: skip
    renamed = {}
    for name, tensor in state.items():
        for old, new in changes.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    (tmp_path / "theirs").mkdir()
    save_file(renamed, tmp_path / "theirs" / "wan.safetensors")
    outputs = []
    for load in (ah.load, type(pipe).load_lora_weights):
        other = made("Wan")
        load(other, tmp_path / "theirs")
        outputs.append(output(other.transformer, "WanTransformer3DModel"))
    assert difference(*outputs) <= TOLERANCE
    assert difference(outputs[0], output(model("WanTransformer3DModel"), "WanTransformer3DModel"))


def test_both_transformers_of_wan_are_parts_and_files_have_one(tmp_path):
    """Diffusers would leave the tensors of the second one out of what it reads, silently."""

    def two():
        return made("Wan", transformer_2=model("WanTransformer3DModel", seed=1))

    def outputs(pipe):
        both = pipe.transformer, pipe.transformer_2
        return torch.cat([output(each, "WanTransformer3DModel") for each in both])

    pipe = two()
    adapter = trained(pipe, sites=["attn.q"])
    expected = outputs(pipe)
    assert {name.partition(".")[0] for name in adapter.tensors()} == {
        "transformer", "transformer_2",
    }  # fmt: skip
    with pytest.raises(MismatchError) as error:
        adapter.export(tmp_path / "both", format="diffusers")
    assert error.value.offenders == (
        "transformer_2: diffusers reads none from a LoRA file of a WanPipeline",
    )
    adapter.save(tmp_path / "a")
    other = two()
    ah.load(other, tmp_path / "a")
    assert difference(outputs(other), expected) <= TOLERANCE
    ah.detach(other)
    trained(other, sites=["transformer.*.to_q"]).export(tmp_path / "one", format="diffusers")
    theirs = two()
    theirs.load_lora_weights(tmp_path / "one")
    assert difference(outputs(theirs), outputs(other)) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "name", "part"),
    [
        ("PRX", "PRXTransformer2DModel", "transformer"),  # its class says: a unet
        ("TextToVideoSD", "UNet3DConditionModel", "unet"),  # which has no method for it
    ],
)
def test_parts_that_diffusers_does_not_read_are_refused(kind, name, part, tmp_path):
    pipe = made(kind, name)
    bare = output(denoiser(pipe), name)
    adapter = trained(pipe)
    expected = output(denoiser(pipe), name)
    assert difference(expected, bare) > 1e-4
    with pytest.raises(MismatchError, match=f"{part}: diffusers reads none"):
        adapter.export(tmp_path / "x", format="diffusers")
    assert not (tmp_path / "x").exists()
    adapter.save(tmp_path / "a")
    other = made(kind, name)
    ah.load(other, tmp_path / "a")
    assert difference(output(denoiser(other), name), expected) <= TOLERANCE


def test_a_file_of_which_diffusers_reads_nothing_is_refused(tmp_path):
    name = "transformer.single_transformer_blocks.0.attn.to_out.lora_down.weight"
    save_file({name: torch.randn(2, 64)}, tmp_path / FILE)
    pipe = made("Flux2")
    with pytest.raises(MismatchError, match="no tensors that diffusers reads for a Flux2Pipeline"):
        ah.load(pipe, tmp_path)
    assert ah.adapters(pipe) == {}
