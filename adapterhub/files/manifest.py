"""The manifest of a saved adapter (`adapter.json`): contents, backbone, training.

The closed schema `_SCHEMA` is used in both directions: `to_json` refuses to write what `from_json`
would refuse to read. The bytes are canonical (sorted keys, two spaces, LF, UTF-8, one newline at
the end). The field `sha256` is the digest of the canonical bytes without that field, so any changed
byte is detected. It protects against damage, not against forgery.

A reader ignores an unknown field that is null, false, "", [] or {}: a later version may write such
a field where it has no effect. Any other unknown field raises "needs a newer adapterhub"; the field
`requires` names the version.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterhub._version import __version__
from adapterhub.errors import FileError, OutputError
from adapterhub.files import schema
from adapterhub.files.schema import canonical_json, show

SCHEMA_VERSION = 1
LOWER_IS_BETTER = frozenset({"loss", "mse", "rmse", "mae", "perplexity", "wer", "cer"})
"""Metrics for which smaller values are better."""
REQUIRES = "0.1.0"  # the oldest adapterhub that reads what this one writes
FAMILY = "family"  # in `training`: the row of sites, if it is not that of the backbone's type
MAX_MANIFEST_BYTES = 1 << 20
MAX_METHODS_BYTES = 64 << 10
MAX_HEADER_BYTES = 8 << 20
MAX_TENSOR_BYTES = 64 << 30
MAX_TENSOR_FILE_BYTES = 8 + MAX_HEADER_BYTES + MAX_TENSOR_BYTES
MOST_FOUNDATIONS = 16  # adapters directly below one, and levels of them
DTYPE_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True, slots=True)
class BackboneRef:
    """The backbone that an adapter belongs to.

    `id` is a Hub id or a logical name, never a path; `revision` is the resolved commit, or None;
    `fingerprint` names the weights; `model_type` is the family. `dtype` and `quantization` record
    how the backbone was loaded for training; they are not part of its identity. `identity` is what
    a backbone is compared with, see `adapterhub.backbones.fingerprint`; files of other
    libraries have none.
    """

    id: str
    revision: str | None
    fingerprint: str
    model_type: str
    dtype: str | None = None
    quantization: str | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """What to load it from: the id, or a folder if the id is a local name."""
        local = re.fullmatch(r"([\w.-]+)--[0-9a-f]{12}", self.id)
        return f"path/to/{local[1]}" if local else self.id


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The task head of an adapter.

    `kind` is a task of `load_backbone`; `problem_type` is the one of transformers, which selects
    the loss; `pooling` is what the head reads of each text, None for the choice of the model's
    class; `activation` is the one between the two layers of a head that takes the place of that of
    the model's class, "linear" if it has one layer, None for the head of the class.
    """

    kind: str | None = None
    problem_type: str | None = None
    pooling: str | None = None
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """One of several heads: its task, its labels, and the head; None for a language model's own."""

    task: str
    labels: tuple[str, ...] = ()
    head: TaskHead | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token added to the backbone's tokenizer: text, id, and the flags of `AddedToken`."""

    content: str
    id: int
    special: bool = False
    normalized: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class FoundationRef:
    """An adapter that this one was trained on, and is active above.

    `digest` is the sha256 of its manifest, which has those of its tensors. `version` and
    `reference`, the text that finds it in a registry or on a hub, are None for a folder.
    """

    name: str
    digest: str
    version: str | None = None
    reference: str | None = None

    def __str__(self) -> str:
        at = f"@{self.version}" if self.version else ""
        return self.reference or f"{self.name}{at}"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The safetensors dtype (a key of `DTYPE_BYTES`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a saved adapter except its tensor values.

    `methods` is the normalised method spec, one `{name: {option: value}}` each, with all options;
    `tokenizer` is the identity of the backbone's tokenizer without the new `tokens`, `processor`
    that of its image processor or feature extractor; `training`
    contains the recipe, the data hash and the seed; `on` lists the adapters below this one, which
    gets their outputs; `tensors` and `files` (sha256 of the tensor file) are filled on saving. With
    several `heads`, by name, `labels` and `head` are empty, and the tensors of a head are called
    `heads.NAME.*`. `description`, `license`, `language` and `tags` are for registries.
    """

    schema_version: int = SCHEMA_VERSION
    requires: str = REQUIRES
    name: str
    methods: tuple[dict[str, dict[str, Any]], ...]
    backbone: BackboneRef
    tokenizer: str | None = None
    processor: str | None = None
    tokens: tuple[NewToken, ...] = ()
    chat_template: str | None = None
    task: str | None = None
    labels: tuple[str, ...] = ()
    head: TaskHead | None = None
    on: tuple[FoundationRef, ...] = ()
    heads: dict[str, HeadRecord] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of values in the tensors."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """The size of the tensors' data in bytes."""
        return sum(info.nbytes for info in self.tensors.values())


def to_json(manifest: Manifest) -> bytes:
    """Serialize a manifest to canonical bytes.

    Raises:
        OutputError: `from_json` would refuse the manifest; lists every offending field.
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
    """Parse the manifest in `data`; `source` names the file in errors.

    Raises:
        FileError: `data` is not the canonical bytes of a valid manifest; lists every problem.
    """
    tree, offenders = schema.parse_object(data, MAX_MANIFEST_BYTES)
    _refuse_newer(tree, source)
    if tree or not offenders:
        offenders += _SCHEMA("", tree)
    if not offenders and tree["sha256"] != _digest(tree):
        offenders = ["sha256: the manifest was altered after it was written"]
    if not offenders and canonical_json(tree) != data:
        offenders = ["the bytes are not canonical: the file was edited or damaged"]
    if offenders:
        raise FileError(
            f"{source} is not a valid adapter manifest",
            expected="the file exactly as adapterhub wrote it",
            hint="copy or pull the adapter again; if a newer adapterhub wrote it, upgrade",
            offenders=schema.shorten(offenders),
        )
    return _build(tree)


def _refuse_newer(tree: Mapping[str, Any], source: str) -> None:
    """Refuse manifests of later versions first: their schema problems would be misleading."""
    version, requires = tree.get("schema_version"), tree.get("requires")
    schema_newer = type(version) is int and version > SCHEMA_VERSION
    is_release = isinstance(requires, str) and re.fullmatch(_RELEASE, requires)
    requires_newer = is_release and _release(str(requires)) > _release(__version__)
    if schema_newer or requires_newer:
        needed = f">= {requires}" if requires_newer else f"with schema version {version}"
        raise FileError(
            f"{source} needs a newer adapterhub: it needs adapterhub {needed}",
            expected=f"schema version {SCHEMA_VERSION}, for adapterhub {__version__} or older",
            hint="pip install --upgrade adapterhub",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def tensor_name_problems(names: Iterable[object]) -> list[str]:
    """Return one line for each invalid tensor name."""
    return [line for name in names for line in _tensor_name("tensors", name)]


def size_problems(nbytes: int) -> list[str]:
    """Return one line if tensors of so many bytes are too large for the format."""
    if nbytes <= MAX_TENSOR_BYTES:
        return []
    return [f"{nbytes} bytes of tensors, more than {MAX_TENSOR_BYTES}"]


def name_problems(name: object) -> list[str]:
    """Return one line for each reason why an adapter name is invalid."""
    return _name("name", name)


def _tree(manifest: Manifest) -> dict[str, Any]:
    fields = _fields(manifest)
    heads = {name: _head_tree(record) for name, record in fields.pop("heads").items()}
    on = [_fields(each) for each in fields.pop("on")]
    processor = fields.pop("processor")
    return {  # without heads, foundations and a processor, older versions can read files
        **fields,
        **({"processor": processor} if processor else {}),
        **({"heads": heads} if heads else {}),
        **({"on": on} if on else {}),
        "backbone": _fields(manifest.backbone),
        "head": _task_head_tree(manifest.head),
        "metrics": {name: _as_float(value) for name, value in manifest.metrics.items()},
        "tensors": {name: _fields(info) for name, info in manifest.tensors.items()},
        "tokens": [_fields(token) for token in manifest.tokens],
    }


def _task_head_tree(head: TaskHead | None) -> dict[str, Any] | None:
    tree = _fields(head) if head else {}
    return {n: v for n, v in tree.items() if v is not None or n not in _OPTIONAL_OF_HEAD} or None


def _head_tree(record: HeadRecord) -> dict[str, Any]:
    return {**_fields(record), "head": _task_head_tree(record.head)}


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _as_float(value: Any) -> Any:
    """Convert integers to floats: the metrics 1 and 1.0 must give the same bytes."""
    return float(value) if type(value) is int and abs(value) < 2**53 else value


def _build(tree: dict[str, Any]) -> Manifest:
    fields = {name: tree[name] for name in Manifest.__dataclass_fields__ if name in tree}
    for name in ("methods", "labels", "language", "tags"):
        fields[name] = tuple(tree[name])
    fields["backbone"] = _build_record(BackboneRef, tree["backbone"])
    fields["head"] = _build_record(TaskHead, tree["head"]) if tree["head"] else None
    fields["heads"] = {name: _build_head(each) for name, each in (tree.get("heads") or {}).items()}
    fields["tokens"] = tuple(_build_record(NewToken, token) for token in tree["tokens"])
    fields["on"] = tuple(_build_record(FoundationRef, each) for each in tree.get("on") or ())
    fields["metrics"] = {name: float(value) for name, value in tree["metrics"].items()}
    fields["tensors"] = {
        name: TensorInfo(info["dtype"], tuple(info["shape"]))
        for name, info in tree["tensors"].items()
    }
    return Manifest(**fields)


def _build_head(tree: Mapping[str, Any]) -> HeadRecord:
    head = _build_record(TaskHead, tree["head"]) if tree["head"] else None
    return HeadRecord(tree["task"], tuple(tree["labels"]), head)


def _build_record(cls: Any, tree: Mapping[str, Any]) -> Any:
    """Build a record from its known fields; the schema has accepted others as neutral."""
    return cls(**{name: tree[name] for name in cls.__dataclass_fields__ if name in tree})


def _digest(tree: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in tree.items() if name != "sha256"}
    return hashlib.sha256(canonical_json(rest)).hexdigest()


def _name(path: str, value: object) -> list[str]:
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        return [f"{path}: {show(value)} is not a name of 1 to 200 characters"]
    if value != value.strip() or not value.isprintable():
        return [f"{path}: {show(value)} has surrounding whitespace or is not printable"]
    if {"", ".", ".."} & set(re.split(r"[/\\]", value)):
        return [f"{path}: {show(value)} has empty, '.' or '..' parts"]
    return schema.surrogate_problem(path, value) + schema.path_problem(path, value)


def _labels(path: str, value: object) -> list[str]:
    label = schema.text(r"(?s).{0,1000}", "a label of at most 1000 characters")
    problems = schema.sequence(label, 0, 100_000)(path, value)
    if not problems and isinstance(value, (list, tuple)) and len(set(value)) < len(value):
        problems = [f"{path}: duplicate label"]
    return problems


def _tokens(path: str, value: object) -> list[str]:
    problems = schema.sequence(_token, 0, 10_000)(path, value)
    if not problems and isinstance(value, (list, tuple)):
        ids = [token["id"] for token in value]
        if len({token["content"] for token in value}) < len(value):
            problems.append(f"{path}: duplicate token")
        if any(second <= first for first, second in itertools.pairwise(ids)):
            problems.append(f"{path}: the ids are not in increasing order")
    return problems


def _head(path: str, value: object) -> list[str]:
    return [] if value is None else _task_head(path, value)


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
    "a Hub id ('owner/name') or a logical name; paths are not portable",
)
_method = schema.mapping(schema.text(r"[a-z0-9][a-z0-9_-]{0,63}", "a method"), schema.free, 1, 1)


def _methods(path: str, value: object) -> list[str]:
    problems = schema.sequence(_method, 1, 64)(path, value)
    size = 0 if problems else len(canonical_json({path: value}))
    if size > MAX_METHODS_BYTES:  # ranks for every site of 100 layers take half of that
        return [f"{path}: {size} bytes, more than {MAX_METHODS_BYTES}"]
    return problems


_tensor = schema.record(
    {
        "dtype": schema.text("|".join(DTYPE_BYTES), f"one of {' '.join(DTYPE_BYTES)}"),
        "shape": schema.sequence(schema.integer(1, 2**40), 0, 8),
    }
)
_text = schema.text(r"(?s).{1,2000}", "a text of 1 to 2000 characters, or null", null=True)
# Slashes in a template are not paths, and it is rendered in Jinja's sandbox.
_template = schema.text(r"(?s).{1,131072}", "a template of 1 to 131072 characters", null=True)
_RELEASE = r"\d{1,6}\.\d{1,6}(\.\d{1,6})?"
_tags = schema.sequence(schema.text(r"[\w][\w .:+/-]{0,99}", "a tag"), 0, 100)
_languages = schema.sequence(schema.text(r"[A-Za-z0-9-]{2,35}", "a language code"), 0, 200)
_digests = schema.sequence(_sha256, 2, 2)
_parts = schema.mapping(schema.text(r"[A-Za-z0-9_.-]{1,100}", "a part of a backbone"), _digests)
_rows = schema.integer(0, 2**40, null=True)
_identity = schema.record(
    {
        "config": schema.free,
        "files": schema.sequence(_sha256, 0, 10_000),
        "half": _word,
        "parts": _parts,
        "rows": _rows,
        "strength": schema.text("all|sample", "all or sample"),
        "tokens": _rows,
    }
)
_backbone = schema.record(
    {
        "id": _backbone_id,
        "revision": _revision,
        "fingerprint": _word,
        "model_type": _word,
        "dtype": _word_or_null,
        "quantization": _word_or_null,
        "identity": _identity,
    }
)
_OPTIONAL_OF_HEAD = {
    "pooling": schema.text("cls|mean|last|max", "cls, mean, last or max"),
    "activation": schema.text(_WORD, "a plain word of at most 200 characters"),
}
_task_head = schema.record(
    {"kind": _word_or_null, "problem_type": _word_or_null},
    optional=_OPTIONAL_OF_HEAD,
)
_foundation = schema.record(
    {
        "name": _name,
        "digest": _sha256,
        "version": _revision,
        "reference": schema.text(
            r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,499}",
            "name@version, hf:owner/name@commit, a URL, or null",
            null=True,
        ),
    }
)
_heads = schema.mapping(
    schema.text(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", "a name of 1 to 40 of A-Z a-z 0-9 _ -"),
    schema.record({"task": _word, "labels": _labels, "head": _head}),
    0,
    100,
)
_token = schema.record(
    {
        "content": schema.text(r"(?s).{1,1000}", "a token of 1 to 1000 characters"),
        "id": schema.integer(0, 2**31 - 1),
        **{f: schema.boolean for f in ("special", "normalized", "single_word", "lstrip", "rstrip")},
    }
)
_SCHEMA = schema.record(
    {
        "schema_version": schema.integer(SCHEMA_VERSION, SCHEMA_VERSION),
        "requires": schema.text(_RELEASE, "a release of adapterhub, such as 0.1.0"),
        "name": _name,
        "methods": _methods,
        "backbone": _backbone,
        "tokenizer": _word_or_null,
        "tokens": _tokens,
        "chat_template": _template,
        "task": _word_or_null,
        "labels": _labels,
        "head": _head,
        "tensors": schema.mapping(_tensor_name, _tensor),
        "files": schema.mapping(
            schema.text(r"adapter\.safetensors", "adapter.safetensors"), _sha256
        ),
        "training": schema.free,
        "metrics": schema.mapping(_key, schema.number),
        "versions": schema.mapping(_key, schema.text(r"[A-Za-z0-9_.+!-]{1,100}", "a version")),
        "description": _text,
        "license": _word_or_null,
        "language": _languages,
        "tags": _tags,
        "sha256": _sha256,
    },
    optional={
        "processor": _sha256,
        "heads": _heads,
        "on": schema.sequence(_foundation, 0, MOST_FOUNDATIONS),
    },
)
