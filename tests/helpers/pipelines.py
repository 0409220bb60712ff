"""A pipeline of diffusers with random numbers, of the size of a stamp."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

diffusers = pytest.importorskip("diffusers")


def pipeline(seed: int = 0) -> Any:
    """Return a small Stable Diffusion pipeline; the same numbers for the same seed."""
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=16,
        attention_head_dim=2, norm_num_groups=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=12, eos_token_id=1, bos_token_id=0,
            pad_token_id=1,
        )
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = diffusers.StableDiffusionPipeline(
            vae=vae, text_encoder=text, tokenizer=None, unet=unet, scheduler=scheduler,
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def picture(pipe: Any) -> Tensor:
    """Return a picture of 8 x 8 pixels, for one prompt and one seed."""
    with torch.no_grad():
        prompt = pipe.text_encoder(torch.tensor([[0, 5, 9, 3, 1, 1]]))[0]
    made = pipe(
        prompt_embeds=prompt, negative_prompt_embeds=torch.zeros_like(prompt),
        num_inference_steps=2, height=8, width=8, output_type="np",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return torch.tensor(made.images)
