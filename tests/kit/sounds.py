"""Tiny random backbones that read sound, and sounds to train them on: no downloads."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, pre_tokenizers

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


def config(kind: str, **options) -> transformers.PreTrainedConfig:
    """Return the configuration of a tiny model of a type."""
    sizes = {
        "whisper": WHISPER, "audio-spectrogram-transformer": SPECTROGRAM,
    }.get(kind, {**ENCODER, **CONVOLUTIONS})  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**sizes, **options})


def extractor(kind: str) -> transformers.FeatureExtractionMixin:
    """Return a feature extractor for the tiny models of a type; Whisper hears a second."""
    if kind == "whisper":
        return transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    if kind == "audio-spectrogram-transformer":
        return transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64)
    return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)


def save(kind: str, folder: Path) -> None:
    """Save a tiny encoder of a type, without a head, and its feature extractor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModel.from_config(config(kind)).save_pretrained(folder)
    extractor(kind).save_pretrained(folder)


def save_ctc(folder: Path) -> None:
    """Save a tiny Wav2Vec2 that writes the letters a to e, and spaces."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcde"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(vocabulary))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Wav2Vec2ForCTC(config("wav2vec2", vocab_size=len(letters)))
    model.save_pretrained(folder)
    transformers.Wav2Vec2Processor(extractor("wav2vec2"), tokenizer).save_pretrained(folder)


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
    own = config(
        "whisper", vocab_size=len(tokenizer), decoder_start_token_id=start, eos_token_id=end,
        bos_token_id=end, pad_token_id=end, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(own)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        is_multilingual=True, lang_to_id={"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"], max_length=64,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.WhisperProcessor(extractor("whisper"), tokenizer).save_pretrained(folder)


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.MoonshineForConditionalGeneration(own)
    model.save_pretrained(folder)
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
        (folder / f"{i}.wav").write_bytes(encoded(spoken(text, 10 * i)))
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


def encoded(samples: np.ndarray, rate: int = RATE, **options) -> bytes:
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
            (folder / name / f"{i}.wav").write_bytes(encoded(samples))
    return folder
