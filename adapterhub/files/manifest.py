"""The manifest of a saved adapter (`adapter.json`): contents, backbone, training.

The limits in the types of the fields apply in both directions: `to_json` refuses to write values
that `from_json` would refuse to read. The bytes are canonical (sorted keys, two spaces, LF, UTF-8,
one newline at the end). The field `sha256` is the digest of the canonical bytes without that field,
so any changed byte is detected. It protects against damage, not against forgery.

A reader ignores an unknown field that is null, false, "", [] or {}: a later version may write such
a field where it has no effect. Any other unknown field raises "needs a newer adapterhub"; the field
`requires` names the version.

With one head selected, an adapter with several heads is like any other:

    heads.rte.classifier.weight   the tensor in the file
    head.classifier.weight        its name in the adapter with the head `rte` alone
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

from adapterhub._version import __version__
from adapterhub.config.options import from_file, option, to_dict
from adapterhub.errors import ConfigError, FileError, OutputError, did_you_mean
from adapterhub.files import schema
from adapterhub.files.schema import canonical_json
from adapterhub.files.shown_table import ERRORS, TEST

SCHEMA_VERSION = 1
LOWER_IS_BETTER = frozenset(
    {"loss", "mse", "rmse", "mae", "perplexity", "wer", "cer", "divergence"}
)
"""Metrics for which smaller values are better."""
REQUIRES = "0.1.0"  # the oldest adapterhub that can read files of this one
UNNAMED = "default"  # the name of an unnamed adapter
FAMILY = "family"  # in `training`: the row of sites, if not the backbone type's row
HEAD_MODULES = "head_modules"  # in `training`: the caller's choice of a module's head
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


def _distinct(path: str, value: tuple[object, ...]) -> list[str]:
    return [f"{path}: duplicate label"] if len(set(value)) < len(value) else []


def _small(path: str, value: object) -> list[str]:
    size = len(canonical_json({path: value}))
    if size > MAX_METHODS_BYTES:  # ranks for all sites of 100 layers take half of that
        return [f"{path}: {size} bytes, more than {MAX_METHODS_BYTES}"]
    return []


def _token_order(path: str, value: tuple[NewToken, ...]) -> list[str]:
    problems = []
    if len({token.content for token in value}) < len(value):
        problems.append(f"{path}: duplicate token")
    if any(second.id <= first.id for first, second in itertools.pairwise(value)):
        problems.append(f"{path}: the ids are not in increasing order")
    return problems


_WORD = r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:+-]{0,199}"
_RELEASE = r"\d{1,6}\.\d{1,6}(\.\d{1,6})?"
_word = schema.text(_WORD, "a plain word of at most 200 characters")
_sha256 = schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")
_tensor_name = schema.text(
    r"(?!.*\.\.)[A-Za-z0-9_.-]{1,256}",
    "a tensor name: 1 to 256 of A-Z a-z 0-9 _ . - without '..'",
)
_few = schema.items(0, 20_000)
Name = Annotated[str, schema.name_problem]
Word = Annotated[str, _word]
Revision = Annotated[
    str, schema.text(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_./-]{0,199}", "a commit, tag or branch")
]
Key = Annotated[
    str, schema.text(r"[A-Za-z0-9][A-Za-z0-9_.@/ -]{0,99}", "a plain key of at most 100 characters")
]
Sha256 = Annotated[str, _sha256]
Free = Annotated[dict[str, Any], schema.free]
Text = Annotated[str, schema.text(r"(?s).{1,2000}", "a text of 1 to 2000 characters")]
BackboneId = Annotated[
    str,
    schema.text(
        r"(?!.*\.\.)(?=.{1,200}$)(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*",
        "a Hub id ('owner/name') or a logical name; paths are not portable",
    ),
]
AdapterReference = Annotated[
    str,
    schema.text(
        r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,499}",
        "name@version, hf:owner/name@commit or a URL",
    ),
]
# Slashes in a template are not paths, and it is rendered in Jinja's sandbox.
Template = Annotated[str, schema.text(r"(?s).{1,131072}", "a template of 1 to 131072 characters")]
TensorName = Annotated[str, _tensor_name]
HeadName = Annotated[
    str, schema.text(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", "a name of 1 to 40 of A-Z a-z 0-9 _ -")
]
FileName = Annotated[str, schema.text(r"adapter\.safetensors", "adapter.safetensors")]
Version = Annotated[str, schema.text(r"[A-Za-z0-9_.+!-]{1,100}", "a version")]
Release = Annotated[str, schema.text(_RELEASE, "a release of adapterhub, such as 0.1.0")]
Tag = Annotated[str, schema.text(r"[\w][\w .:+/-]{0,99}", "a tag")]
Language = Annotated[str, schema.text(r"[A-Za-z0-9-]{2,35}", "a language code")]
Pooling = Annotated[str, schema.text("cls|mean|last|max", "cls, mean, last or max")]
Label = Annotated[str, schema.text(r"(?s).{0,1000}", "a label of at most 1000 characters")]
Labels = Annotated[tuple[Label, ...], schema.items(0, 100_000), _distinct]
MethodName = Annotated[str, schema.text(r"[a-z0-9][a-z0-9_-]{0,63}", "a method")]
Methods = Annotated[
    tuple[Annotated[dict[MethodName, Free], schema.items(1, 1)], ...],
    schema.items(1, 64),
    _small,
]


_identity = schema.record(
    {
        "config": schema.free,
        "files": schema.sequence(_sha256, 0, 10_000),
        "half": _word,
        "parts": schema.mapping(
            schema.text(r"[A-Za-z0-9_.-]{1,100}", "a part of a backbone"),
            schema.sequence(_sha256, 2, 2),
        ),
        "rows": schema.integer(0, 2**40, null=True),
        "strength": schema.text("all|sample", "all or sample"),
        "tokens": schema.integer(0, 2**40, null=True),
    }
)


@dataclass(frozen=True, slots=True)
class BackboneRef:
    """The backbone that an adapter belongs to.

    `id` is a Hub id or a logical name, never a path; `revision` is the resolved commit, or None;
    `fingerprint` names the weights; `model_type` is the family. `dtype` and `quantization` record
    how the backbone was loaded for training; they are not part of its identity. `identity` is
    compared with backbones, see `adapterhub.backbones.fingerprint`; files of other libraries lack
    it.
    """

    id: BackboneId
    revision: Revision | None
    fingerprint: Word
    model_type: Word
    dtype: Word | None = None
    quantization: Word | None = None
    identity: Annotated[Mapping[str, Any], _identity] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """The source to load it from: the id, or a folder if the id is a local name."""
        local = re.fullmatch(r"([\w.-]+)--[0-9a-f]{12}", self.id)
        return f"path/to/{local[1]}" if local else self.id


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The task head of an adapter.

    `kind` is a task of `load_backbone`; `problem_type` is transformers' option that selects the
    loss; `pooling` is the pooling in front of the head, None for the choice of the model's class;
    `activation` is between the two layers of a head that replaces the head of the model's class,
    "linear" if it has one layer, None for the head of the class.
    """

    kind: Word | None = None
    problem_type: Word | None = None
    pooling: Pooling | None = option(None, omitted=True)
    activation: Word | None = option(None, omitted=True)


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """One of several heads: its task, its labels, and the head; None for a language model's own."""

    task: Word
    labels: Labels = ()
    head: TaskHead | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token added to the backbone's tokenizer: text, id, and the flags of `AddedToken`."""

    content: Annotated[str, schema.text(r"(?s).{1,1000}", "a token of 1 to 1000 characters")]
    id: Annotated[int, schema.integer(0, 2**31 - 1)]
    special: bool = False
    normalized: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


