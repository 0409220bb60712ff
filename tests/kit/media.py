"""Tiny random backbones that read pictures or sound, and pictures to train them on."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits

from tests.kit import sounds, vision_language

SIZE = 16  # pixels
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": SIZE, "patch_size": 4, "initializer_range": 0.15, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def vit_config(**options) -> transformers.ViTConfig:
    """Return the configuration of a tiny ViT."""
    return transformers.ViTConfig(**{**SIZES, **options})


def image_processor(**options) -> transformers.ImageProcessingMixin:
    """Return an image processor for tiny models, which computes with Pillow."""
    size = {"height": SIZE, "width": SIZE}
    return transformers.ViTImageProcessorPil(**{"size": size, **options})


def save_vit(folder: Path) -> None:
    """Save a tiny ViT and its image processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.ViTModel(vit_config()).save_pretrained(folder)
    image_processor().save_pretrained(folder)


HEARING = ("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer")
WRITING = {
    "speech-ctc": sounds.save_ctc,
    "speech-whisper": sounds.save_whisper,
    "speech-moonshine": sounds.save_moonshine,
}
BACKBONES = {
    **{f"vlm-{kind}": save for kind, save in vision_language.SAVED.items()},
    "vit": save_vit,
    **{kind: partial(sounds.save, kind) for kind in HEARING},
    **WRITING,
}


def write_digits(folder: Path, classes: int = 10, each: int = 12, skip: int = 0) -> Path:
    """Write scikit-learn's handwritten digits as pictures of 8 x 8 pixels: FOLDER/DIGIT/I.png.

    Args:
        folder: the folder to write to.
        classes: the number of digits, from 0.
        each: the number of pictures of each.
        skip: how many pictures of each digit to leave out first.
    """
    digits = load_digits()
    for digit in range(classes):
        (folder / str(digit)).mkdir(parents=True)
        own = digits.images[digits.target == digit]
        for number, pixels in enumerate(own[skip : skip + each]):
            image = Image.fromarray((pixels * 255 / 16).astype("uint8"))
            image.save(folder / str(digit) / f"{number}.png")
    return folder


def red_png(red: int) -> bytes:
    """Return a PNG of 4 x 4 pixels that are as red."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_red(folder: Path, count: int = 3) -> Path:
    """Write `0.png`, `1.png`, ..., each redder than the one before; return the folder."""
    for number in range(count):
        (folder / f"{number}.png").write_bytes(red_png(40 * number))
    return folder
