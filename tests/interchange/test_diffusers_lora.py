"""Adapters of pipelines: pictures, and files of diffusers and kohya in both directions."""

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.anatomy.backbone import parts_of
from adapterhub.errors import AttachError, ConfigError, FileError, MismatchError
from adapterhub.interchange.diffusers_lora import STYLES, _as_kohya
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.pipeline_files import FILE, is_diffusers
from tests.kit import tiny_models
from tests.kit.compare import difference
from tests.kit.pipelines import diffusers, picture, pipeline
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore")
ALMOST = 5e-6
CONV = "lora(sites=['unet.*.to_q', 'unet.*.to_out.0', 'unet.*.conv1'], rank=2)"
SEVERAL = [
    {"lora": {"sites": ["unet.*.to_q"], "rank": 2, "alpha": 1}},
    {"lora": {"sites": ["unet.*.to_v", "unet.conv_out"], "rank": 4, "alpha": 6}},
]


def trained(pipe, spec, name="style"):
    adapter = ah.attach(pipe, spec, name=name)
    tiny_models.scramble_parameters(adapter, std=0.4)
    return adapter


def test_a_pipeline_stays_the_users_own_and_its_picture_comes_back(tmp_path):
    pipe = pipeline()
    bare, attributes = picture(pipe), set(vars(pipe))
    adapter = trained(pipe, CONV)
    assert set(vars(pipe)) == attributes
    assert "StableDiffusionPipeline" in repr(adapter)
    styled = picture(pipe)
    assert difference(styled, bare) > 0.01
    trained(pipe, "lora(sites=['unet.*.to_k'])", name="other")
    ah.activate(pipe, ah.Average(["style", "other"], [0.5, 0.5]))
    assert difference(picture(pipe), styled) > 0.001
    with ah.disabled(pipe):
        assert difference(picture(pipe), bare) <= ALMOST
    ah.activate(pipe, "style")
    ah.detach(pipe, "other")
    adapter.save(tmp_path / "style")
    for part in (pipe, pipe.unet, pipe.text_encoder):
        with pytest.raises(AttachError, match="save_pretrained would write tensors of adapters"):
            part.save_pretrained(tmp_path / "pipe")
    ah.merge(pipe)
    pipe.unet.save_pretrained(tmp_path / "merged")
    assert difference(picture(pipe), styled) <= ALMOST
    ah.unmerge(pipe)
    ah.detach(pipe)
    assert torch.equal(picture(pipe), bare)
    assert set(vars(pipe)) == attributes
    assert not {"save_pretrained", "_apply"} & {*vars(pipe.unet), *vars(pipe.text_encoder)}
    other = pipeline()
    ah.load(other, tmp_path / "style")
    assert difference(picture(other), styled) <= ALMOST
    with pytest.raises(MismatchError, match="different backbone"):
        ah.load(pipeline(seed=1), tmp_path / "style")


SD, SD3 = "StableDiffusionPipeline", "StableDiffusion3Pipeline"
XL, FLUX = "StableDiffusionXLPipeline", "FluxPipeline"


# What is at the blocks of each class, and the names there that a kohya file of Flux can have.
BLOCKS = "lora(sites=['attn.*', '*.attn*.*_*', '*.proj_out', 'ffn.*'], rank=2, alpha=3)"
IN_KOHYA = (
    "lora(sites=['transformer.transformer_blocks.*.to_q', 'added.*', '*.ff.net.*',"
    "'*.norm1_context.linear', '*.norm.linear', 'text_encoder.*_proj', 'text_encoder.*.fc2'],"
    "rank=2, alpha=3)"
)


# test_kohya_lora.py compares the weights of SD and XL.
FILES = [
    *((SD, SEVERAL, style) for style in STYLES),
    *((kind, BLOCKS, "diffusers") for kind in (XL, SD3, FLUX)),
    (FLUX, IN_KOHYA, "kohya"),
]


@long_table(("kind", "spec", "style"), FILES, 3)
def test_files_give_equal_pictures_in_diffusers_and_here(kind, spec, style, tmp_path):
    pipe = pipeline(kind=kind)
    bare = picture(pipe)
    adapter = trained(pipe, spec)
    if spec == BLOCKS:  # it is in all parts
        assert {name.partition(".")[0] for name in adapter.tensors()} == {
            *ah.anatomy_of(pipe).model
        }
    styled = picture(pipe)
    assert difference(styled, bare) > 0.001
    adapter.export(tmp_path / "file", format=style)
    assert is_diffusers(tmp_path / "file")
    for load in (ah.load, type(pipe).load_lora_weights):
        other = pipeline(kind=kind)
        load(other, tmp_path / "file")
        assert difference(picture(other), styled) <= ALMOST
    names = load_file(tmp_path / "file" / FILE)
    if style == "kohya" and kind != SD:
        assert any(name.startswith("lora_te1_text_model_encoder_layers_0_") for name in names)
    if style == "kohya" and kind == FLUX:
        low = names["lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight"]
        assert len(low) == 3 * 2  # of all three, in blocks


