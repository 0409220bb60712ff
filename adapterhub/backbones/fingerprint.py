"""The identity of a backbone, its weights and its function, from a model or from files.

    fingerprint = "v2-" + sha256(lines of the token embedding and the body, of sampled values)
    line        = "name shape digest", sorted; see checkpoint.py for the digest

The fingerprint names the weights and is fast to compute. An identity has more fields, and is
compared when an adapter is loaded:

    config   the fields of the configuration that change the function of the backbone: the same
             weights compute another function with another activation, number of heads or rope
    parts    the digests of all values of the embedding, the body, the pooler and each head
    files    the sha256 of each weight file; if they are equal, values need not be read
    half     the fingerprint of an fp16 copy
    rows     the number of rows of the token embedding; the parts include `tokens` of them, because
             later rows only pad the vocabulary

Names are the names in a checkpoint (checkpoint.py). So the identity of a checkpoint is the same for
every class, dtype and quantization that it is loaded in. A pooler or head that only one side has
does not count as a difference. A model in memory has the identity of the files it was loaded from
if its values match the files: all values up to `SMALL`, a sample of larger models. Without such
files, a model of up to `SMALL` values is read completely, a larger one in samples. Tensors that are
quantized in memory, or were decoded from codes in the files, are not compared.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from adapterhub.anatomy.backbone import Backbone, has_values
from adapterhub.backbones.checkpoint import (
    HEAD_PART,
    CheckpointForm,
    Digests,
    ModuleForm,
    Table,
    combined,
    digest_table,
    form_of,
    in_checkpoint_form,
    opened_tensors,
    reader_of,
    remembered,
    remembered_table,
    stored_quantization,
    stored_reader,
    tensor_states,
    weight_files,
)
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.torch_free_checks import PIPELINE_INDEX
from adapterhub.errors import BackboneError

SMALL = 1 << 28  # values of a model in memory that can all be read in a second
VERSION = "v2"
EMBEDDING, BODY, POOLER = "embedding", "body", "pooler"


class Vocabulary(NamedTuple):
    """The number of embedding rows that count: `rows` in a sample, `tokens` in all values."""

    rows: int | None = None
    tokens: int | None = None

    def limit(self, *, sampled: bool) -> int | None:
        """Return the number of rows to read; None means all."""
        return self.rows if sampled else self.tokens

    def common(self, other: Vocabulary | None) -> Vocabulary:
        """Return the rows that two vocabularies share."""
        rows, tokens = map(_smaller, self, other or Vocabulary())
        return Vocabulary(rows, tokens)


@dataclass(frozen=True)
class BackboneIdentity:
    """The identity of a backbone; see the module for the fields.

    `parts` is empty if only a sample of the values was read.
    """

    fingerprint: str
    half: str
    config: Mapping[str, Any]
    rows: int | None = None
    tokens: int | None = None
    parts: Mapping[str, Digests] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, fingerprint: str, record: Mapping[str, Any]) -> BackboneIdentity:
        """Build an identity from its record in a manifest."""
        parts = {name: Digests(*digests) for name, digests in record["parts"].items()}
        others = {name: record[name] for name in ("half", "config", "rows", "tokens")}
        return cls(fingerprint, parts=parts, files=tuple(record["files"]), **others)

    def record(self) -> dict[str, Any]:
        """Return the fields of the identity in a manifest, without the fingerprint."""
        return {
            **{name: getattr(self, name) for name in ("half", "rows", "tokens", "strength")},
            "config": dict(self.config),
            "parts": {name: list(digests) for name, digests in self.parts.items()},
            "files": list(self.files),
        }

    @property
    def vocabulary(self) -> Vocabulary:
        """The rows of the token embedding that count."""
        return Vocabulary(self.rows, self.tokens)

    @property
    def strength(self) -> str:
        """The values that were read: `all`, or a `sample`."""
        return "all" if self.parts else "sample"

    def same_sample(self, other: BackboneIdentity) -> bool:
        """Return whether the sampled values may be the same numbers, one side possibly rounded."""
        sampled = Digests(self.fingerprint, self.half)
        return sampled.same(Digests(other.fingerprint, other.half))

    def different_parts(self, other: BackboneIdentity) -> list[str]:
        """List the parts that both have with different values."""
        if self.files and self.files == other.files:
            return []
        shared = sorted(self.parts.keys() & other.parts.keys())
        return [part for part in shared if not self.parts[part].same(other.parts[part])]


def fingerprint(backbone: str | Path, *, revision: str | None = None) -> str:
    """Compute the fingerprint of a backbone, a folder or a Hub id, without loading a model.

    Raises:
        BackboneError: the backbone was not found, or its files cannot be read.
    """
    folder, _ = find_backbone(str(backbone), revision)
    if (folder / PIPELINE_INDEX).is_file():
        return _of_pipeline(folder)
    return identity_of_files(folder, complete=False).fingerprint


def _of_pipeline(folder: Path) -> str:
    """Compute a fingerprint of a diffusers pipeline from its weights and configurations."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json"))
    digests = [remembered([file], "sha256", partial(_sha256, file)) for file in files]
    names = [file.relative_to(folder).as_posix() for file in files]
    named = "".join(f"{n} {digest}\n" for n, digest in zip(names, digests, strict=True))
    return f"pipeline-{hashlib.sha256(named.encode()).hexdigest()}"


