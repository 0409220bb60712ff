"""A registry with everything that its pages may meet, and with hostile texts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from adapterhub.files.manifest import FoundationRef, from_json, to_json
from adapterhub.registry.sign import sign
from tests.kit.copied_adapters import REFERENCE, numbered, write_adapters
from tests.kit.signing import new_key

BACKBONE = "owner-0--backbone-0"
HOSTILE = (
    "<script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)>"
    "'\"><svg onload=alert(1)></style></bdi>{{ 7 * 7 }}"
)
CARD = f"""\
# A card

{HOSTILE}

![tracked](https://evil.example/pixel.png) [click](javascript:alert(1)) [site](https://evil.example)
<https://evil.example/auto> `<b>` <iframe src=//evil.example></iframe>

###### deep

| a | b |
|:-:|---|
| <script>1</script> | 2 |
"""


def write_team(folder: Path) -> Path:
    """Write adapters of one backbone: versions, tags, yanks, signatures, hostile, broken."""
    write_adapters(folder, 12, backbones=1)
    for i in range(0, 12):  # of one backbone and two tasks
        for path in folder.glob(f"*/adapter-{i}/v1/adapter.json"):
            manifest = from_json(path.read_bytes())
            add(folder, f"adapter-{i}", 1, numbered(manifest, i - i % 2, "owner-0/backbone-0"))
    for other in folder.glob("owner-[1-9]--*"):
        for path in sorted(other.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        other.rmdir()
    manifest = numbered(from_json(reference().read_bytes()), 4, "owner-0/backbone-0")
    add(folder, "several", 1, replace(manifest, metrics={"accuracy": 0.99}))
    add(folder, "several", 2, replace(manifest, metrics={"accuracy": 0.71}, description="second"))
    hostile = replace(
        manifest,
        description=HOSTILE,
        labels=(HOSTILE, "other"),
        training={**manifest.training, "seed": HOSTILE, "recipe": {"data": {"text": HOSTILE}}},
        on=(FoundationRef("adapter-0", digest(folder, "adapter-0", 1), "v1"),),
    )
    add(folder, "hostile", 1, hostile, CARD)
    add(folder, "gone", 1, manifest)
    add(folder, "broken", 1, manifest)
    (folder / BACKBONE / "broken/v1/adapter.json").write_text("{}")
    names = {"highest": 2, "tags": {"best": "v1"}, "yanked": {}}
    (folder / BACKBONE / "several/names.json").write_text(json.dumps(names))
    names = {"highest": 1, "tags": {}, "yanked": {"v1": HOSTILE}}
    (folder / BACKBONE / "gone/names.json").write_text(json.dumps(names))
    sign("several@v2", new_key(), registry=folder)
    return folder


def reference() -> Path:
    return REFERENCE / "sst2-lora/v2/adapter.json"


def add(folder: Path, name: str, version: int, manifest, card: str = "") -> None:
    place = folder / BACKBONE / name / f"v{version}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "adapter.json").write_bytes(to_json(replace(manifest, name=name)))
    (place / ".published").write_text(f"2026-02-{version:02}T00:00:00Z\n")
    if card:
        (place / "README.md").write_text(card, encoding="utf-8")
    if not (place / "adapter.safetensors").exists():
        data = (reference().parent / "adapter.safetensors").read_bytes()
        (place / "adapter.safetensors").write_bytes(data)


def digest(folder: Path, name: str, version: int) -> str:
    data = (folder / BACKBONE / name / f"v{version}/adapter.json").read_bytes()
    return hashlib.sha256(data).hexdigest()
