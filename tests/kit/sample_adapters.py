"""Small valid adapter folders, written without a model."""

from __future__ import annotations

from pathlib import Path

import torch

from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import write_adapter

BACKBONE = "acme/bert-small"
FINGERPRINT = f"v2-{'0' * 64}"
IDENTITY = {
    "config": {},
    "files": [],
    "half": FINGERPRINT,
    "parts": {},
    "rows": None,
    "strength": "sample",
    "tokens": None,
}


def write(
    folder: Path,
    seed: int = 0,
    *,
    backbone: str = BACKBONE,
    fingerprint: str = FINGERPRINT,
    method: str = "lora",
    task: str = "classification",
    card: str = "",
    **metrics: float,
) -> Path:
    """Write an adapter whose bytes depend on every argument; return its folder."""
    manifest = Manifest(
        name="polite",
        methods=({method: {}},),
        backbone=BackboneRef(backbone, None, fingerprint, "bert", identity=IDENTITY),
        task=task,
        metrics=metrics,
    )
    tensors = {"encoder.0.attn.q.lora.a": torch.full((2, 4), float(seed))}
    write_adapter(folder, manifest, tensors, card=card)
    return folder
