"""The manifest of a saved adapter (`adapter.json`): what it is, whom it fits, how it was made.

One table, `_SCHEMA`, is the schema. It is closed, and both directions use it: `to_json` refuses to
write what `from_json` would refuse to read. The bytes are canonical (sorted keys, two spaces, LF,
UTF-8, one newline at the end), and the field `sha256` is the digest of the same bytes without that
field, so a flipped byte anywhere is found. It guards against damage, not against forgery.

A reader ignores an unknown field that is null, false or empty: a later version may write such a
field where it means nothing. Any other unknown field raises "needs a newer adapterhub".
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterhub.errors import FileError, OutputError
from adapterhub.files import schema
from adapterhub.files.schema import canonical_json, show

SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 20
DTYPE_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True, slots=True)
class BackboneRef:
    """The backbone that an adapter belongs to.

    `id` is a Hub id or a logical name, never a path; `revision` is the resolved commit, None where
    the backbone has none; `fingerprint` is the content identity; `model_type` is the family.
    """

    id: str
    revision: str | None
    fingerprint: str
    model_type: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The safetensors dtype (a key of `DTYPE_BYTES`) and the shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a saved adapter but its numbers.

    `methods` is the normalised method spec, one `{name: {option: value}}` each; `tokenizer` is a
    hash; `training` holds the recipe, the data hash and the seed; `tensors` and `files` (sha256 of
    each other file) are filled on saving.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    methods: tuple[dict[str, dict[str, Any]], ...]
    backbone: BackboneRef
    tokenizer: str | None = None
    task: str | None = None
    labels: tuple[str, ...] = ()
    head: bool = False
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def to_json(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest.

    Raises OutputError, with every offending field, if it is not one that `from_json` accepts.
    """
    tree = _tree(manifest)
    offenders = _SCHEMA("", {**tree, "sha256": "0" * 64})
    if not offenders:
        tree["sha256"] = _digest(tree)
        data = canonical_json(tree)
        if len(data) <= MAX_MANIFEST_BYTES:
            return data
        offenders = [f"{len(data)} bytes, more than {MAX_MANIFEST_BYTES}"]
    raise OutputError(
        "this adapter's manifest cannot be written",
        expected="finite numbers, short JSON values, and names instead of paths of one machine",
        hint="change these fields; give a local backbone a logical name such as 'acme/bert-small'",
        offenders=schema.shorten(offenders),
    )


def from_json(data: bytes, source: str = "adapter.json") -> Manifest:
    """The manifest in `data`; `source` names the file in errors.

    Raises FileError, with every offender, for anything but the canonical bytes of a sound manifest.
    """
    tree, offenders = schema.parse_object(data, MAX_MANIFEST_BYTES)
    version = tree.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise FileError(
            f"{source} has schema version {version}: it needs a newer adapterhub",
            expected=f"schema version {SCHEMA_VERSION}",
            hint="pip install --upgrade adapterhub",
        )
    if tree or not offenders:
        offenders += _SCHEMA("", tree)
    if not offenders and tree["sha256"] != _digest(tree):
        offenders = ["sha256: the manifest was altered after it was written"]
    if not offenders and canonical_json(tree) != data:
        offenders = ["the bytes are not canonical: the file was edited or damaged"]
    if offenders:
        raise FileError(
            f"{source} is not a sound adapter manifest",
            expected="the file exactly as adapterhub wrote it",
            hint="copy or pull the adapter again; if it was made by a newer adapterhub, upgrade",
            offenders=schema.shorten(offenders),
        )
    return _build(tree)


def tensor_name_problems(names: Iterable[object]) -> list[str]:
    """One line for each name that cannot be a tensor's name in an adapter."""
    return [line for name in names for line in _tensor_name("tensors", name)]


def name_problems(name: object) -> list[str]:
    """One line for each reason why an adapter cannot be called so."""
    return _name("name", name)


def _tree(manifest: Manifest) -> dict[str, Any]:
    ref = manifest.backbone
    return {
        **{name: getattr(manifest, name) for name in Manifest.__dataclass_fields__},
        "backbone": {name: getattr(ref, name) for name in BackboneRef.__dataclass_fields__},
        "metrics": {name: _as_float(value) for name, value in manifest.metrics.items()},
        "tensors": {
            name: {"dtype": info.dtype, "shape": info.shape}
            for name, info in manifest.tensors.items()
        },
    }