def test_single_blocks_of_a_flux_have_the_sizes_of_the_published_one():
    """Diffusers' conversion has them in its code; the tensors come back, no model is needed."""
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(num_layers=0, num_single_layers=1)
    pipe = pipeline(kind="FluxPipeline")
    pipe.transformer = transformer
    block = "transformer.single_transformer_blocks.0"
    tensors = {}
    for name in ("attn.to_q", "attn.to_v", "proj_mlp"):
        module = pipe.transformer.get_submodule(f"single_transformer_blocks.0.{name}")
        tensors[f"{block}.{name}.lora_A.weight"] = torch.randn(2, module.in_features)
        tensors[f"{block}.{name}.lora_B.weight"] = torch.randn(module.out_features, 2)
    config = {"r": 2, "lora_alpha": 2, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    written, _ = _as_kohya(PeftFiles("LORA", config, tensors), parts_of(pipe))
    assert sorted({name.partition(".")[0] for name in written}) == [
        "lora_unet_single_blocks_0_linear1"
    ]
    back = diffusers.FluxPipeline.lora_state_dict(dict(written))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert not back[f"{block}.attn.to_k.lora_B.weight"].any()


UNREAD = [
    (SD3, "lora", "kohya", "would not read kohya's names"),
    (FLUX, "lora(sites=['*.x_embedder'])", "kohya", "x_embedder"),
    (FLUX, "lora(sites=['*.proj_mlp'])", "kohya", "would not read kohya's names"),
    ("PixArtAlphaPipeline", "lora", "diffusers", "no LoRA files for a PixArtAlphaPipeline"),
    ("DiTPipeline", "lora", "kohya", "no LoRA files for a DiTPipeline"),
    (SD, "loha(sites=['unet.*.to_q'])", "diffusers", "LOHA"),
    (SD, "dora(sites=['text_encoder.*.q_proj'])", "diffusers", "magnitudes of DoRA out at text"),
    (SD, "lokr(sites=['unet.*.to_q'], rank=2)", "kohya", "LOKR: "),
    (SD, "loha(sites=['unet.*.to_q'], rank=2)", "kohya", "adapterhub convert ADAPTER"),
]


@long_table(("kind", "spec", "style", "problem"), UNREAD, 1)
def test_what_diffusers_would_not_read_is_not_written(kind, spec, style, problem, tmp_path):
    adapter = ah.attach(pipeline(kind=kind), spec)
    with pytest.raises(MismatchError) as error:
        adapter.export(tmp_path / "x", format=style)
    assert problem in str(error.value)
    assert not (tmp_path / "x").exists()


UNET = {"r": 2, "lora_alpha": 3, "rank_pattern": {"conv1": 4}, "alpha_pattern": {"proj_in": 8},
        "target_modules": ["to_q", "conv1", "proj_in"]}  # fmt: skip
BLOCK = {"r": 2, "target_modules": ["to_q", "add_k_proj", "to_add_out", "net.2", "proj_mlp"]}
ENCODER = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "fc2"]}


@pytest.mark.parametrize(
    ("kind", "part", "options", "with_metadata"),
    [(SD, "unet", UNET, True), *((kind, "transformer", BLOCK | {"lora_alpha": alpha}, alpha == 3)
                                 for kind in (SD3, FLUX) for alpha in (2, 3))],
)  # fmt: skip
def test_files_that_diffusers_wrote(kind, part, options, with_metadata, tmp_path):
    theirs = pipeline(kind=kind)
    torch.manual_seed(2)
    written = {}
    for name, own in ((part, options), ("text_encoder", ENCODER)):
        module = getattr(theirs, name)
        module.add_adapter(peft.LoraConfig(init_lora_weights=False, **own))
        written[f"{name}_lora_layers"] = peft.get_peft_model_state_dict(module)
        if with_metadata:
            written[f"{name}_lora_adapter_metadata"] = own
    type(theirs).save_lora_weights(tmp_path, **written)
    expected = picture(theirs)
    here = pipeline(kind=kind)
    assert difference(picture(here), expected) > 0.001
    ah.load(here, tmp_path)
    assert difference(picture(here), expected) <= ALMOST


METADATA = {
    '{"unet.alpha_pattern": {"(a+)+b": 1}, "unet.lora_alpha": 2}': None,
    '{"unet.alpha_pattern": {"(": 1}, "unet.lora_alpha": 2}': "not a regular expression",
    '{"unet.alpha_pattern": [1]}': "alpha_pattern",
    '{"unet.lora_alpha": "much"}': "lora_alpha",
    '{"unet.use_qalora": true}': "use_qalora",
    '["unet"]': "cannot be used",
    "{": "cannot be used",
}