def first_id(tokens: tuple[NewToken, ...]) -> int | None:
    """Return the lowest id of new tokens; None without tokens."""
    return min((token.id for token in tokens), default=None)


@dataclass(frozen=True, slots=True)
class FoundationRef:
    """An adapter that this one was trained on, and is active above.

    `digest` is the sha256 of its manifest, which has the sha256 of its tensors. `version` and
    `reference`, the text that finds it in a registry or on a hub, are None for a folder.
    """

    name: Name
    digest: Sha256
    version: Revision | None = None
    reference: AdapterReference | None = None

    def __str__(self) -> str:
        at = f"@{self.version}" if self.version else ""
        return self.reference or f"{self.name}{at}"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The safetensors dtype (a key of `DTYPE_BYTES`) and shape of a tensor."""

    dtype: Annotated[str, schema.text("|".join(DTYPE_BYTES), f"one of {' '.join(DTYPE_BYTES)}")]
    shape: Annotated[tuple[Annotated[int, schema.integer(1, 2**40)], ...], schema.items(0, 8)]

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a saved adapter except its tensor values.

    `methods` is the normalised method spec, one `{name: {option: value}}` each, with all options;
    `tokenizer` is the identity of the backbone's tokenizer without the new `tokens`, `processor`
    the identity of its image processor or feature extractor; `training` contains the recipe, the
    data hash and the seed; `on` lists the adapters below this one, which receives their outputs;
    `tensors` and `files` (sha256 of the tensor file) are filled on saving. With several `heads`, by
    name, `labels` and `head` are empty, and the tensors of a head are called `heads.NAME.*`.
    `description`, `license`, `language` and `tags` are for registries.
    """

    schema_version: Annotated[int, schema.integer(SCHEMA_VERSION, SCHEMA_VERSION)] = SCHEMA_VERSION
    requires: Release = REQUIRES
    name: Name
    methods: Methods
    backbone: BackboneRef
    tokenizer: Word | None = None
    processor: Sha256 | None = option(None, omitted=True)
    tokens: Annotated[tuple[NewToken, ...], schema.items(0, 10_000), _token_order] = ()
    chat_template: Template | None = None
    task: Word | None = None
    labels: Labels = ()
    head: TaskHead | None = None
    on: Annotated[tuple[FoundationRef, ...], schema.items(0, MOST_FOUNDATIONS)] = option(
        (), omitted=True
    )
    heads: Annotated[dict[HeadName, HeadRecord], schema.items(0, 100)] = option({}, omitted=True)
    tensors: Annotated[dict[TensorName, TensorInfo], _few] = option({})
    files: Annotated[dict[FileName, Sha256], _few] = option({})
    training: Free = option({})
    metrics: Annotated[dict[Key, Annotated[float, schema.number]], _few] = option({})
    versions: Annotated[dict[Key, Version], _few] = option({})
    description: Text | None = None
    license: Word | None = None
    language: Annotated[tuple[Language, ...], schema.items(0, 200)] = ()
    tags: Annotated[tuple[Tag, ...], schema.items(0, 100)] = ()

    @property
    def is_unnamed(self) -> bool:
        """Whether the adapter has only the default name of `attach`, possibly with a number."""
        return re.fullmatch(rf"{UNNAMED}(-\d+)?", self.name) is not None

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
    checked, offenders = from_file(Manifest, manifest)
    if checked is not None:
        tree = to_dict(checked)
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
    manifest, needed, offenders = _parsed(data)
    if needed:
        raise FileError(
            f"{source} needs a newer adapterhub: it needs adapterhub {needed}",
            expected=f"schema version {SCHEMA_VERSION}, for adapterhub {__version__} or older",
            hint="pip install --upgrade adapterhub",
        )
    if manifest is None or offenders:
        raise FileError(
            f"{source} is not a valid adapter manifest",
            expected="the file exactly as adapterhub wrote it",
            hint="copy or pull the adapter again; if a newer adapterhub wrote it, upgrade",
            offenders=offenders,
        )
    return manifest


