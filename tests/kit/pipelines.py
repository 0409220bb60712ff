"""Pipelines and models of diffusers with random numbers, of the size of a stamp."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
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

# Pipelines of diffusers with random numbers, of the size of a stamp.


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


# Models of diffusers with random numbers, of the size of a stamp: options, and what they read.
#
# A row has what differs from `USUAL`; the constructor and the forward pass of a class are each
# given what they know. In what a model reads, a tuple is the shape of random numbers.


Inputs = dict[str, Any]

STEP = torch.tensor([3])
SHARE = torch.tensor([0.5])  # of all steps
TEXT = (1, 5, 16)
VIDEO = (1, 4, 2, 4, 4)  # channels, frames, height, width
PICTURE = (1, 4, 4, 4)
TOKENS = (1, 4, 4)  # of a picture that is packed
SIZES = torch.tensor([[8, 8]])
MASK = torch.ones(1, 5)
USUAL = dict(
    attention_head_dim=8, axes_dims_rope=(2, 2, 4), block_out_channels=(8, 16), cap_feat_dim=16,
    caption_channels=16, caption_projection_dim=16, cross_attention_dim=16, ffn_dim=24, freq_dim=8,
    hidden_size=16, in_channels=4, intermediate_size=24, joint_attention_dim=16, layers_per_block=1,
    multiple_of=8, norm_num_groups=4, num_attention_heads=2, num_key_value_heads=1, num_layers=2,
    num_refiner_layers=1, num_single_layers=1, out_channels=4, pooled_projection_dim=16,
    pos_embed_max_size=8, rope_max_seq_len=32, sample_height=4, sample_size=4, sample_width=4,
    text_dim=16, text_embed_dim=16, time_embed_dim=8,
    encoder_hidden_states=TEXT, hidden_states=PICTURE, original_size=SIZES, crop_coords=SIZES,
    img_ids=torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]), txt_ids=torch.zeros(5, 3),
    pooled_projections=(1, 16), sample=PICTURE, target_size=SIZES, timestep=STEP,
)  # fmt: skip
OF_VIDEOS = dict(hidden_states=VIDEO, sample=VIDEO)  # where the name says 3D
MODELS: dict[str, Inputs] = {
    "AllegroTransformer3DModel": dict(
        sample_frames=2, attention_mask=torch.ones(1, 2, 4, 4), encoder_attention_mask=MASK,
        image_rotary_emb=None,
    ),
    "AuraFlowTransformer2DModel": dict(num_mmdit_layers=1, num_single_dit_layers=2),
    "AutoencoderKL": dict(
        block_out_channels=(8,), sample_size=8, in_channels=3, sample=(1, 3, 8, 8),
    ),
    "BriaTransformer2DModel": dict(num_layers=1, hidden_states=TOKENS),
    "ChromaTransformer2DModel": dict(
        num_layers=1, approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1, hidden_states=TOKENS,
    ),
    "CogVideoXTransformer3DModel": dict(
        sample_frames=5, max_text_seq_length=5, hidden_states=(1, 2, 4, 4, 4),
    ),
    "CogView3PlusTransformer2DModel": dict(condition_dim=4),
    "CogView4Transformer2DModel": dict(condition_dim=4, rope_axes_dim=(8, 8)),
    "ControlNetModel": dict(
        conditioning_embedding_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2,
        controlnet_cond=(1, 3, 8, 8),
    ),
    "CosmosTransformer3DModel": dict(
        attention_head_dim=16, mlp_ratio=2, adaln_lora_dim=4, max_size=(4, 4, 4),
        concat_padding_mask=False, fps=30,
    ),
    "DiTTransformer2DModel": dict(out_channels=8, class_labels=torch.tensor([1])),
    "EasyAnimateTransformer3DModel": dict(attention_head_dim=16, patch_size=2, mmdit_layers=1),
    "ErnieImageTransformer2DModel": dict(
        ffn_hidden_size=24, text_in_dim=16, rope_axes_dim=(2, 2, 4), text_bth=TEXT,
        text_lens=torch.tensor([5]),
    ),
    "Flux2Transformer2DModel": dict(
        num_layers=1, num_single_layers=2, timestep_guidance_channels=8,
        axes_dims_rope=(2, 2, 2, 2), hidden_states=TOKENS, img_ids=torch.zeros(1, 4, 4),
        txt_ids=torch.zeros(1, 5, 4), guidance=SHARE,
    ),
    "FluxTransformer2DModel": dict(num_layers=1, hidden_states=TOKENS),
    "FluxControlNetModel": dict(num_layers=1, hidden_states=TOKENS, controlnet_cond=TOKENS),
    "HiDreamImageTransformer2DModel": dict(
        patch_size=2, num_layers=1, caption_channels=[16, 16], text_emb_dim=16,
        num_routed_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(8, 8), llama_layers=(0, 1),
        force_inference_output=True, timesteps=STEP, encoder_hidden_states_t5=TEXT,
        encoder_hidden_states_llama3=(2, 1, 5, 16), pooled_embeds=(1, 16),
    ),
    "HunyuanDiT2DModel": dict(
        patch_size=2, cross_attention_dim_t5=16, pooled_projection_dim=8, text_len=5,
        text_len_t5=5, mlp_ratio=2.0, use_style_cond_and_image_meta_size=False,
        text_embedding_mask=MASK, encoder_hidden_states_t5=TEXT, text_embedding_mask_t5=MASK,
        image_rotary_emb=[torch.ones(4, 8), torch.zeros(4, 8)], timestep=SHARE,
    ),
    "HunyuanVideoTransformer3DModel": dict(
        num_layers=1, pooled_projection_dim=8, rope_axes_dim=(2, 2, 4),
        encoder_attention_mask=MASK, pooled_projections=(1, 8), guidance=STEP * 100,
    ),
    "HunyuanImageTransformer2DModel": dict(
        num_layers=1, rope_axes_dim=(4, 4), encoder_attention_mask=MASK, timestep=SHARE,
    ),
    "HunyuanVideo15Transformer3DModel": dict(
        num_layers=1, text_embed_2_dim=16, image_embed_dim=16, rope_axes_dim=(2, 2, 4),
        encoder_attention_mask=MASK, encoder_hidden_states_2=TEXT, encoder_attention_mask_2=MASK,
        image_embeds=(1, 3, 16), timestep=SHARE,
    ),
    "I2VGenXLUNet": dict(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), attention_head_dim=2, sample=VIDEO,
        fps=torch.tensor([30]), image_latents=VIDEO, image_embeddings=(1, 16),
    ),
    "Ideogram4Transformer2DModel": dict(
        adaln_dim=8, llm_features_dim=16, mrope_section=(2, 1, 1), hidden_states=(1, 9, 4),
        encoder_hidden_states=(1, 9, 16), position_ids=torch.zeros(1, 9, 3, dtype=torch.long),
        segment_ids=torch.zeros(1, 9, dtype=torch.long),
        indicator=torch.tensor([[3] * 5 + [2] * 4]), timestep=SHARE,
    ),
    "Kandinsky5Transformer3DModel": dict(
        in_text_dim=16, in_text_dim2=8, time_dim=8, model_dim=16, ff_dim=24, num_text_blocks=1,
        num_visual_blocks=1, axes_dims=(2, 2, 4), hidden_states=(1, 2, 4, 4, 4),
        pooled_projections=(1, 8),
        visual_rope_pos=[torch.arange(2), torch.arange(2), torch.arange(2)],
        text_rope_pos=torch.arange(5),
    ),
    "Krea2Transformer2DModel": dict(
        num_layers=1, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=24,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, hidden_states=TOKENS,
        encoder_hidden_states=(1, 5, 2, 16), position_ids=torch.zeros(9, 3),
    ),
    "LTXVideoTransformer3DModel": dict(
        hidden_states=(1, 8, 4), encoder_attention_mask=MASK, num_frames=2, height=2, width=2,
    ),
    "LTX2VideoTransformer3DModel": dict(
        num_layers=1, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
        audio_attention_head_dim=4, audio_cross_attention_dim=8, hidden_states=(1, 8, 4),
        audio_hidden_states=(1, 3, 4), audio_encoder_hidden_states=TEXT, num_frames=2, height=2,
        width=2, audio_num_frames=3,
    ),
    "LatteTransformer3DModel": dict(
        num_layers=1, patch_size=2, norm_type="ada_norm_single", video_length=2,
        norm_elementwise_affine=False, num_embeds_ada_norm=1000, attention_bias=True,
    ),
    "LongCatImageTransformer2DModel": dict(num_layers=1, hidden_states=TOKENS),
    "Lumina2Transformer2DModel": dict(
        num_layers=1, num_kv_heads=1, axes_dim_rope=(4, 2, 2), axes_lens=(16, 8, 8),
        encoder_attention_mask=MASK.bool(),
    ),
    "LuminaNextDiT2DModel": dict(
        num_layers=1, num_kv_heads=2, encoder_mask=MASK.bool(),
        image_rotary_emb=torch.ones(384, 384, 4) + 0j, cross_attention_kwargs={},
    ),
    "MochiTransformer3DModel": dict(
        pooled_projection_dim=8, max_sequence_length=5, encoder_attention_mask=MASK.bool(),
    ),
    "OmniGenTransformer2DModel": dict(
        vocab_size=40, pad_token_id=0, max_position_embeddings=64,
        original_max_position_embeddings=32, time_step_dim=8,
        rope_scaling={"long_factor": [1, 1, 1, 1], "short_factor": [1, 1, 1, 1]},
        input_ids=torch.tensor([[1, 2, 3]]), input_img_latents=[], input_image_sizes={},
        attention_mask=torch.ones(1, 8, 8), position_ids=torch.arange(8)[None],
    ),
    "PRXTransformer2DModel": dict(context_in_dim=16, num_heads=2, depth=2, axes_dim=(4, 4)),
    "PixArtTransformer2DModel": dict(out_channels=8, use_additional_conditions=False),
    "PriorTransformer": dict(
        embedding_dim=8, num_embeddings=5, additional_embeddings=4, hidden_states=(1, 8),
        proj_embedding=(1, 8), encoder_hidden_states=(1, 5, 8),
    ),
    "QwenImageTransformer2DModel": dict(
        out_channels=1, hidden_states=TOKENS, encoder_hidden_states_mask=MASK.long(),
        img_shapes=[(1, 2, 2)],
    ),
    "SD3ControlNetModel": dict(controlnet_cond=PICTURE),
    "SD3Transformer2DModel": dict(dual_attention_layers=(0,)),
    "SanaTransformer2DModel": dict(num_cross_attention_heads=2, cross_attention_head_dim=8),
    "SanaVideoTransformer3DModel": dict(num_cross_attention_heads=2, cross_attention_head_dim=8),
    "SkyReelsV2Transformer3DModel": dict(patch_size=(1, 2, 2)),
    "StableAudioDiTModel": dict(
        sample_size=8, num_key_value_attention_heads=1, time_proj_dim=8, global_states_input_dim=8,
        cross_attention_input_dim=16, hidden_states=(1, 4, 8), global_hidden_states=(1, 1, 8),
        rotary_embedding=[torch.ones(9, 4), torch.zeros(9, 4)],
    ),
    "StableCascadeUNet": dict(
        timestep_ratio_embedding_dim=8, conditioning_dim=16, block_out_channels=(16, 16),
        num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1), clip_text_pooled_in_channels=16, clip_text_in_channels=16,
        clip_image_in_channels=16, dropout=(0.0, 0.0), timestep_ratio=SHARE,
        clip_text_pooled=(1, 1, 16), clip_text=TEXT, clip_img=(1, 1, 16),
    ),
    "T2IAdapter": dict(
        in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=2, x=(1, 3, 8, 8),
    ),
    "TransformerTemporalModel": dict(
        in_channels=8, num_layers=1, hidden_states=(2, 8, 4, 4), num_frames=2,
        encoder_hidden_states=None,
    ),
    "UNet1DModel": dict(
        in_channels=2, out_channels=2, block_out_channels=(32, 32, 64), sample_size=64,
        extra_in_channels=64, sample=(1, 2, 64),
    ),
    "UNet2DConditionModel": dict(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), num_attention_heads=None,
    ),
    # Of Kandinsky 2.2 and DeepFloyd IF: one attention reads the picture and what is added to it.
    "UNet2DConditionModel, added": dict(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", attention_head_dim=2,
        resnet_time_scale_shift="scale_shift", addition_embed_type="image",
        encoder_hid_dim_type="image_proj", encoder_hid_dim=16, num_attention_heads=None,
        encoder_hidden_states=None, added_cond_kwargs={"image_embeds": torch.ones(1, 16)},
    ),
    "UNet2DModel": dict(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), in_channels=3, sample=(1, 3, 4, 4),
    ),
    "UNet3DConditionModel": dict(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), attention_head_dim=4,
        num_attention_heads=None,
    ),
    "UNetMotionModel": dict(
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), motion_num_attention_heads=2,
        sample=VIDEO, encoder_hidden_states=(2, 5, 16),
    ),
    "UNetSpatioTemporalConditionModel": dict(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=4, projection_class_embeddings_input_dim=12,
        num_attention_heads=(2, 4), num_frames=2, sample=(1, 2, 4, 4, 4),
        encoder_hidden_states=(1, 1, 16), added_time_ids=torch.ones(1, 3),
    ),
    "UVit2DModel": dict(
        cond_embed_dim=16, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
        encoder_hidden_size=16, vocab_size=20, codebook_size=16, in_channels=16,
        block_out_channels=16, num_res_blocks=1, block_num_heads=2, num_hidden_layers=2,
        input_ids=torch.arange(16).reshape(1, 4, 4), pooled_text_emb=(1, 16),
        micro_conds=torch.ones(1, 5),
    ),
    "VQModel": dict(
        block_out_channels=(8,), num_vq_embeddings=8, in_channels=3, sample=(1, 3, 8, 8),
    ),
    "WanTransformer3DModel": dict(patch_size=(1, 2, 2)),
    "WanVACETransformer3DModel": dict(
        patch_size=(1, 2, 2), vace_layers=[0], vace_in_channels=4, control_hidden_states=VIDEO,
    ),
    # Of Wan 2.1 from a picture: keys and values of the picture are added.
    "WanTransformer3DModel, image": dict(
        patch_size=(1, 2, 2), image_dim=16, added_kv_proj_dim=16,
        encoder_hidden_states_image=(1, 3, 16),
    ),
    "ZImageTransformer2DModel": dict(
        dim=16, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, axes_dims=[2, 2, 4],
        axes_lens=[64, 8, 8], x=[torch.ones(4, 1, 4, 4)], t=SHARE, cap_feats=[torch.ones(5, 16)],
    ),
}  # fmt: skip


def _class_of(name: str) -> Any:
    return getattr(diffusers, name.partition(",")[0])


def _given(name: str, function: Any) -> Inputs:
    """Return what a function of a class is given: of the values of a row, those that it knows."""
    values = USUAL | (OF_VIDEOS if "3D" in name else {}) | MODELS[name]
    known = inspect.signature(inspect.unwrap(function)).parameters
    return {key: value for key, value in values.items() if key in known}


def model(name: str, seed: int = 0) -> nn.Module:
    """Return a model with random numbers in all that it has; the same for the same seed.

    Gates and last layers begin with zeros in many classes: outputs would show nothing.
    """
    torch.manual_seed(seed)
    kind = _class_of(name)
    made: nn.Module = kind(**_given(name, kind.__init__))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.eval()


@torch.no_grad()
def output(made: nn.Module, name: str) -> Tensor:
    """Return what a model computes, always of the same numbers."""
    numbers = torch.Generator().manual_seed(0)
    given = {
        key: torch.randn(value, generator=numbers) if isinstance(value, tuple) else value
        for key, value in _given(name, _class_of(name).forward).items()
    }
    return torch.cat([each.flatten() for each in _tensors(made(**given))])


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    several = found.values() if isinstance(found, dict) else found
    return [tensor for each in several if each is not None for tensor in _tensors(each)]
