"""Write the golden adapters of format version 1: `python tests/golden/make_v1_models.py FOLDER`.

This script wrote `tests/golden/v1_models` once, with transformers 5.23. Every later release must
load those folders onto these backbones, check the same fingerprints, and compute the same logits.
"""

import json
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.processor import snapshot_of
from tests.kit import tiny_models

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>\n' }}{% endfor %}"
LABELS = {"id2label": {0: "no", 1: "yes", 2: "vielleicht später"}}


@dataclass(frozen=True)
class Case:
    """The methods and the backbone of one golden adapter."""

    methods: Any
    architecture: str
    task: str = "classification"
    tokens: tuple[str, ...] = ()


CASES = {
    "lora": Case("lora(rank=2)", "bert"),
    "mam": Case("mam(length=2, size=2)", "bart"),
    "prompt": Case("prompt(length=3)", "llama", "causal-lm"),
    "several": Case(["ia3", "norms", "pfeiffer(size=2)"], "gpt2"),
    "tokens": Case("lora(rank=2)", "llama", "causal-lm", ("<a>", "<höflich>")),
    "head": Case("head", "t5"),
}


def numbers(shape: torch.Size, start: int, modulus: int, scale: int) -> torch.Tensor:
    """Return small fractions that are exact in every dtype, by integer arithmetic."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 37 + start) % modulus - modulus // 2
    return (values.float() / scale).reshape(shape)


def backbone_of(case: Case) -> PreTrainedModel:
    """Build a tiny model whose weights follow from their layer and shape.

    They do not depend on parameter names, which transformers may change.
    """
    labels = LABELS if case.task == "classification" else {}
    model = tiny_models.model(case.architecture, case.task, **labels)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = int((re.findall(r"\.(\d+)\.", name) or ["7"])[0])
            parameter.copy_(numbers(parameter.shape, 11 * layer + parameter.ndim, 61, 128))
    if case.tokens:
        tokenizer = small_tokenizer()
        backbone = Backbone.of(model)
        backbone.tokenizer = snapshot_of(backbone, tokenizer, len(tokenizer))
    return model


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 64 words."""
    words = ["<unk>", "<pad>", "</s>", "<s>", *(f"w{i}" for i in range(tiny_models.VOCAB - 4))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def logits(model: PreTrainedModel, case: Case) -> list[Any]:
    """Compute the logits of one batch that includes the new tokens."""
    inputs = tiny_models.batch(rows=2, length=6)
    for place in range(len(case.tokens)):
        inputs["input_ids"][:, place + 1] = tiny_models.VOCAB + place
    with torch.no_grad():
        output = model(**inputs).logits
    return (output if output.ndim == 2 else output[:, -1]).tolist()


def make(folder: Path) -> None:
    """Save one adapter per case, and its logits."""
    for name, case in CASES.items():
        model = backbone_of(case)
        if case.tokens:
            snapshot = Backbone.of(model).tokenizer
            assert snapshot is not None
            snapshot.tokenizer.add_tokens(list(case.tokens))
            snapshot.tokenizer.chat_template = TEMPLATE
        adapter = ah.attach(model, case.methods, name=f"golden {name}")
        with torch.no_grad():
            for key, tensor in adapter.tensors().items():
                tensor.copy_(numbers(tensor.shape, zlib.crc32(key.encode()) % 53, 53, 256))
        adapter.metadata.card = f"# golden {name}"
        adapter.save(folder / name, overwrite=True)
        expected = json.dumps({"logits": logits(model, case)})
        (folder / f"{name}.json").write_text(expected + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