@lru_cache(maxsize=16)  # a pulled adapter's is read for its entry, check and load
def _parsed(data: bytes) -> tuple[Manifest | None, str, Sequence[str]]:
    """Return the manifest, the release that it needs if newer, and its problems."""
    tree, offenders = schema.parse_object(data, MAX_MANIFEST_BYTES)
    if needed := _newer(tree):
        return None, needed, ()
    fields = {name: value for name, value in tree.items() if name != "sha256"}
    manifest, problems = from_file(Manifest, fields)
    if tree or not offenders:
        offenders += [*problems, *_digest_problems(tree)]
    if not offenders and tree["sha256"] != _digest(fields):
        offenders = ["sha256: the manifest was altered after it was written"]
    if not offenders and (changed := schema.not_canonical(tree, data)):
        offenders = [changed]
    return manifest, "", schema.shorten(offenders)


def _newer(tree: Mapping[str, Any]) -> str:
    """Return the later version that a manifest needs; checked before misleading schema problems."""
    version, requires = tree.get("schema_version"), tree.get("requires")
    is_release = isinstance(requires, str) and re.fullmatch(_RELEASE, requires)
    if is_release and _release(str(requires)) > _release(__version__):
        return f">= {requires}"
    newer = type(version) is int and version > SCHEMA_VERSION
    return f"with schema version {version}" if newer else ""


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


def _digest_problems(tree: Mapping[str, Any]) -> list[str]:
    return _sha256("sha256", tree["sha256"]) if "sha256" in tree else ["sha256 is missing"]


def _digest(fields: Mapping[str, Any]) -> str:
    """Return the digest of all fields but the digest itself."""
    return hashlib.sha256(canonical_json(fields)).hexdigest()