def test_alphas_and_embedders_in_files_of_a_flux(tmp_path):
    """Alphas beside diffusers' names; names without a part; those whose alpha would be lost."""
    transformer = "transformer.transformer_blocks.0.attn.to_q"
    torch.manual_seed(0)
    state = {
        f"{transformer}.lora_A.weight": torch.randn(2, 16),
        f"{transformer}.lora_B.weight": torch.randn(16, 2),
        f"{transformer}.alpha": torch.tensor(1.0),
    }
    save_file(state, tmp_path / FILE)
    pictures = []
    for load in (ah.load, diffusers.FluxPipeline.load_lora_weights):
        pipe = pipeline(kind="FluxPipeline")
        load(pipe, tmp_path)
        pictures.append(picture(pipe))
    assert difference(*pictures) <= ALMOST
    last = "lora_unet_final_layer_linear"
    state = {
        "lora_unet_img_in.lora_down.weight": torch.randn(2, 4),
        "lora_unet_img_in.lora_up.weight": torch.randn(16, 2),
        "lora_unet_img_in.alpha": torch.tensor(4.0),
        f"{last}.lora_down.weight": torch.randn(2, 16),
        f"{last}.lora_up.weight": torch.randn(4, 2),
        f"{last}.alpha": torch.tensor(2.0),
    }
    save_file(state, tmp_path / FILE)
    pipe = pipeline(kind="FluxPipeline")
    adapter = ah.load(pipe, tmp_path)
    assert [placed.site.id for placed in adapter.placed] == [
        "transformer.x_embedder", "transformer.proj_out",
    ]  # fmt: skip
    ah.detach(pipe)
    save_file(state | {f"{last}.alpha": torch.tensor(1.0)}, tmp_path / FILE)
    with pytest.raises(MismatchError, match="alphas that the conversion of diffusers loses"):
        ah.load(pipe, tmp_path)


def test_what_does_not_fit_is_refused(tmp_path):
    pipe = pipeline()
    adapter = ah.attach(pipe, CONV)
    with pytest.raises(ConfigError, match="cannot be exported to 'webui'"):
        adapter.export(tmp_path / "x", format="webui")
    adapter.export(tmp_path / "file", format="diffusers")
    with pytest.raises(MismatchError, match="a LoRA of a pipeline"):
        ah.load(pipe.unet.__class__.from_config(pipe.unet.config), tmp_path / "file")
    with pytest.raises(AttachError, match="shares modules"):
        ah.attach(pipe.unet, "lora")


@pytest.fixture
def file(tmp_path):
    """A pipeline, a file of an adapter of it, and the tensors in the file."""
    pipe = pipeline()
    ah.attach(pipe, CONV).export(tmp_path, format="diffusers")
    ah.detach(pipe)
    return pipe, tmp_path / FILE, load_file(tmp_path / FILE)


@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_of_strangers(file, metadata):
    """An expression may take exponential time, and is given some."""
    pipe, path, state = file
    save_file(state, path, {"lora_adapter_metadata": metadata})
    if METADATA[metadata] is None:
        ah.load(pipe, path.parent)
        return
    with pytest.raises(FileError) as error:
        ah.load(pipe, path.parent)
    assert METADATA[metadata] in str(error.value)
    assert ah.adapters(pipe) == {}


def test_tensors_of_strangers(file):
    pipe, path, state = file
    name = next(name for name in state if name.endswith("lora_A.weight"))
    scripts = "lora_unet_transformer_blocks_0_attn_to_q"
    low, high = torch.randn(2, 16), torch.randn(16, 2)
    of_scripts = {f"{scripts}.lora_down.weight": low, f"{scripts}.lora_up.weight": high}
    for tensors, kind, problem in (
        (state | {name: torch.full_like(state[name], torch.nan)}, SD, "NaN"),
        (state | {name: torch.ones(1)}, SD, ""),
        (
            {f"transformer.{n}": t for n, t in state.items()},
            SD,
            "parts that this pipeline does not",
        ),
        ({"lora_unet_nothing.lora_down.weight": torch.ones(2, 2)}, SD, "nothing"),
        (of_scripts, SD3, "does not convert for a StableDiffusion3Pipeline"),
        (of_scripts, "DiTPipeline", "has no LoRA files of a DiTPipeline"),
    ):
        save_file(tensors, path)
        other = pipe if kind == SD else pipeline(kind=kind)
        with pytest.raises((FileError, MismatchError), match=problem):
            ah.load(other, path.parent)
        assert ah.adapters(other) == {}
    for write in (lambda out: out.write(b"\x80\x04K\x01."), lambda out: out.truncate(1 << 34)):
        with open(path, "wb") as out:  # a pickle, and a sparse file
            write(out)
        with pytest.raises(FileError):
            ah.load(pipe, path.parent)
