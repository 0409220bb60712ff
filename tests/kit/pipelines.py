"""Pipelines of diffusers with random numbers, of the size of a stamp."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

diffusers = pytest.importorskip("diffusers")

IDS = torch.tensor([[0, 5, 9, 3, 1, 1]])
WIDTH = 16  # of the text encoders


def pipeline(seed: int = 0, kind: str = "StableDiffusionPipeline") -> Any:
    """Return a small pipeline of a class; the same numbers for the same seed."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = KINDS[kind]()
    made.set_progress_bar_config(disable=True)
    return made


def picture(pipe: Any) -> Tensor:
    """Return a picture of 8 x 8 pixels, for one prompt and one seed."""
    kind, options = type(pipe).__name__, {}
    with torch.no_grad():
        if kind == "DiTPipeline":
            options = {"class_labels": [1]}
        elif kind == "PixArtAlphaPipeline":
            options = _embedded(pipe.text_encoder(IDS)[0], negative=True)
            mask = torch.ones_like(IDS)
            options |= {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
            options |= {"negative_prompt": None, "use_resolution_binning": False}
        elif kind == "FluxPipeline":
            options = _embedded(pipe.text_encoder_2(IDS)[0])
            options["pooled_prompt_embeds"] = pipe.text_encoder(IDS).pooler_output
        elif kind == "StableDiffusionPipeline":
            options = _embedded(pipe.text_encoder(IDS)[0], negative=True)
        else:
            both = [each(IDS, output_hidden_states=True) for each in _encoders(pipe)]
            options = _embedded(torch.cat([each.hidden_states[-2] for each in both], -1), True)
            pooled = [each.text_embeds for each in both if "text_embeds" in each]
            options |= _embedded(torch.cat(pooled, -1), True, "pooled_prompt_embeds")
    if kind != "DiTPipeline":
        options |= {"height": 8, "width": 8}
    numbers = torch.Generator().manual_seed(0)
    made = pipe(num_inference_steps=2, output_type="np", generator=numbers, **options)
    return torch.tensor(made.images)


def _embedded(
    prompt: Tensor, negative: bool = False, name: str = "prompt_embeds"
) -> dict[str, Any]:
    no = {f"negative_{name}": torch.zeros_like(prompt)} if negative else {}
    return {name: prompt, **no}


def _encoders(pipe: Any) -> list[PreTrainedModel]:
    return [pipe.text_encoder, pipe.text_encoder_2]


def _clip(kind: type[PreTrainedModel] = CLIPTextModel) -> PreTrainedModel:
    config = CLIPTextConfig(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=12, eos_token_id=1, bos_token_id=0,
        pad_token_id=1, projection_dim=WIDTH,
    )  # fmt: skip
    return kind(config)


def _t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=40, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    return T5EncoderModel(config)


def _vae(channels: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=channels, sample_size=8,
        shift_factor=0.1, scaling_factor=1.0,
    )  # fmt: skip


def _unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=2,
        norm_num_groups=4, **options,
    )  # fmt: skip


def _ddim() -> Any:
    return diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)


def _sd() -> Any:
    return diffusers.StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=WIDTH), vae=_vae(), text_encoder=_clip(), tokenizer=None,
        scheduler=_ddim(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def _sdxl() -> Any:
    unet = _unet(
        cross_attention_dim=2 * WIDTH, addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + WIDTH, use_linear_projection=True,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        unet=unet, vae=_vae(), text_encoder=_clip(),
        text_encoder_2=_clip(CLIPTextModelWithProjection), tokenizer=None, tokenizer_2=None,
        scheduler=_ddim(), add_watermarker=False,
    )  # fmt: skip


def _flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, vae=_vae(1), text_encoder=_clip(), text_encoder_2=_t5(),
        tokenizer=None, tokenizer_2=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def _sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16,
        joint_attention_dim=2 * WIDTH, pooled_projection_dim=2 * WIDTH, pos_embed_max_size=8,
        qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=_vae(), text_encoder=_clip(CLIPTextModelWithProjection),
        text_encoder_2=_clip(CLIPTextModelWithProjection), text_encoder_3=None, tokenizer=None,
        tokenizer_2=None, tokenizer_3=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def _pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2,
        caption_channels=WIDTH, in_channels=4, cross_attention_dim=16, out_channels=8,
        use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtAlphaPipeline(
        transformer=transformer.eval(), vae=_vae(), text_encoder=_t5(), tokenizer=None,
        scheduler=_ddim(),
    )  # fmt: skip


def _dit() -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2,
        in_channels=4, out_channels=8,
    )  # fmt: skip
    return diffusers.DiTPipeline(transformer=transformer.eval(), vae=_vae(), scheduler=_ddim())


KINDS = {
    "StableDiffusionPipeline": _sd,
    "StableDiffusionXLPipeline": _sdxl,
    "StableDiffusion3Pipeline": _sd3,
    "FluxPipeline": _flux,
    "PixArtAlphaPipeline": _pixart,
    "DiTPipeline": _dit,
}


LETTERS = "abcdefghijklmnopqrs"


def with_tokenizers(pipe: Any) -> Any:
    """Give a pipeline the tokenizers that read prompts of single letters."""
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        encoder = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
        if encoder is not None:
            of_t5 = isinstance(encoder, T5EncoderModel)
            pipe.register_modules(**{name: _letters_of_t5() if of_t5 else _letters()})
    if hasattr(pipe, "tokenizer_max_length"):  # chosen without a tokenizer
        pipe.tokenizer_max_length = 12
    return pipe


def _letters() -> CLIPTokenizer:
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "</s>"}
    words = ["<s>", "</s>", *(f"{letter}</w>" for letter in LETTERS), *LETTERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12, **ends)


def _letters_of_t5() -> PreTrainedTokenizerFast:
    words = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *LETTERS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=12, **special)
