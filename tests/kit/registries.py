"""Registries for tests: small adapters without a model, keys, storage in a dict, many versions."""

import hashlib
import json
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from adapterhub.files.manifest import (
    BackboneRef,
    FoundationRef,
    Manifest,
    TaskHead,
    TensorInfo,
    from_json,
    to_json,
)
from adapterhub.files.native import Saved, write_adapter
from adapterhub.files.signature import PrivateKey
from adapterhub.registry.publish import sign
from adapterhub.registry.store import ConflictError, Storage, Stored
from adapterhub.registry.trust import require_signatures, trust_key
from adapterhub.registry.version_files import DATE_FILE, check_digest, copy_adapter

# Small valid adapter folders, written without a model.


SAMPLE_BACKBONE = "acme/bert-small"
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
CLASSIFIER = Manifest(
    name="polite",
    methods=({"lora": {"rank": 8}},),
    backbone=BackboneRef("acme/bert", "a" * 40, f"bf16-{'0' * 64}", "bert", identity=IDENTITY),
    task="classification",
    labels=("no", "yes"),
    head=TaskHead("classification", "single_label_classification"),
    tensors={"encoder.0.attn.q.lora.A": TensorInfo("F32", (8, 4))},
    metrics={"accuracy": 0.75},
)


def write_sample(
    folder: Path,
    seed: int = 0,
    *,
    backbone: str = SAMPLE_BACKBONE,
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


# Keys and signed adapters for tests.


def new_key() -> PrivateKey:
    """Create a key; without the package cryptography the test is skipped."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return PrivateKey(ed25519.Ed25519PrivateKey.generate())


def require_key(key: PrivateKey) -> None:
    """Trust a key, and require signatures of all adapters."""
    trust_key(key.public)
    require_signatures(True)


# Registries of many adapters: the files of one under many names, without publishing each.


REFERENCE = Path(__file__).parents[2] / "registry/sentence-transformers--all-MiniLM-L6-v2"
TASKS = ("classification", "regression", "causal-lm", "embedding")
METHODS = ("lora", "ia3", "pfeiffer", "dora")


def reference() -> Path:
    """The manifest of an adapter that comes with the source, in its only version."""
    (path,) = REFERENCE.glob("sst2-lora/v*/adapter.json")
    return path


def write_adapters(folder: Path, count: int, *, backbones: int = 20) -> Path:
    """Write a registry of so many adapters, each with one version."""
    source = reference().parent
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


# Objects of a bucket, and a registry's files in a dict: the smallest storages.


class Objects:
    """A bucket, by default in memory, whose methods a test may replace."""

    def __init__(self, store: Any = None) -> None:
        self.store = store or pytest.importorskip("obstore.store").MemoryStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class MemoryStorage(Storage):
    """Keeps the bytes of each file by its path; `root` has the copies that are handed out."""

    is_atomic = True
    readers = 1

    def __init__(self, root: Path) -> None:
        self.location = "memory"
        self.root = root
        self.stored: dict[str, bytes] = {}
        self.lock = threading.RLock()  # of names and indexes

    def exists(self) -> bool:
        return True

    def folders(self, prefix: str = "") -> list[str]:
        depth = len(prefix.rstrip("/").split("/")) + 1 if prefix else 1
        found = (path.split("/") for path in self.files(prefix))
        return sorted({"/".join(parts[:depth]) for parts in found if len(parts) > depth})

    def files(self, prefix: str = "") -> dict[str, str]:
        return {path: "" for path in sorted(self.stored) if path.startswith(prefix)}

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        return Stored(self.stored[path]) if path in self.stored else None

    def reread(self, path: str, most: int) -> Stored | None:
        return self.read(path, most)

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> None:
        with TemporaryDirectory() as folder:
            copy = copy_adapter(source, Path(folder) / "copy", digest, beside=True)
            files = {f"{path}/{file.name}": file.read_bytes() for file in copy.iterdir()}
        self.stored |= files | {f"{path}/{DATE_FILE}": date}

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        if self.read(path, 0) != old:
            raise ConflictError(path)
        self.stored[path] = data

    def remove(self, path: str) -> None:
        self.stored = {k: v for k, v in self.stored.items() if not k.startswith(f"{path}/")}

    def get(self, path: str, digest: str, folder: Path | None) -> Path:
        with TemporaryDirectory() as staged:
            self._write(path, Path(staged))
            check_digest(Path(path), (Path(staged) / "adapter.json").read_bytes(), digest)
            if folder is not None:
                return copy_adapter(Path(staged), folder, digest)
        own = self.root / path
        own.mkdir(parents=True, exist_ok=True)
        self._write(path, own)
        self.check(path, digest)
        return own

    def check(self, path: str, digest: str) -> None:
        with TemporaryDirectory() as staged:
            self._write(path, Path(staged))
            Saved.at(Path(staged)).check()

    def writing(self, path: str) -> AbstractContextManager[object]:
        return self.lock if self.is_atomic else nullcontext()

    def _write(self, path: str, folder: Path) -> None:
        for file in self.files(f"{path}/"):
            (folder / file.rpartition("/")[2]).write_bytes(self.stored[file])


# A registry with everything that its pages may meet, and with hostile texts.


TEAM_BACKBONE = "owner-0--backbone-0"
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
    (folder / TEAM_BACKBONE / "broken/v1/adapter.json").write_text("{}")
    names = {"highest": 2, "tags": {"best": "v1"}, "yanked": {}}
    (folder / TEAM_BACKBONE / "several/names.json").write_text(json.dumps(names))
    names = {"highest": 1, "tags": {}, "yanked": {"v1": HOSTILE}}
    (folder / TEAM_BACKBONE / "gone/names.json").write_text(json.dumps(names))
    sign("several@v2", new_key(), registry=folder)
    return folder


def add(folder: Path, name: str, version: int, manifest, card: str = "") -> None:
    place = folder / TEAM_BACKBONE / name / f"v{version}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "adapter.json").write_bytes(to_json(replace(manifest, name=name)))
    (place / ".published").write_text(f"2026-02-{version:02}T00:00:00Z\n")
    if card:
        (place / "README.md").write_text(card, encoding="utf-8")
    if not (place / "adapter.safetensors").exists():
        data = (reference().parent / "adapter.safetensors").read_bytes()
        (place / "adapter.safetensors").write_bytes(data)


def digest(folder: Path, name: str, version: int) -> str:
    data = (folder / TEAM_BACKBONE / name / f"v{version}/adapter.json").read_bytes()
    return hashlib.sha256(data).hexdigest()
