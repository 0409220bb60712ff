"""A hub with tiny random models under the names that the documentation uses.

`Qwen/Qwen3-0.6B` and others are then downloaded as their users would download them; the numbers
that they give mean nothing. MiniLM is the real one.
"""

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from adapterhub.backbones.find import PACKAGED, PackagedBackbone
from tests.kit import fake_hub, media, processes, tiny_models
from tests.kit.data import CHAT_TEMPLATE

# Name: architecture and task.
MODELS = {
    "Qwen/Qwen3-0.6B": ("qwen3", "causal-lm"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", "causal-lm"),
    "meta-llama/Llama-3.2-1B": ("llama", "causal-lm"),
    "google-t5/t5-small": ("t5", "seq2seq"),
    "google-bert/bert-base-uncased": ("bert", "features"),
}
MEDIA = {"google/vit-base-patch16-224": "vit", "facebook/wav2vec2-base": "wav2vec2",
         "Qwen/Qwen2-VL-2B-Instruct": "vlm-qwen2_vl",
         "UsefulSensors/moonshine-tiny": "speech-moonshine"}  # fmt: skip
_SPECIAL = ["<unk>", "<pad>", "</s>", "<s>", "<mask>"]  # the ids of tiny_models
# Each is one token, with the space in front of it: words of classes, and T5's sentinels.
_WORDS = ["terrible", "great", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
LENGTH = 512
# bitsandbytes decodes rows of fewer than 64 values badly on a CPU.
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def byte_tokenizer(end: str = "") -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, which takes every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*_SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(words, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if end:
        single = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B:1 {end}:1",
            special_tokens=[(end, words[end])],
        )
        inner.post_processor = single
    inner.add_tokens([AddedToken(word, lstrip=True) for word in _WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        bos_token="<s>", mask_token="<mask>", model_max_length=LENGTH,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def files(name: str) -> dict[str, bytes]:
    """Return the files of one stand-in, as its repository on the hub would hold them."""
    architecture, task = MODELS[name]
    tokenizer = byte_tokenizer("" if task == "causal-lm" else "</s>")
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2}
    if task == "causal-lm":
        sizes |= _WIDE
    if "max_position_embeddings" in tiny_models.SIZES[architecture]:
        sizes["max_position_embeddings"] = LENGTH
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.model(architecture, task, **sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _media_files(architecture: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        media.BACKBONES[architecture](Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def packaged_files(packaged: PackagedBackbone) -> dict[str, bytes]:
    """Return the files of a backbone that is installed as a Python package."""
    (module,) = importlib.util.find_spec(packaged.package).submodule_search_locations
    return {name: Path(module, packaged.folder, name).read_bytes() for name in packaged.files}


@cache
def serve() -> None:
    """Put the stand-ins on the hub of warm processes, once."""
    hub = processes.hub()
    contents = {name: files(name) for name in MODELS}
    contents |= {name: _media_files(architecture) for name, architecture in MEDIA.items()}
    contents |= {name: packaged_files(packaged) for name, packaged in PACKAGED.items()}
    for name, of_repository in contents.items():
        hub.repositories[name] = fake_hub.Repository()
        hub.repositories[name].commit(of_repository)