def identity_of_files(
    folder: Path, *, vocabulary: Vocabulary | None = None, complete: bool = True
) -> BackboneIdentity:
    """Compute the identity of the checkpoint in a folder.

    Without a vocabulary, all rows of the token embedding count. A complete identity covers all
    values rather than a sample; they are read only once until the files change.

    Raises:
        BackboneError: the folder lacks a checkpoint, or the checkpoint is broken.
    """
    config = _config_in(folder)
    stored = StoredBackbone(folder, form_of(config), vocabulary or Vocabulary())
    return _identity(function_config(config), stored, complete)


def identity_of_model(
    model: nn.Module,
    named: Mapping[str, Tensor],
    *,
    origin: Path | None = None,
    vocabulary: Vocabulary | None = None,
    complete: bool = True,
    known: BackboneIdentity | None = None,
) -> BackboneIdentity:
    """Compute the identity of a model in memory.

    `named` maps paths to tensors, without tensors of adapters and new heads. `origin` is the folder
    they were loaded from. Without a vocabulary, all rows of the token embedding count. A complete
    identity covers all values if they are cheap to read. The parts of `known` are reused for files
    with the same sha256.

    Raises:
        BackboneError: the weights are quantized and do not match an origin, or the model lacks
            weights.
    """
    identities = ModelIdentities(model, named, origin, vocabulary or Vocabulary(), known)
    return identities.identity(complete=complete)


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((n for n in (first, second) if n is not None), default=None)


class StoredBackbone:
    """The tensors of a checkpoint in files."""

    def __init__(self, folder: Path, form: CheckpointForm, vocabulary: Vocabulary) -> None:
        self.files, self.form, self.vocabulary = weight_files(folder), form, vocabulary
        self._tables: dict[bool, Table] = {}

    def table(self, *, sampled: bool) -> Table:
        """Compute the digests of the tensors once; digests of all values are cached."""
        if sampled not in self._tables:
            self._tables[sampled] = self._digests(sampled=True) if sampled else self._remembered()
        return self._tables[sampled]

    def _remembered(self) -> Table:
        key = f"{VERSION} {self.vocabulary.tokens} {self.form.key}"
        table = remembered(self.files, key, lambda: self._digests(sampled=False))
        return {name: Digests(*digests) for name, digests in table.items()}

    def digests_of_files(self) -> tuple[str, ...]:
        """Compute the sorted sha256 of the weight files; the result is cached."""
        return tuple(sorted(remembered([f], "sha256", partial(_sha256, f)) for f in self.files))

    def codes(self) -> frozenset[str]:
        """Return the names of tensors that hold codes; a model may have decoded them."""
        names = self.form.names(self._names())
        with_codes: set[str] = set()
        for file in self.files:
            with opened_tensors(file) as tensors:
                with_codes |= {
                    names[t.name] for t in tensors if t.name in names and t.holds_codes()
                }
        return frozenset(with_codes)

    def _digests(self, *, sampled: bool) -> dict[str, Digests]:
        names = self.form.names(self._names())
        table: dict[str, Digests] = {}
        for file in self.files:
            with opened_tensors(file) as tensors:
                readers = [stored_reader(names[t.name], t) for t in tensors if t.name in names]
                rows = self.vocabulary.limit(sampled=sampled)
                limited = self.form.limited(readers, rows)
                table |= digest_table(limited, sampled=sampled)
        return table

    def _names(self) -> list[str]:
        """List the names of all tensors that have values."""
        stored: list[str] = []
        for file in self.files:
            with opened_tensors(file) as tensors:
                stored += [tensor.name for tensor in tensors if 0 not in tensor.shape]
        return stored


