"""Tiny random backbones that read pictures with text, and questions on pictures: no downloads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adapterhub.backbones.processor import for_pictures

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "initializer_range": 0.15,
}  # fmt: skip
ENDS = ["<unk>", "<pad>", "</s>", "<s>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template, with IMAGE for the text of a picture."""


def tokenizer(special: dict[str, str], *others: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte.

    Args:
        special: the named special tokens, such as image_token.
        others: more special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*ENDS, *alphabet])}
    inner = Tokenizer(models.BPE(words, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    named = [*special.values(), *others]
    inner.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in named])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        bos_token="<s>", model_max_length=512, extra_special_tokens=special,
    )  # fmt: skip


def _saved(folder: Path, config, processor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_llava(folder: Path, template: str | None = None, vision=None, text=None) -> None:
    """Save a LLaVA of CLIP and Llama: a picture is 16 tokens of 4 x 4 pixels."""
    words = tokenizer({"image_token": "<image>"})
    size = VISION | (vision or {})
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(projection_dim=32, **size),
        text_config=transformers.LlamaConfig(
            **TEXT | (text or {}), vocab_size=len(words), bos_token_id=3, eos_token_id=2,
            pad_token_id=1,
        ),
        image_token_index=words.image_token_id, image_seq_length=16, pad_token_id=1,
    )  # fmt: skip
    side = size["image_size"]
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    processor = transformers.LlavaProcessor(
        images, words, patch_size=size["patch_size"], vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    _saved(folder, config, processor)


def save_qwen2_vl(folder: Path) -> None:
    """Save a Qwen2-VL, whose pictures have tokens by their size, and 3 positions for each."""
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    words = tokenizer({"image_token": names[0], "video_token": names[1]}, *names[2:])
    ids = dict(zip(("image", "video", "vision_start", "vision_end"),
                   words.convert_tokens_to_ids(list(names)), strict=True))  # fmt: skip
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
                       "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
                       "temporal_patch_size": 2, "initializer_range": 0.15},
        text_config={**TEXT, "vocab_size": len(words), "eos_token_id": 2, "bos_token_id": 3,
                     "pad_token_id": 1, "rope_parameters": {
                         "rope_type": "default", "rope_theta": 10000.0,
                         "mrope_section": [1, 1, 2]}},
        **{f"{name}_token_id": number for name, number in ids.items()},
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    )  # fmt: skip
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    own = for_pictures(transformers.Qwen2VLProcessor)
    _saved(folder, config, own(images, words, None, chat_template=template))


def save_idefics3(folder: Path) -> None:
    """Save an Idefics3, which cuts pictures into parts and masks the padding of their pixels."""
    names = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    rows = [f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]
    words = tokenizer(
        {"image_token": names[0], "fake_image_token": names[1],
         "end_of_utterance_token": names[2], "global_image_token": names[3]}, *rows,
    )  # fmt: skip
    config = transformers.Idefics3Config(
        vision_config=VISION,
        text_config=transformers.LlamaConfig(
            **TEXT, vocab_size=len(words), bos_token_id=3, eos_token_id=2, pad_token_id=1
        ),
        image_token_id=words.image_token_id, scale_factor=2, pad_token_id=1,
    )  # fmt: skip
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.Idefics3Processor(
        images, words, image_seq_len=4, chat_template=template
    )
    _saved(folder, config, processor)


def save_gemma3(folder: Path) -> None:
    """Save a Gemma 3, whose picture is one block of tokens that attend to each other."""
    names = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    words = tokenizer(dict(zip(("boi_token", "image_token", "eoi_token"), names, strict=True)))
    text = transformers.Gemma3TextConfig(
        **TEXT, vocab_size=len(words), head_dim=8, sliding_window=64, bos_token_id=3,
        eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(
            **VISION, vision_use_head=False),
        mm_tokens_per_image=4, image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id, eoi_token_index=words.eoi_token_id,
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(
        images, words, image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<start_of_image>"),
    )  # fmt: skip
    _saved(folder, config, processor)


def save_paligemma(folder: Path) -> None:
    """Save a PaliGemma, whose picture and prompt are a block that sees itself; no chat template."""
    words = tokenizer({"image_token": "<image>"}, *[f"<loc{i:04}>" for i in range(1024)],
                      *[f"<seg{i:03}>" for i in range(128)])  # fmt: skip
    text = transformers.GemmaConfig(
        **TEXT, vocab_size=len(words), head_dim=8, bos_token_id=3, eos_token_id=2, pad_token_id=1
    )
    config = transformers.PaliGemmaConfig(
        text_config=text, projection_dim=32, image_token_index=words.image_token_id,
        vision_config=transformers.SiglipVisionConfig(
            **VISION, vision_use_head=False, projection_dim=32),
    )  # fmt: skip
    images = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    _saved(folder, config, transformers.PaliGemmaProcessor(images, words))


def save_internvl(folder: Path) -> None:
    """Save an InternVL, which reads a picture in parts of one size."""
    words = tokenizer(
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
         "end_image_token": "</img>", "video_token": "<video>"},
    )  # fmt: skip
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(
            **TEXT, vocab_size=len(words), bos_token_id=3, eos_token_id=2, pad_token_id=1),
        vision_config=transformers.InternVLVisionConfig(
            **{**VISION, "image_size": [16, 16], "patch_size": [4, 4]}),
        image_token_id=words.context_image_token_id, image_seq_length=4,
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
    )
    own = for_pictures(transformers.InternVLProcessor)
    template = TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>")
    _saved(folder, config, own(images, words, None, image_seq_length=4, chat_template=template))


SAVED = {
    "llava": save_llava, "qwen2_vl": save_qwen2_vl, "idefics3": save_idefics3,
    "gemma3": save_gemma3, "paligemma": save_paligemma, 
    "internvl": save_internvl,
}  # fmt: skip


def write_questions(folder: Path, digits: int = 4, each: int = 6, skip: int = 0) -> Path:
    """Write digits of scikit-learn with a question on each: FOLDER/metadata.jsonl.

    Args:
        folder: the folder to write to.
        digits: the number of digits, from 0.
        each: the number of pictures of each.
        skip: how many pictures of each digit to leave out first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, rows = load_digits(), []
    for digit in range(digits):
        own = data.images[data.target == digit][skip : skip + each]
        for number, pixels in enumerate(own):
            name = f"{digit}-{number}.png"
            picture = Image.fromarray((pixels * 255 / 16).astype("uint8"))
            picture.resize((16, 16 + 8 * (number % 2))).save(folder / name)
            rows.append({"image": name, "question": "which digit?", "answer": str(digit)})
    file = folder / "metadata.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
