"""Tiny random backbones that read images or audio, and data to train them on: no downloads."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adapterhub.backbones.processor import for_pictures

# Tiny random backbones that read pictures with text, and questions on pictures: no downloads.


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


def picture_tokenizer(
    special: dict[str, str], *others: str
) -> transformers.PreTrainedTokenizerFast:
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


def _ids(words: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    return {"vocab_size": len(words), "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 1}


def _built(make, config) -> transformers.PreTrainedModel:
    """Build a model whose weights do not depend on the state of random numbers, nor change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(config)


def _saved(folder: Path, config, processor) -> None:
    make = transformers.AutoModelForImageTextToText.from_config
    _built(make, config).save_pretrained(folder)
    processor.save_pretrained(folder)


def save_llava(folder: Path, template: str | None = None, vision=None, text=None) -> None:
    """Save a LLaVA of CLIP and Llama: a picture is 16 tokens of 4 x 4 pixels."""
    words = picture_tokenizer({"image_token": "<image>"})
    size = VISION | (vision or {})
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(projection_dim=32, **size),
        text_config=transformers.LlamaConfig(**TEXT | (text or {}), **_ids(words)),
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
    words = picture_tokenizer({"image_token": names[0], "video_token": names[1]}, *names[2:])
    ids = dict(zip(("image", "video", "vision_start", "vision_end"),
                   words.convert_tokens_to_ids(list(names)), strict=True))  # fmt: skip
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
                       "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
                       "temporal_patch_size": 2, "initializer_range": 0.15},
        text_config={**TEXT, **_ids(words), "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
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
    words = picture_tokenizer(
        {"image_token": names[0], "fake_image_token": names[1],
         "end_of_utterance_token": names[2], "global_image_token": names[3]}, *rows,
    )  # fmt: skip
    config = transformers.Idefics3Config(
        vision_config=VISION,
        text_config=transformers.LlamaConfig(**TEXT, **_ids(words)),
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
    words = picture_tokenizer(
        dict(zip(("boi_token", "image_token", "eoi_token"), names, strict=True))
    )
    text = transformers.Gemma3TextConfig(**TEXT, **_ids(words), head_dim=8, sliding_window=64)
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
    words = picture_tokenizer({"image_token": "<image>"}, *[f"<loc{i:04}>" for i in range(1024)],
                      *[f"<seg{i:03}>" for i in range(128)])  # fmt: skip
    text = transformers.GemmaConfig(**TEXT, **_ids(words), head_dim=8)
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
    words = picture_tokenizer(
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
         "end_image_token": "</img>", "video_token": "<video>"},
    )  # fmt: skip
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT, **_ids(words)),
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


# Tiny random backbones that read sound, and sounds to train them on: no downloads.


RATE = 16_000
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 8, 8), "conv_stride": (10, 8, 4),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "classifier_proj_size": 32, "initializer_range": 0.15, "vocab_size": 32, "pad_token_id": 0,
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout",
         "layerdrop", "final_dropout", "mask_time_prob", "hidden_dropout_prob",
         "attention_probs_dropout_prob"),
        0.0,
    ),
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 50, "max_target_positions": 64, "init_std": 0.15,
    "classifier_proj_size": 32,
}  # fmt: skip
SPECTROGRAM = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_length": 64, "num_mel_bins": 16, "initializer_range": 0.15, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "patch_size": 8, "frequency_stride": 8, "time_stride": 8,
}  # fmt: skip


def sound_config(kind: str, **options) -> transformers.PreTrainedConfig:
    """Return the configuration of a tiny model of a type."""
    sizes = {
        "whisper": WHISPER, "audio-spectrogram-transformer": SPECTROGRAM,
    }.get(kind, {**ENCODER, **CONVOLUTIONS})  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**sizes, **options})


def sound_extractor(kind: str) -> transformers.FeatureExtractionMixin:
    """Return a feature extractor for the tiny models of a type; Whisper hears a second."""
    if kind == "whisper":
        return transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    if kind == "audio-spectrogram-transformer":
        return transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64)
    return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)


def save_sound(kind: str, folder: Path) -> None:
    """Save a tiny encoder of a type, without a head, and its feature extractor."""
    _built(transformers.AutoModel.from_config, sound_config(kind)).save_pretrained(folder)
    sound_extractor(kind).save_pretrained(folder)