class LoadedBackbone:
    """The tensors of a model in memory."""

    def __init__(
        self,
        model: nn.Module,
        form: CheckpointForm,
        named: Mapping[str, Tensor],
        vocabulary: Vocabulary,
    ) -> None:
        self.model, self.form, self.named, self.vocabulary = model, form, named, vocabulary
        self._tables: dict[bool, Table] = {}

    @cached_property
    def _states(self) -> Any:
        """States that change with the values; None for a backbone too large to check."""
        return tensor_states(self.named) if self.is_small else None

    @property
    def is_small(self) -> bool:
        """Whether all values can be read in a second."""
        return sum(tensor.numel() for tensor in self.named.values()) <= SMALL

    def table(self, *, sampled: bool) -> Table:
        """Compute the digests of the tensors once."""
        if sampled not in self._tables:
            limits = self.vocabulary.limit(sampled=sampled), tuple(self._vocabulary_sizes())
            key = sampled, self.form.key, *limits
            compute = partial(self._digests, sampled=sampled)
            self._tables[sampled] = remembered_table(self.model, key, self._states, compute)
        return self._tables[sampled]

    def _digests(self, *, sampled: bool) -> Table:
        table: dict[str, Digests] = {}
        for layer in in_checkpoint_form(self.named, self.form):
            readers = [reader_of(name, tensor) for name, tensor in layer if tensor.numel()]
            rows = self.vocabulary.limit(sampled=sampled)
            limited = self.form.limited(readers, rows, self._vocabulary_sizes())
            table |= digest_table(limited, sampled=sampled)
        return table

    def _vocabulary_sizes(self) -> set[int]:
        """Return the numbers of rows of the embedding and the output layer."""
        backbone = Backbone.of(self.model)
        layers = (backbone.input_embedding, backbone.output_embedding)
        weights = (getattr(layer, "weight", None) for layer in layers)
        return {len(weight) for weight in weights if isinstance(weight, Tensor) and weight.ndim}

    def digests_of_files(self) -> tuple[str, ...]:
        """Return an empty tuple, since there are no files."""
        return ()


