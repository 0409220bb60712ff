"""The tensors of a base model under the names that they have in a checkpoint.

transformers renames, fuses and splits tensors on loading, and undoes this on saving. Checkpoints of
one backbone differ in their heads, and all names in one may have a prefix: `encoder.layer.0...` is
`bert.encoder.layer.0...` in the checkpoint of a classifier. The names here are those that
`AutoModel.save_pretrained` writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from adapterhub.anatomy.own_modules import new_base_model, own_modules
from adapterhub.anatomy.sites import join, own_parameters
from adapterhub.backbones.tensor_digests import TensorReader
from adapterhub.errors import BackboneError

HEAD_PART = "head"  # starts the names of tensors outside of the base model
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of layer norms in checkpoints of 2019
# Of a configuration: the base model does not depend on them.
_UNUSED = ("quantization_config", "id2label", "label2id", "_name_or_path", "problem_type")
_LAYER = re.compile(r"^.*?\.\d+\.")


class CheckpointForm:
    """The names of the tensors of a base model.

    Attributes:
        embedding: the name of the token embedding; None if the model has none.
        rows: the number of its rows.
        key: a text that differs for other names or sizes.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        stored = self.as_stored(named_tensors(base))
        first: dict[int, str] = {}
        # Tied tensors have the name of the first; a checkpoint may contain any of them.
        self._names = {name: first.setdefault(id(t), name) for name, t in stored.items()}
        self._hosts = {name.rpartition(".")[0] for name in stored} - {""}
        self._tops = {name.partition(".")[0] for name in stored}
        table = _embedding(base)
        self.embedding = first.get(id(table))
        self.rows = None if table is None else table.shape[0]
        shapes = sorted((name, tuple(tensor.shape)) for name, tensor in stored.items())
        self.key = hashlib.sha256(repr(shapes).encode()).hexdigest()

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename and split tensors as on saving; those of a model, or of some of its layers.

        The conversions are those of the base model: a loaded model also has those of its
        quantization, which cannot be undone.
        """
        stored: dict[str, Tensor] = revert_weight_conversion(self._base, dict(tensors))
        return stored

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Map the names in a checkpoint to those here; those of heads stay, constants are left out.

        A head is outside of the base model; constants, such as masks, are inside.
        """
        stored = list(stored)
        prefixes = Counter(p for name in stored for p in self._prefixes(name))
        (prefix, _), *_ = prefixes.most_common(1) or [("", 0)]
        names = {
            old: self._name(old.removeprefix(prefix)) or self._head(old, prefix) for old in stored
        }
        return {old: new for old, new in names.items() if new}

    def limited(
        self, readers: Sequence[TensorReader], rows: int | None, sizes: Iterable[int] = ()
    ) -> list[TensorReader]:
        """Mark the tensors that have a row for each token, and leave out their later rows.

        These are the embedding, and tensors of heads with as many rows, or as many as in `sizes`.
        All rows count if `rows` is None.
        """
        here = (r.shape[0] for r in readers if r.name == self.embedding)
        tables = {*sizes, *here, self.rows}
        flat = [_without_batch(r) if r.name.startswith(HEAD_PART) else r for r in readers]
        return [
            reader._replace(is_table=True).limited(rows)
            if reader.name == self.embedding
            or (reader.name.startswith(HEAD_PART) and {*reader.shape[:1]} & tables)
            else reader
            for reader in flat
        ]

    def prefix_in_memory(self, paths: Iterable[str]) -> str:
        """Return the path of the base model inside a model with these tensors, with a dot.

        Conversions on saving may begin with a name of the base model, and match no longer one.
        """
        ends = {f".{path}": path for path in named_tensors(self._base)}
        prefixes = Counter(
            path[: start + 1]
            for path in paths
            for start in (match.start() for match in re.finditer(r"\.", path))
            if path[start:] in ends
        )
        known = sum(path in ends.values() for path in paths)
        (prefix, number), *_ = prefixes.most_common(1) or [("", 0)]
        return prefix if number > known else ""

    def _head(self, stored: str, prefix: str) -> str:
        top = stored.partition(".")[0]
        inside = top == prefix[:-1] if prefix else top in self._tops
        return "" if inside else f"{HEAD_PART}.{stored}"

    def _prefixes(self, stored: str) -> Iterator[str]:
        starts = (0, *(match.end() for match in re.finditer(r"\.", stored)))
        return (stored[:i] for i in starts if self._name(stored[i:]) is not None)

    def _name(self, stored: str) -> str | None:
        host, _, leaf = stored.rpartition(".")
        name = f"{host}.{_OLD_NAMES[leaf]}" if leaf in _OLD_NAMES else stored
        if name in self._names:
            return self._names[name]
        # The codes and scales of a quantized checkpoint: q_proj.qweight, q_proj.weight.absmax.
        return name if host in self._hosts or host in self._names else None


class ModuleForm(CheckpointForm):
    """The names of the tensors of a module that is not of transformers: their own."""

    def __init__(self) -> None:
        self.embedding = self.rows = None
        self.key = "module"

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as they are."""
        return dict(tensors)

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Return each name as it is."""
        return {name: name for name in stored}

    def prefix_in_memory(self, paths: Iterable[str]) -> str:
        """Return "": paths are names."""
        return ""


def form_of(config: PreTrainedConfig) -> CheckpointForm:
    """Return the names of the tensors of the base model that a configuration describes.

    Raises:
        BackboneError: transformers has no model for it.
    """
    facts = {key: value for key, value in config.to_dict().items() if key not in _UNUSED}
    text = json.dumps(facts, sort_keys=True, default=str)
    return _cached_form(type(config), text)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _cached_form(kind: type[PreTrainedConfig], facts: str) -> CheckpointForm:
    config = kind.from_dict(json.loads(facts))
    try:
        with torch.device("meta"):
            return CheckpointForm(new_base_model(config))
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise BackboneError(
            f"transformers cannot build a model of type {config.model_type!r}: {error}",
            expected="a configuration with a class of an auto class",
        ) from error


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Map the names of a model's parameters and saved buffers to them; tied ones have several.

    Those of adapters in slots are left out.
    """
    named: dict[str, Tensor] = {
        join(path, name): parameter
        for path, module in own_modules(model, every_use=True)
        for name, parameter in own_parameters(module)
    }
    for path, module in own_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                named[f"{path}.{name}" if path else name] = buffer
    return named


def in_checkpoint_form(
    named: Mapping[str, Tensor], form: CheckpointForm
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of a model as they would be saved, layer by layer: name and tensor.

    Fused tensors are split, which copies them: so only those of one layer are copied at a time.
    """
    prefix = form.prefix_in_memory(named)
    named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
    sizes = {name: torch.empty(t.shape, device="meta") for name, t in named.items()}
    names = form.names(form.as_stored(sizes))
    for _, layer in groupby(named.items(), key=lambda pair: _LAYER.findall(pair[0])):
        stored = form.as_stored(dict(layer))
        yield [(names[name], tensor) for name, tensor in stored.items() if name in names]


def _without_batch(reader: TensorReader) -> TensorReader:
    """Return a bias of logits that is stored as (1, n) as (n,)."""
    is_row = len(reader.shape) == 2 and reader.shape[0] == 1
    return reader._replace(shape=reader.shape[1:]) if is_row else reader


def _embedding(model: PreTrainedModel) -> Tensor | None:
    try:
        return getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None
