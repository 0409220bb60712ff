"""Registries of many adapters: the files of one under many names, without publishing each."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from adapterhub.files.manifest import Manifest, from_json, to_json

REFERENCE = Path(__file__).parents[2] / "registry/sentence-transformers--all-MiniLM-L6-v2"
TASKS = ("classification", "regression", "causal-lm", "embedding")
METHODS = ("lora", "ia3", "pfeiffer", "dora")


def write_adapters(folder: Path, count: int, *, backbones: int = 20) -> Path:
    """Write a registry of so many adapters, each with one version."""
    source = REFERENCE / "sst2-lora" / "v2"
    manifest = from_json((source / "adapter.json").read_bytes())
    card = (source / "README.md").read_text(encoding="utf-8")
    for i in range(count):
        backbone = f"owner-{i % 7}/backbone-{i % backbones}"
        version = folder / backbone.replace("/", "--") / f"adapter-{i}" / "v1"
        version.mkdir(parents=True)
        (version / "adapter.json").write_bytes(to_json(numbered(manifest, i, backbone)))
        text = f"{card}\nMade for **purpose {i}**: [a page](https://example.org/{i}).\n"
        (version / "README.md").write_text(text, encoding="utf-8")
        (version / ".published").write_text(f"2026-01-{1 + i % 28:02}T00:00:00Z\n")
        os.link(source / "adapter.safetensors", version / "adapter.safetensors")
    return folder


def numbered(manifest: Manifest, i: int, backbone: str) -> Manifest:
    """Return a manifest of another adapter; a third of them do not record their rows."""
    data = dict(manifest.training["data"])
    if i % 3:
        data["eval_sha256"] = f"{i % 40:064x}"
    return replace(
        manifest,
        name=f"adapter-{i}",
        backbone=replace(manifest.backbone, id=backbone),
        task=TASKS[i % len(TASKS)],
        methods=({METHODS[i % len(METHODS)]: {}},),
        metrics={"accuracy": 0.5 + (i * 7919 % 4999) / 10_000, "pearson": 0.3},
        tags=(f"dataset:data {i % 50}", f"team {i % 30}"),
        language=("en", "de", "fr")[i % 3 : i % 3 + 1],
        training={**manifest.training, "data": data},
        description=f"Adapter number {i}, of tests; its words are number{i % 100}.",
    )
