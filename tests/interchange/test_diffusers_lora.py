"""Adapters of pipelines: pictures, and files of diffusers and kohya in both directions."""

from __future__ import annotations

import peft
import pytest
import torch
from pipelines import diffusers, picture, pipeline
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import AttachError, ConfigError, FileError, MismatchError
from adapterhub.interchange.diffusers_lora import STYLES
from adapterhub.interchange.pipeline_files import FILE, is_diffusers

pytestmark = pytest.mark.filterwarnings("ignore")
ALMOST = 5e-6
CONV = "lora(sites=['unet.*.to_q', 'unet.*.to_out.0', 'unet.*.conv1'], rank=2)"
TEXT = "lora(sites=['unet.*.to_k', 'text_encoder.*_proj'], rank=3, alpha=6)"
SEVERAL = [
    {"lora": {"sites": ["unet.*.to_q"], "rank": 2, "alpha": 1}},
    {"lora": {"sites": ["unet.*.to_v", "unet.conv_out"], "rank": 4, "alpha": 6}},
]


def difference(one, other) -> float:
    return float((one - other).abs().max())


def trained(pipe, spec, name="style"):
    adapter = ah.attach(pipe, spec, name=name)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=numbers) * 0.4)
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


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("spec", [CONV, TEXT, SEVERAL], ids=["conv", "text", "several"])
def test_files_give_equal_pictures_in_diffusers_and_here(spec, style, tmp_path):
    pipe = pipeline()
    adapter = trained(pipe, spec)
    styled = picture(pipe)
    adapter.export(tmp_path / "file", format=style)
    assert is_diffusers(tmp_path / "file")
    here = pipeline()
    ah.load(here, tmp_path / "file")
    assert difference(picture(here), styled) <= ALMOST
    theirs = pipeline()
    theirs.load_lora_weights(tmp_path / "file")
    assert difference(picture(theirs), styled) <= ALMOST


def test_a_file_of_diffusers_with_its_metadata(tmp_path):
    theirs = pipeline()
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["to_q", "conv1", "proj_in"], init_lora_weights=False,
        rank_pattern={"conv1": 4}, alpha_pattern={"proj_in": 8},
    )  # fmt: skip
    torch.manual_seed(2)
    theirs.unet.add_adapter(config)
    state = peft.get_peft_model_state_dict(theirs.unet)
    known = {n: v for n, v in config.to_dict().items() if n in ("r", "lora_alpha")}
    known |= {"rank_pattern": {"conv1": 4}, "alpha_pattern": {"proj_in": 8}}
    known |= {"target_modules": ["to_q", "conv1", "proj_in"]}
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path, unet_lora_layers=state, unet_lora_adapter_metadata=known
    )
    expected = picture(theirs)
    here = pipeline()
    assert difference(picture(here), expected) > 0.01
    ah.load(here, tmp_path)
    assert difference(picture(here), expected) <= ALMOST


def test_what_does_not_fit_is_refused(tmp_path):
    pipe = pipeline()
    for spec, problem in (
        ("loha(sites=['unet.*.to_q'])", "LOHA"),
        ("dora(sites=['unet.*.to_q'])", "contain LoRAs"),
    ):
        with pytest.raises(MismatchError) as error:
            ah.attach(pipe, spec).export(tmp_path / "x", format="diffusers")
        assert problem in str(error.value)
        ah.detach(pipe)
    adapter = ah.attach(pipe, CONV)
    with pytest.raises(ConfigError, match="cannot be exported to 'webui'"):
        adapter.export(tmp_path / "x", format="webui")
    adapter.export(tmp_path / "file", format="diffusers")
    with pytest.raises(MismatchError, match="a LoRA of a pipeline"):
        ah.load(pipe.unet.__class__.from_config(pipe.unet.config), tmp_path / "file")
    state = load_file(tmp_path / "file" / FILE)
    save_file({f"transformer.{n}": t for n, t in state.items()}, tmp_path / "file" / FILE)
    ah.detach(pipe)
    with pytest.raises(MismatchError, match="parts that this pipeline does not have"):
        ah.load(pipe, tmp_path / "file")
    ah.attach(pipe, CONV)
    with pytest.raises(AttachError, match="shares modules"):
        ah.attach(pipe.unet, "lora")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ('{"unet.alpha_pattern": {"(a+)+b": 1}, "unet.lora_alpha": 2}', None),
        ('{"unet.alpha_pattern": {"(": 1}, "unet.lora_alpha": 2}', "not a regular expression"),
        ('{"unet.alpha_pattern": [1]}', "alpha_pattern"),
        ('{"unet.lora_alpha": "much"}', "lora_alpha"),
        ('{"unet.use_qalora": true}', "use_qalora"),
        ('["unet"]', "cannot be used"),
        ("{", "cannot be used"),
    ],
)
def test_metadata_of_strangers(metadata, problem, tmp_path):
    """An expression may take exponential time, and is given some."""
    pipe = pipeline()
    ah.attach(pipe, CONV).export(tmp_path / "a", format="diffusers")
    ah.detach(pipe)
    state = load_file(tmp_path / "a" / FILE)
    save_file(state, tmp_path / "a" / FILE, {"lora_adapter_metadata": metadata})
    if problem is None:
        ah.load(pipe, tmp_path / "a")
        return
    with pytest.raises(FileError) as error:
        ah.load(pipe, tmp_path / "a")
    assert problem in str(error.value)
    assert ah.adapters(pipe) == {}


def test_tensors_of_strangers(tmp_path):
    pipe = pipeline()
    ah.attach(pipe, CONV).export(tmp_path / "a", format="kohya")
    ah.detach(pipe)
    file = tmp_path / "a" / FILE
    state = load_file(file)
    name = next(name for name in state if name.endswith("lora_down.weight"))
    for change in (
        {name: torch.full_like(state[name], torch.nan)},
        {"lora_unet_nothing.lora_down.weight": torch.ones(2, 2)},
        {name: torch.ones(1)},
    ):
        save_file(state | change, file)
        with pytest.raises((FileError, MismatchError)):
            ah.load(pipe, tmp_path / "a")
        assert ah.adapters(pipe) == {}
    file.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(FileError):
        ah.load(pipe, tmp_path / "a")
    with open(file, "wb") as sparse:
        sparse.truncate(1 << 34)
    with pytest.raises(FileError):
        ah.load(pipe, tmp_path / "a")