def _as_float(value: Any) -> Any:
    """1 and 1.0 are the same metric, so they must be the same bytes."""
    return float(value) if type(value) is int and abs(value) < 2**53 else value


def _build(tree: dict[str, Any]) -> Manifest:
    known = {name: tree[name] for name in Manifest.__dataclass_fields__}
    ref = {name: tree["backbone"][name] for name in BackboneRef.__dataclass_fields__}
    known["backbone"] = BackboneRef(**ref)
    known["methods"] = tuple(tree["methods"])
    known["labels"] = tuple(tree["labels"])
    known["metrics"] = {name: float(value) for name, value in tree["metrics"].items()}
    known["tensors"] = {
        name: TensorInfo(info["dtype"], tuple(info["shape"]))
        for name, info in tree["tensors"].items()
    }
    return Manifest(**known)


def _digest(tree: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in tree.items() if name != "sha256"}
    return hashlib.sha256(canonical_json(rest)).hexdigest()


def _name(path: str, value: object) -> list[str]:
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        return [f"{path}: {show(value)} is not a name of 1 to 200 characters"]
    if value != value.strip() or not value.isprintable():
        return [f"{path}: {show(value)} has blanks at its ends, or is not printable"]
    if {"", ".", ".."} & set(re.split(r"[/\\]", value)):
        return [f"{path}: {show(value)} has empty, '.' or '..' parts"]
    return schema.surrogate_problem(path, value) + schema.path_problem(path, value)


def _labels(path: str, value: object) -> list[str]:
    label = schema.text(r"(?s).{0,1000}", "a label of at most 1000 characters")
    found = schema.sequence(label, 0, 100_000)(path, value)
    if not found and isinstance(value, (list, tuple)) and len(set(value)) < len(value):
        found = [f"{path}: a label is given twice"]
    return found


_WORD = r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:+-]{0,199}"
_word = schema.text(_WORD, "a plain word of at most 200 characters")
_word_or_null = schema.text(_WORD, "a plain word of at most 200 characters, or null", null=True)
_revision = schema.text(
    r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_./-]{0,199}", "a commit, tag or branch, or null", null=True
)
_key = schema.text(r"[A-Za-z0-9][A-Za-z0-9_.@/ -]{0,99}", "a plain key of at most 100 characters")
_sha256 = schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")
_tensor_name = schema.text(
    r"(?!.*\.\.)[A-Za-z0-9_.-]{1,256}",
    "a tensor name: 1 to 256 of A-Z a-z 0-9 _ . - without '..'",
)
_backbone_id = schema.text(
    r"(?!.*\.\.)(?=.{1,200}$)(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*",
    "a Hub id ('owner/name') or a logical name; a path belongs to one machine",
)
_method = schema.mapping(schema.text(r"[a-z0-9][a-z0-9_-]{0,63}", "a method"), schema.free, 1, 1)
_tensor = schema.record(
    {
        "dtype": schema.text("|".join(DTYPE_BYTES), f"one of {' '.join(DTYPE_BYTES)}"),
        "shape": schema.sequence(schema.integer(1, 2**40), 0, 8),
    }
)
_backbone = schema.record(
    {"id": _backbone_id, "revision": _revision, "fingerprint": _word, "model_type": _word}
)
_SCHEMA = schema.record(
    {
        "schema_version": schema.integer(SCHEMA_VERSION, SCHEMA_VERSION),
        "name": _name,
        "methods": schema.sequence(_method, 1, 64),
        "backbone": _backbone,
        "tokenizer": _word_or_null,
        "task": _word_or_null,
        "labels": _labels,
        "head": schema.boolean,
        "tensors": schema.mapping(_tensor_name, _tensor),
        "files": schema.mapping(
            schema.text(r"adapter\.safetensors|README\.md", "a file of an adapter"), _sha256
        ),
        "training": schema.free,
        "metrics": schema.mapping(_key, schema.number),
        "versions": schema.mapping(_key, schema.text(r"[A-Za-z0-9_.+!-]{1,100}", "a version")),
        "sha256": _sha256,
    }
)