class ModelIdentities:
    """The identities of one model in memory, by a sample and by all values; values are read once.

    The arguments are the same as for `identity_of_model`.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, Tensor],
        origin: Path | None,
        vocabulary: Vocabulary,
        known: BackboneIdentity | None,
    ) -> None:
        self.backbone = Backbone.of(model)
        form, self.config = _form_and_facts(self.backbone)
        readable = {name: tensor for name, tensor in named.items() if has_values(tensor)}
        self.loaded = LoadedBackbone(model, form, readable, vocabulary)
        self.stored = None if origin is None else StoredBackbone(origin, form, vocabulary)
        self.quantized, self.known = len(readable) < len(named), known
        stored_kind = None if origin is None else stored_quantization(origin)
        self.is_decoded = stored_kind is not None and self.backbone.quantization is None

    def identity(self, *, complete: bool) -> BackboneIdentity:
        """Compute the identity; `complete` reads all values if that is cheap.

        Raises:
            BackboneError: the weights are quantized and do not match an origin, or are missing.
        """
        codes = self.stored.codes() if self.stored and self.is_decoded else frozenset()
        if self.stored and _is_load_of(self.loaded, self.stored, complete, codes):
            return _identity(self.config, self.stored, complete, self.known)
        # The files of another library's module are unknown: unquantized tensors identify it.
        if self.quantized and not self.backbone.foreign:
            raise BackboneError(
                "the weights are quantized and do not match a checkpoint on disk",
                expected="a model as loaded by load_backbone or from_pretrained",
                hint="load_backbone(FOLDER or HUB ID), and change its weights before quantizing "
                "them",
            )
        return _identity(self.config, self.loaded, complete and self.loaded.is_small)


def _form_and_facts(backbone: Backbone) -> tuple[CheckpointForm, dict[str, Any]]:
    """Return the stored names of the tensors, and the facts that change the function."""
    if backbone.config is None:
        options = {n: value for n, value in backbone.options.items() if not n.startswith("_")}
        facts: dict[str, Any] = _plain({"model_type": backbone.model_type, **options})
        return ModuleForm(), facts
    return form_of(backbone.config), function_config(backbone.config)


def _is_load_of(
    loaded: LoadedBackbone, stored: StoredBackbone, complete: bool, codes: frozenset[str]
) -> bool:
    """Return whether the values in memory match the files, possibly rounded.

    `complete` compares all values if that is cheap, rather than a sample. The tensors named in
    `codes` hold codes in the files, and are not compared.
    """
    agree = _values_agree(loaded.table(sampled=True), stored.table(sampled=True), codes)
    if agree and complete and loaded.is_small:
        return _values_agree(loaded.table(sampled=False), stored.table(sampled=False), codes)
    return agree


def _values_agree(loaded: Table, stored: Table, codes: frozenset[str]) -> bool:
    """Return whether two tables agree; a new pooler or head is missing from the files."""
    names = {key.partition(" ")[0] for key in stored} - codes
    known = [(key, d) for key, d in loaded.items() if key.partition(" ")[0] in names]
    return bool(known) and all(key in stored and d.values in stored[key] for key, d in known)


def _identity(
    config: Mapping[str, Any],
    backbone: StoredBackbone | LoadedBackbone,
    complete: bool,
    known: BackboneIdentity | None = None,
) -> BackboneIdentity:
    sampled = _parts(backbone.table(sampled=True), backbone.form)
    if EMBEDDING not in sampled and BODY not in sampled:
        raise BackboneError("a backbone without layers or token embeddings has no identity")
    digests = combined({name: sampled[name] for name in (EMBEDDING, BODY) if name in sampled})
    names = (f"{VERSION}-{digests.values}", f"{VERSION}-{digests.half}")
    identity = BackboneIdentity(*names, config, *backbone.vocabulary)
    if not complete:
        return identity
    files = backbone.digests_of_files()
    if known and known.parts and known.files == files and known.tokens == identity.tokens:
        return replace(identity, parts=known.parts, files=files)
    return replace(
        identity, parts=_parts(backbone.table(sampled=False), backbone.form), files=files
    )


def _parts(table: Table, form: CheckpointForm) -> dict[str, Digests]:
    """Compute the digests of the embedding, the body, the pooler and each head."""
    embedding = {d for key, d in table.items() if key.partition(" ")[0] == form.embedding}
    parts: dict[str, dict[str, Digests]] = {}
    for key, digests in table.items():
        part = _part(key.partition(" ")[0], form)
        if not (part.startswith(HEAD_PART) and digests in embedding):  # a tied output layer
            parts.setdefault(part, {})[key] = digests
    return {name: combined(tensors) for name, tensors in parts.items()}


def _part(name: str, form: CheckpointForm) -> str:
    top, *others = name.split(".")
    if top == HEAD_PART:
        return f"{HEAD_PART}.{others[0]}"
    if name == form.embedding:
        return EMBEDDING
    return POOLER if POOLER in (top, *others) else BODY


def _config_in(folder: Path) -> PreTrainedConfig:
    weight_files(folder)  # the usual reason is that this is not a backbone
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackboneError(
            f"{folder} has no configuration of a backbone: {error}",
            expected="config.json of a transformers checkpoint",
        ) from error


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 22):
            digest.update(block)
        return digest.hexdigest()


# They affect training, generation, the head or the outputs, or show in the shapes of tensors.
_WITHOUT_EFFECT = re.compile(
    r".*(dropout|pdrop|layerdrop).*|initializer_.*|init_std|.*_token_id|vocab_size|use_cache"
    r"|is_decoder|add_cross_attention|tie_word_embeddings|output_.*|router_(aux_loss_coef|jitter_noise)"
    r"|start_n_top|end_n_top|pretraining_tp|slow_but_exact|sparse_pred.*|deterministic_flash_attn"
    r"|max_position_embeddings|n_positions|ctc_(loss_reduction|zero_infinity)"
)
_BASE = frozenset(field.name for field in fields(PreTrainedConfig))


def function_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that change the function of the backbone."""
    chosen: dict[str, Any] = {"model_type": config.model_type}
    names = [f.name for f in fields(config) if f.name not in _BASE]
    fields_of = vars(config)  # an option that differs between layers lacks an attribute
    for name in names:
        value = fields_of.get(name, getattr(type(config), name, None))
        if isinstance(value, PreTrainedConfig):
            chosen[name] = function_config(value)
        elif not _WITHOUT_EFFECT.fullmatch(name) or _has_effect(name, config):
            chosen[name] = _plain(value)
    if layers := config.to_dict().get("per_layer_config"):
        chosen["per_layer_config"] = _plain(layers)
    return chosen


def _has_effect(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a length changes the function, as with a dynamic rope."""
    rope = str(getattr(config, "rope_parameters", None))
    return name == "max_position_embeddings" and "dynamic" in rope


def _plain(value: Any) -> Any:
    """Convert a value to JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if value is None or is_number or isinstance(value, str) else str(value)


def config_differences(
    recorded: Mapping[str, Any], current: Mapping[str, Any], path: str = ""
) -> list[str]:
    """List the fields that both configurations have with different values.

    Versions of transformers add and rename fields, so a field that only one side has is ignored.
    """
    problems = []
    for name in sorted(recorded.keys() & current.keys()):
        before, now = recorded[name], current[name]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            problems += config_differences(before, now, f"{path}{name}.")
        elif before != now:
            problems.append(f"{path}{name}: {now!r}, trained with {before!r}")
    return problems
