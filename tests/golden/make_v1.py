"""Write the golden adapter of format version 1: `python tests/golden/make_v1.py FOLDER`.

This script wrote `tests/golden/v1` once. Every later release must read those bytes, and write the
same bytes from the same tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from adapterhub.files.manifest import BackboneRef, Manifest, NewToken, TaskHead
from adapterhub.files.native import write_adapter

IDENTITY = {
    "config": {"hidden_size": 4},
    "files": ["01" * 32],
    "half": "ba" * 32,
    "parts": {"body": ["ef" * 32, "fe" * 32]},
    "rows": 30522,
    "strength": "all",
    "tokens": 30522,
}
MANIFEST = Manifest(
    name="höflich/polite-🙂.v1",
    methods=({"lora": {"rank": 2, "alpha": 4.0, "sites": ["attn.q", "attn.v"]}}, {"bitfit": {}}),
    backbone=BackboneRef(
        "acme/bert-tiny", "0123456789abcdef", "ab" * 32, "bert", "bf16", "nf4", IDENTITY
    ),
    tokenizer="cd" * 32,
    tokens=(NewToken("<höflich>", 30522, special=True, lstrip=True), NewToken("später", 30523)),
    chat_template="{% for m in messages %}{{ m['content'] }}</s>\n{% endfor %}",
    task="classification",
    labels=("no", "yes", "vielleicht später"),
    head=TaskHead("classification", "single_label_classification"),
    training={"data": "ef" * 32, "recipe": {"epochs": 3, "lr": 2e-4, "warmup": None}, "seed": 17},
    metrics={"accuracy": 0.875, "loss": 0.1 + 0.2},
    versions={"adapterhub": "0.1.0", "torch": "2.13.0"},
    description="höflich, oder nicht",
    license="apache-2.0",
    language=("de", "en"),
    tags=("politeness",),
)
CARD = "---\nlibrary_name: adapterhub\n---\n\n# polite\n\nA golden adapter, höflich.\n"


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors that a writer can easily get wrong: each dtype, a scalar, odd sizes."""
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    made = {f"encoder.0.ffn.up.probe.{str(k)[6:]}": torch.arange(5).to(k) for k in kinds}
    for layer in range(2):
        for site in ("attn.q", "attn.v"):
            key = f"encoder.{layer}.{site}.lora"
            made[f"{key}.A"] = torch.arange(8, dtype=torch.float32).reshape(2, 4) / 7
            made[f"{key}.B"] = -torch.arange(8, dtype=torch.float32).reshape(4, 2) / 3
    made["head.classifier.weight"] = torch.arange(12, dtype=torch.float32).reshape(4, 3).T
    made["encoder.scale"] = torch.tensor(-0.0)
    return made


if __name__ == "__main__":
    write_adapter(Path(sys.argv[1]), MANIFEST, tensors(), card=CARD)
