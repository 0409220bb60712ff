"""Tiny models of special kinds: own networks, mixtures of experts, codes, FP8, translators."""

import importlib
import json
import math
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import every_type
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MBart50Tokenizer, MBartTokenizer, NllbTokenizer, PreTrainedModel
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

# Networks that are not of transformers: each kind of module that an adapter can be at.


class Everything(nn.Module):
    """A network of all kinds of hosts; its head is `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.depthwise = nn.Conv1d(32, 32, 3, padding="same", groups=32, padding_mode="reflect")
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.fc = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.depthwise(self.conv(self.table(ids).transpose(1, 2))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.fc(self.norm(x).mean(1))
        return scores


class Around(nn.Module):
    """One module, `host`, with a projection behind it."""

    def __init__(self, host: nn.Module, width: int) -> None:
        super().__init__()
        self.host = host
        self.last = nn.Linear(width, 3)
        self.attends = isinstance(host, nn.MultiheadAttention)
        self.convolves = not self.attends and not isinstance(host, nn.Linear | nn.Embedding)

    def forward(self, x: Tensor) -> Tensor:
        y = self.host(x, x, x)[0] if self.attends else self.host(x)
        if self.convolves:
            y = y.flatten(2).mean(2)  # (batch, channels, ...)
        scores: Tensor = self.last(y)
        return scores


def _conv(dims: int, *args: Any, **options: Any) -> nn.Module:
    module: nn.Module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **options)
    return module


# name -> the module, the width of its output, and its input
KINDS: dict[str, tuple[Any, int, Any]] = {
    "linear": (lambda: nn.Linear(8, 6), 6, (4, 8)),
    "linear, no bias": (lambda: nn.Linear(8, 6, bias=False), 6, (4, 8)),
    "linear, 3 dimensions": (lambda: nn.Linear(8, 6), 6, (4, 5, 8)),
    "conv1d": (lambda: _conv(1, 6, 8, 3), 8, (4, 6, 9)),
    "conv1d, causal": (lambda: _conv(1, 6, 8, 3, padding=2), 8, (4, 6, 9)),
    "conv1d, circular": (
        lambda: _conv(1, 6, 8, 3, padding=1, padding_mode="circular"), 8, (4, 6, 9),
    ),
    "conv1d, no bias": (lambda: _conv(1, 6, 8, 3, bias=False), 8, (4, 6, 9)),
    "conv2d": (lambda: _conv(2, 6, 8, 3), 8, (4, 6, 7, 7)),
    "conv2d, 1x1": (lambda: _conv(2, 6, 8, 1), 8, (4, 6, 7, 7)),
    "conv2d, strided": (lambda: _conv(2, 6, 8, 3, stride=2, padding=1), 8, (4, 6, 7, 7)),
    "conv2d, dilated": (lambda: _conv(2, 6, 8, (3, 1), dilation=(2, 1)), 8, (4, 6, 7, 7)),
    "conv2d, patches": (lambda: _conv(2, 3, 8, 4, stride=4), 8, (4, 3, 8, 8)),
    "conv2d, same": (lambda: _conv(2, 6, 8, 3, padding="same", bias=False), 8, (4, 6, 7, 7)),
    "conv3d": (lambda: _conv(3, 2, 4, 2), 4, (4, 2, 5, 5, 5)),
    "conv3d, strided": (lambda: _conv(3, 2, 4, (1, 3, 3), stride=2), 4, (4, 2, 5, 5, 5)),
    "embedding": (lambda: nn.Embedding(20, 6), 6, 20),
    "embedding, padded": (lambda: nn.Embedding(20, 6, padding_idx=0), 6, 20),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 8, (4, 5, 8)),
    "attention, no bias": (
        lambda: nn.MultiheadAttention(8, 2, bias=False, batch_first=True), 8, (4, 5, 8),
    ),
    "attention, tokens first": (lambda: nn.MultiheadAttention(8, 2), 8, (5, 4, 8)),
    "conv1d, grouped": (lambda: _conv(1, 6, 8, 3, groups=2), 8, (4, 6, 9)),
    "conv2d, depthwise": (lambda: _conv(2, 6, 12, 3, groups=6, padding=1), 12, (4, 6, 7, 7)),
}  # fmt: skip
# peft pads with zeros, and does not dilate: its update is none of the weight, or no update at all.
OTHERWISE = ("conv1d, circular", "conv2d, dilated")
GROUPED = ("conv1d, grouped", "conv2d, depthwise")


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a network around a module of a kind, and a batch for it."""
    make, width, shape = KINDS[kind]
    torch.manual_seed(0)
    module = Around(make(), width).eval()
    x = torch.randint(0, shape, (4, 5)) if isinstance(shape, int) else torch.randn(shape)
    return module, x