def save_ctc(folder: Path) -> None:
    """Save a tiny Wav2Vec2 that writes the letters a to e, and spaces."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcde"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(vocabulary))
    own = sound_config("wav2vec2", vocab_size=len(letters))
    _built(transformers.Wav2Vec2ForCTC, own).save_pretrained(folder)
    transformers.Wav2Vec2Processor(sound_extractor("wav2vec2"), tokenizer).save_pretrained(folder)


def whisper_tokenizer() -> transformers.WhisperTokenizer:
    """Return a tokenizer with a token for each byte, and the special tokens of two languages."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>",
               "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
               "<|notimestamps|>"]  # fmt: skip
    tokenizer.add_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.set_prefix_tokens()
    return tokenizer


def save_whisper(folder: Path) -> None:
    """Save a tiny Whisper of two languages that writes bytes, and its processor."""
    tokenizer = whisper_tokenizer()
    ids = tokenizer.get_vocab()
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    own = sound_config(
        "whisper", vocab_size=len(tokenizer), decoder_start_token_id=start, eos_token_id=end,
        bos_token_id=end, pad_token_id=end, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = _built(transformers.WhisperForConditionalGeneration, own)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        is_multilingual=True, lang_to_id={"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"], max_length=64,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.WhisperProcessor(sound_extractor("whisper"), tokenizer).save_pretrained(folder)


def save_moonshine(folder: Path) -> None:
    """Save a tiny Moonshine, which reads samples and writes bytes."""
    from tests.kit import stand_ins  # it imports this module

    tokenizer = stand_ins.byte_tokenizer("</s>")
    own = transformers.MoonshineConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, initializer_range=0.15,
        decoder_start_token_id=tokenizer.bos_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=128,
    )  # fmt: skip
    _built(transformers.MoonshineForConditionalGeneration, own).save_pretrained(folder)
    both = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    transformers.Wav2Vec2Processor(both, tokenizer).save_pretrained(folder)


def spoken(text: str, seed: int = 0) -> np.ndarray:
    """Return a text of the letters a to e as tones, one for each, with a short gap behind it."""
    gap = np.zeros(round(0.04 * RATE), np.float32)
    parts = []
    for i, letter in enumerate(text):
        hertz = 0.0 if letter == " " else 300.0 * 2 ** (0.8 * "abcde".index(letter))
        parts += [tone(hertz, 0.1, seed=seed + i), gap]
    return np.concatenate(parts)


PHRASES = ("ab", "ba cab", "dad", "bed", "a bad ace", "cede", "ebb", "add a")


def write_speech(folder: Path, phrases: tuple[str, ...] = PHRASES) -> Path:
    """Write phrases as tones, and a table with their texts: FOLDER/metadata.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["audio,text"]
    for i, text in enumerate(phrases):
        (folder / f"{i}.wav").write_bytes(encoded_sound(spoken(text, 10 * i)))
        lines.append(f"{i}.wav,{text}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def tone(hertz: float, seconds: float = 0.5, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """Return a tone with a random phase in noise: (samples,)."""
    numbers = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    noise = numbers.normal(0, 0.05, len(times))
    wave = 0.4 * np.sin(2 * np.pi * (hertz * times + numbers.uniform())) + noise
    return wave.astype(np.float32)


def encoded_sound(samples: np.ndarray, rate: int = RATE, **options) -> bytes:
    """Return the bytes of a sound file, WAV by default."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", **options})
    return file.getvalue()


TONES = {"low": 300.0, "middle": 1200.0, "high": 4000.0}


def write_tones(folder: Path, each: int = 8, seconds: float = 0.3) -> Path:
    """Write tones of three classes: FOLDER/CLASS/I.wav."""
    for number, (name, hertz) in enumerate(TONES.items()):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            samples = tone(hertz * (1 + i / 50), seconds + i / 100, seed=100 * number + i)
            (folder / name / f"{i}.wav").write_bytes(encoded_sound(samples))
    return folder


# Tiny random backbones that read pictures or sound, and pictures to train them on.


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
    _built(transformers.ViTModel, vit_config()).save_pretrained(folder)
    image_processor().save_pretrained(folder)


HEARING = ("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer")
WRITING = {
    "speech-ctc": save_ctc,
    "speech-whisper": save_whisper,
    "speech-moonshine": save_moonshine,
}
BACKBONES = {
    **{f"vlm-{kind}": save for kind, save in SAVED.items()},
    "vit": save_vit,
    **{kind: partial(save_sound, kind) for kind in HEARING},
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