_MOST_LABELS = 10  # of a head, in its description
ONE_HEAD, SEVERAL_HEADS = "head.", "heads."


def with_head(manifest: Manifest, head: str | None) -> Manifest:
    """Return the manifest of the adapter with only one of its heads.

    Its tensors have the names for one head; `name_in_file` returns the names in the file. Without
    several heads, the manifest is unchanged.

    `head` is None if the adapter has at most one.

    Raises:
        ConfigError: the adapter has several heads and `head` is missing, or it lacks this head.
    """
    if head is None and not manifest.heads:
        return manifest
    if head is None or head not in manifest.heads:
        raise _no_head(manifest, head)
    record, prefix = manifest.heads[head], f"{SEVERAL_HEADS}{head}."
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(SEVERAL_HEADS)}
    of_head = {n: t for n, t in manifest.tensors.items() if n.startswith(prefix)}
    tensors |= {f"{ONE_HEAD}{n.removeprefix(prefix)}": t for n, t in of_head.items()}
    return replace(
        manifest,
        name=f"{manifest.name}-{head}",
        task=record.task,
        labels=record.labels,
        head=record.head,
        heads={},
        tensors=tensors,
        training=_training_of(manifest.training, head),
        metrics=_of_head(manifest.metrics, head),
    )


def without_heads(manifest: Manifest) -> Manifest:
    """Return the manifest of the adapter without any head."""
    prefixes = (ONE_HEAD, SEVERAL_HEADS)
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(prefixes)}
    return replace(manifest, head=None, heads={}, labels=(), tensors=tensors)


def only_head(manifest: Manifest) -> Manifest:
    """Return the manifest of only the adapter's head, with its pooling of the states."""
    tensors = {n: t for n, t in manifest.tensors.items() if n.startswith(ONE_HEAD)}
    return replace(manifest, methods=({"head": {}},), tensors=tensors, tokens=(), on=())


def heads_text(manifest: Manifest) -> str:
    """Describe several heads: `rte (classification: no, yes), sts-b (regression)`."""
    return ", ".join(
        f"{name} ({record.task}{': ' * bool(record.labels)}{_few_heads(record.labels)})"
        for name, record in manifest.heads.items()
    )


def _few_heads(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_LABELS:,} more" if len(labels) > _MOST_LABELS else ""
    return ", ".join(labels[:_MOST_LABELS]) + more


def name_in_file(name: str, head: str | None) -> str:
    """Return the name of a tensor in the file, from its name in the adapter with one head."""
    if head is None or not name.startswith(ONE_HEAD):
        return name
    return f"{SEVERAL_HEADS}{head}.{name.removeprefix(ONE_HEAD)}"


def _no_head(manifest: Manifest, head: str | None) -> ConfigError:
    names, adapter = list(manifest.heads), repr(manifest.name)
    if not names:
        return ConfigError(
            f"the adapter {adapter} has no heads with names, so none is called {head!r}",
            hint="leave out the name of the head",
        )
    problem = f"the adapter {adapter} has {len(names)} heads: which one?"
    if head is not None:
        problem = f"the adapter {adapter} has no head {head!r}{did_you_mean(head, names)}"
    return ConfigError(
        problem,
        expected=f"one of {', '.join(names)}",
        hint=f'--head {names[0]}; in Python ah.load(..., head="{names[0]}")',
    )


def _training_of(training: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return the training record with the task and the data of one head in their usual place."""
    recipe = training.get("recipe")
    tasks = recipe.get("tasks") if isinstance(recipe, Mapping) else None
    own = tasks.get(head) if isinstance(tasks, Mapping) else None
    errors = training.get(ERRORS)
    if isinstance(errors, Mapping):
        training = {**training, ERRORS: _of_head(errors, head)}
    if not isinstance(recipe, Mapping) or not isinstance(own, Mapping):
        return dict(training)
    rest = {name: value for name, value in recipe.items() if name not in ("tasks", "mixing")}
    return {**training, "recipe": {**rest, "task": own.get("task"), "data": own.get("data") or {}}}


def _of_head(metrics: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return the values for the metrics of one head, under their usual names."""
    own_metrics = {}
    for name, value in metrics.items():
        tested = TEST if name.startswith(TEST) and head != TEST.rstrip("/") else ""
        own = name.removeprefix(tested)
        if own.startswith(f"{head}/"):
            own_metrics[tested + own.removeprefix(f"{head}/")] = value
    return own_metrics