# Tiny random mixtures of experts, each as transformers builds it: what tests of experts run on.


# Gated with the matrices as (d_out, d_in); transposed with biases (gpt_oss); transposed and called
# for all experts at once (llama4_text); without a gate (nemotron_h); beside shared experts
# (deepseek_v3, glm4_moe, qwen2_moe); in some layers only (jamba, nemotron_h).
TYPES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4_text",
    "olmoe", "granitemoe", "jamba", "nemotron_h", "phimoe",
)  # fmt: skip
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
TRANSPOSED = ("gpt_oss", "llama4_text")
ROUTED = tuple(t for t in TYPES if t != "llama4_text")  # by tokens: rows can have own adapters
EXPERTS = "lora(sites=[ffn.experts.*], rank=3)"


@cache
def _built(model_type: str) -> PreTrainedModel:
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    torch.manual_seed(0)
    model = every_type.build(model_type, auto, tiny=True)
    assert model is not None
    return model


def expert_model(model_type: str, experts: str = "eager") -> PreTrainedModel:
    """Return the model of a type, of which all tests share one, without adapters.

    Args:
        model_type: a type.
        experts: how it multiplies by the weights of experts.
    """
    model = _built(model_type)
    if ah.adapters(model):  # of a test that failed
        ah.detach(model)
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = experts
    return model.eval()


def expert_logits(model: PreTrainedModel, rows: Iterable[int] = range(3)) -> Tensor:
    """Return the logits of a model for texts that do not change."""
    ids = torch.arange(4 * 7).view(4, 7).mul(5).remainder(50).add(6)
    out: Tensor = model(input_ids=ids[list(rows)]).logits
    return out


def redraw(adapter: Any, seed: int = 0) -> None:
    """Give an adapter other values, far from those that change nothing."""
    tiny_models.scramble_parameters(adapter, seed, 0.2)


def holders(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that hold the weights of experts."""
    for module in model.modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.ndim == 3:
            yield module


# A model with codes in place of its weights, as in quantized models.


class Codes(torch.nn.Linear):
    """A linear layer with codes as its weight, as in quantized layers."""

    def __init__(self, host):
        super().__init__(host.in_features, host.out_features, bias=False)
        codes = host.weight.detach().mul(100).to(torch.int8).reshape(-1, 1)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)


def quantize(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Codes(child))
    return model


# Backbones in FP8, as checkpoints and as transformers' layers, with a kernel that a CPU has.


BLOCK = (16, 8)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def encode(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Return the codes of a weight, and the scale of each block."""
    rows, columns = (math.ceil(n / size) for n, size in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[at].abs().max().clamp_min(1e-6) / LARGEST
            codes[at] = weight[at] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def float8_layer(linear: nn.Linear, block: tuple[int, int] = BLOCK) -> FP8Linear:
    """Return a layer of transformers with the weight of a plain one in FP8."""
    bias = linear.bias is not None
    layer = FP8Linear(linear.in_features, linear.out_features, block, has_bias=bias)
    codes, scales = encode(linear.weight.detach(), block)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scales)
    layer.bias = linear.bias
    return layer


def save_checkpoint(model: PreTrainedModel, folder: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Save a model with its projections in FP8, as DeepSeek's and Qwen's checkpoints have them."""
    model.save_pretrained(folder)
    word_tokenizer("<s>", "").save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = encode(tensor, block)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def float8_model(folder: Path) -> PreTrainedModel:
    """Return the model of a checkpoint as a GPU has it: with layers that hold codes."""
    loaded: Any = ah.load_backbone(str(folder), task="causal-lm", dtype="fp32")
    model, tensors = loaded[0], load_file(folder / "model.safetensors")
    for path, module in list(model.named_modules()):
        if f"{path}.weight_scale_inv" in tensors:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, float8_layer(module))
    model.load_state_dict(tensors, strict=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model.config.quantization_config = config["quantization_config"]
    return model.requires_grad_(False)


def float8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers compute on a CPU: with decoded weights, and activations as they are.

    transformers passes bias and blocks by position or by name, in its releases.
    """

    def linear(
        x: Tensor, weight: Tensor, scales: Tensor, block_size: Any = None, bias: Any = None,
        *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        for axis, size in enumerate(block_size):
            scales = scales.repeat_interleave(size, axis)
        decoded = weight.float() * scales[: weight.shape[0], : weight.shape[1]]
        return nn.functional.linear(x, decoded.to(x.dtype), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)


# Tiny translation models for several languages, with the tokenizer classes of transformers.


TRANSLATED_WORDS = [
    *("the", "cat", "dog", "sleeps", "barks", "die", "katze", "der", "hund", "schläft", "bellt"),
    *("le", "chat", "dort"),
]
PAIRS = [("the cat sleeps", "die katze schläft"), ("the dog barks", "der hund bellt")]
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_PIECES = [f"▁{word}" for word in TRANSLATED_WORDS]


@dataclass(frozen=True)
class Translator:
    """A family of models: its architecture, and how it names English, German and French."""

    architecture: str
    languages: tuple[str, str, str]


TRANSLATORS = {
    "mbart": Translator("mbart", ("en_XX", "de_DE", "fr_XX")),
    "mbart50": Translator("mbart", ("en_XX", "de_DE", "fr_XX")),
    "nllb": Translator("m2m_100", ("eng_Latn", "deu_Latn", "fra_Latn")),
    "m2m100": Translator("m2m_100", ("en", "de", "fr")),
    "marian": Translator("marian", ("", "deu", "fra")),
}
SAVED = ("mbart", "mbart50", "nllb")
"""The kinds whose tokenizers are read without the library sentencepiece."""


class Words:
    """What the two tokenizers of sentencepiece models call of it: a piece is a word."""

    def encode(self, text: str, out_type: type = str) -> list[str]:
        """Return the pieces of a text."""
        return [f"▁{word}" for word in text.split()]

    def decode(self, pieces: list[str]) -> str:
        """Return the text of pieces."""
        return "".join(pieces).replace("▁", " ").strip()

    decode_pieces = decode


def _of_sentencepiece(module: str) -> Any:
    """Import a module of transformers that imports sentencepiece, and give it `Words`."""
    stand_in: Any = types.ModuleType("sentencepiece")
    stand_in.SentencePieceProcessor = Words
    missing = "sentencepiece" not in sys.modules
    sys.modules.setdefault("sentencepiece", stand_in)
    try:
        loaded: Any = importlib.import_module(f"transformers.models.{module}")
    finally:
        if missing:
            del sys.modules["sentencepiece"]
    loaded.load_spm = lambda path, options: Words()
    if hasattr(loaded, "MarianTokenizer"):  # warns without the library sacremoses
        loaded.MarianTokenizer._setup_normalizer = lambda self: setattr(
            self, "punc_normalizer", lambda text: text
        )
    return loaded


def translation_tokenizer(kind: str, folder: Path, **options: Any) -> Any:
    """Build the tokenizer of a kind; `options` are those of its class, such as `src_lang`."""
    scored = [(token, -float(i)) for i, token in enumerate([*_SPECIAL, *_PIECES])]
    if kind == "mbart":
        codes = [(code, 0.0) for code in MBartTokenizer().lang_code_to_id]
        return MBartTokenizer(vocab=[*scored, *codes, ("<mask>", 0.0)], **options)
    if kind == "mbart50":
        return MBart50Tokenizer(vocab=scored, **options)
    if kind == "nllb":
        letters = sorted({letter for piece in _PIECES for letter in piece})
        vocab = {token: i for i, token in enumerate([*_SPECIAL, *letters])}
        return NllbTokenizer(vocab=vocab, merges=[], **options)
    spm, words = folder / "source.spm", folder / "vocab.json"
    spm.touch()
    targets = [">>deu<<", ">>fra<<"] if kind == "marian" else []
    tokens = [*_SPECIAL, *targets, *_PIECES]
    words.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    if kind == "marian":
        module = _of_sentencepiece("marian.tokenization_marian")
        return module.MarianTokenizer(str(spm), str(spm), str(words), **options)
    module = _of_sentencepiece("m2m_100.tokenization_m2m_100")
    return module.M2M100Tokenizer(str(words), str(spm), **options)


def translator(kind: str, tokenizer: Any) -> Any:
    """Build the model of a kind; it writes words, and others in French than in German."""
    size = max(len(tokenizer), max(getattr(tokenizer, "lang_code_to_id", {"": 0}).values()) + 1)
    start = tokenizer.pad_token_id if kind == "marian" else tokenizer.eos_token_id
    built: Any = tiny_models.model(
        TRANSLATORS[kind].architecture, "seq2seq", vocab_size=size,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=0, decoder_start_token_id=start,
        tie_word_embeddings=False, init_std=0.5, seed=4,
    )  # fmt: skip
    codes = [*getattr(tokenizer, "lang_code_to_id", {}).values(), *tokenizer.all_special_ids]
    built.lm_head.weight.data[codes] = 0.0  # words are written, not codes
    return built


def save_translator(kind: str, folder: Path) -> Path:
    """Save a model and its tokenizer to a folder."""
    own = translation_tokenizer(kind, folder)
    translator(kind, own).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder
