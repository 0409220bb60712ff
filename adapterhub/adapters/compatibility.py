"""Check whether a saved adapter fits a model: backbone, tokenizer, size, tensors, head."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import HEAD, Adapter, AdapterHead, PlacedModule
from adapterhub.adapters.state import ModelState, find_state, new_state
from adapterhub.anatomy.backbone import DTYPES, Backbone, device_of, local_name
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.checkpoint import HEAD_PART
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.fingerprint import (
    BackboneIdentity,
    ModelIdentities,
    config_differences,
    identity_of_files,
)
from adapterhub.backbones.processor import TokenizerSnapshot, processor_identity
from adapterhub.backbones.quantized import DECODED
from adapterhub.backbones.sentence_modules import modules_of_model
from adapterhub.config.user_folders import expanded, is_folder, is_local_name, is_there
from adapterhub.errors import BackboneError, MismatchError, counted
from adapterhub.files.manifest import Manifest, TensorInfo, first_id
from adapterhub.hooks.head import layered_head
from adapterhub.interchange.translation import ImportedAdapter
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.generated import place_limits
from adapterhub.methods.common.projections import weight_at

SMALL = 1 << 22  # numbers; 16 MiB of fp32


def check_backbone(manifest: Manifest, state: ModelState) -> None:
    """Refuse an adapter that was trained on a different backbone, by its identity.

    Raises:
        MismatchError: the backbones differ; the error names both and lists the differences. Or the
            modules of sentence-transformers differ; the error names the required ones.
    """
    if differences := backbone_differences(manifest, state):
        raise _other_backbone(manifest, state.backbone.source, differences)
    recipe = manifest.training.get("recipe")
    task = recipe.get("task") if isinstance(recipe, Mapping) else None
    for options in task.values() if isinstance(task, Mapping) else ():
        if isinstance(options, Mapping) and isinstance(recorded := options.get("modules"), str):
            modules_of_model(state.model, recorded)


def _other_backbone(manifest: Manifest, actual: str, differences: Sequence[str]) -> MismatchError:
    trained_on = manifest.backbone
    at = f" at {trained_on.revision}" if trained_on.revision else ""
    return MismatchError(
        f"the adapter {manifest.name!r} was trained on a different backbone",
        offenders=[f"this model: {actual}", *differences],
        expected=f"{trained_on.id}{at}, {trained_on.fingerprint}",
        hint=f"--backbone {trained_on.location}; in Python load_backbone({trained_on.location!r}), "
        "or load(..., any_backbone=True)",
    )


def backbone_differences(manifest: Manifest, state: ModelState) -> list[str]:
    """List the differences between a model and the backbone that an adapter was trained on.

    The configuration and a sample of the values are compared first. All values follow if the
    manifest has their digests. A language-model head matters only to adapters without a task head.
    """
    trained_on = manifest.backbone
    trained = BackboneIdentity.from_record(trained_on.fingerprint, trained_on.identity)
    own_head = manifest.head is not None
    return identity_differences(trained, state.identities(trained), without_head=own_head)


def identity_differences(
    trained: BackboneIdentity, identities: ModelIdentities, *, without_head: bool
) -> list[str]:
    """List the differences between a model and the backbone that an adapter was trained on.

    `without_head` ignores the values of a language-model head.
    """
    problems = _sample_differences(trained, identities.identity(complete=False))
    if problems or not trained.parts:
        return problems
    parts = identities.identity(complete=True).different_parts(trained)
    return [f"{p}: other values" for p in parts if not (without_head and p.startswith(HEAD_PART))]


def _sample_differences(trained: BackboneIdentity, sampled: BackboneIdentity) -> list[str]:
    problems = config_differences(trained.config, sampled.config)
    if (sampled.tokens or 0) < (trained.tokens or 0):
        problems.append(f"token embedding: {sampled.tokens} rows, trained with {trained.tokens}")
    if not sampled.same_sample(trained):
        problems.append(f"weights: {sampled.fingerprint}")
    return problems


def check_backbone_files(manifest: Manifest, backbone: str, revision: str | None = None) -> None:
    """Refuse an adapter if the backbone in files has another fingerprint than in training.

    No model is loaded; only a sample of the values is read.

    Raises:
        BackboneError: the backbone was not found, or its files cannot be read.
        MismatchError: the backbones differ; the error names both and lists the differences.
    """
    folder, _ = find_backbone(backbone, revision)
    trained = BackboneIdentity.from_record(
        manifest.backbone.fingerprint, manifest.backbone.identity
    )
    actual = identity_of_files(folder, vocabulary=trained.vocabulary, complete=False)
    if differences := _sample_differences(trained, actual):
        raise _other_backbone(manifest, backbone, differences)


def check_backbone_name(imported: ImportedAdapter, model: nn.Module) -> list[str]:
    """Compare the backbone's name and commit, the only facts that other libraries record.

    Returns:
        Notes on facts that could not be compared.

    Raises:
        MismatchError: they differ.
    """
    backbone = Backbone.of(model)
    recorded, name = imported.backbone, backbone.source
    at = f" at {imported.revision}" if imported.revision else ""
    other = MismatchError(
        f"the adapter {imported.name!r} was trained on a different backbone",
        offenders=[f"this model: {name}"],
        expected=f"{recorded}{at}",
        hint=f"--backbone {recorded}, or --any-backbone; in Python load_backbone({recorded!r}), or "
        "load(..., any_backbone=True)",
    )
    if recorded and is_local_name(recorded):
        if recorded.endswith(tuple(_local_names(model))):
            return []
        raise other
    if recorded and (same := _is_checkpoint_of(expanded(recorded), model)) is not None:
        if same:
            return []
        raise other
    if not recorded or not name:
        return ["the files or the model do not name their backbone: it was not checked"]
    if Path(recorded).is_absolute() or recorded.startswith(".") or recorded.count("/") > 1:
        return [f"the files name a folder as their backbone ({recorded}): it was not checked"]
    if is_there(name) and not is_there(recorded):
        return [f"the backbone is the folder {name}, the files name {recorded}: it was not checked"]
    commits = {imported.revision, getattr(backbone.config, "_commit_hash", None)}
    one_commit = len(commits) == 1 or not all(
        re.fullmatch("[0-9a-f]{40}", commit or "") for commit in commits
    )
    if recorded == name and one_commit:
        return []
    raise other


def _is_checkpoint_of(folder: Path, model: nn.Module) -> bool | None:
    """Return whether a folder holds a model's weights, without heads; None if it has no weights."""
    origin = Backbone.of(model).origin
    try:
        if not is_folder(folder):
            return None
        if origin and origin.samefile(folder):
            return True
        trained = identity_of_files(folder)
        actual = (find_state(model) or new_state(model)).identities(trained)
        return not identity_differences(trained, actual, without_head=True)
    except (BackboneError, OSError):
        return None


def _local_names(model: nn.Module) -> Iterator[str]:
    """Yield the suffixes of names that adapters record for a backbone that is not on the Hub."""
    state = find_state(model) or new_state(model)
    yield local_name("", state.fingerprint)


def check_processor(
    manifest: Manifest, model: nn.Module, snapshot: TokenizerSnapshot | None
) -> None:
    """Refuse an adapter that was trained with another tokenizer or processor.

    Raises:
        MismatchError: they differ; the error names both.
    """
    if snapshot:
        _check_tokenizer(manifest, snapshot)
    backbone = Backbone.of(model)
    actual = processor_identity(backbone.processor)
    if actual and manifest.processor not in (None, actual):
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained with other settings of the processor",
            offenders=[f"the processor of {backbone.source}: {actual}"],
            expected=f"that of {manifest.backbone.id}, {manifest.processor}",
            hint=f"--backbone {manifest.backbone.location}; in Python "
            f"load_backbone({manifest.backbone.location!r}), or load(..., any_tokenizer=True)",
        )


def _check_tokenizer(manifest: Manifest, snapshot: TokenizerSnapshot) -> None:
    identity = snapshot.identity(first_id(manifest.tokens))
    if manifest.tokenizer not in (None, identity):
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained with a different tokenizer",
            offenders=[f"this tokenizer: {snapshot.tokenizer.name_or_path}, {identity}"],
            expected=f"that of {manifest.backbone.id}, {manifest.tokenizer}",
            hint=f"--backbone {manifest.backbone.location}; in Python "
            f"load_backbone({manifest.backbone.location!r}), or load(..., any_tokenizer=True)",
        )


def check_size(manifest: Manifest, methods: Sequence[Method], state: ModelState) -> None:
    """Refuse methods with far more numbers than the file, before memory is allocated.

    Also refuse a file that is too large for the model, before it is read. Smaller mismatches are
    built, so that the error can list each tensor that does not fit.

    Raises:
        MismatchError: the methods or the file are too large.
    """
    declared = sum(math.prod(info.shape) for info in manifest.tensors.values())
    needed = sum(method.count(state.anatomy) for method in methods)
    if needed > 4 * declared + SMALL:
        raise MismatchError(
            f"the adapter {manifest.name!r} does not fit this model",
            offenders=[f"its methods have {needed} numbers on this model, its file {declared}"],
            expected="a file with the tensors of its methods",
        )
    if manifest.nbytes > (most := state.anatomy.most_bytes()):
        raise MismatchError(
            f"the adapter {manifest.name!r} does not fit this model",
            offenders=[f"its tensors have {manifest.nbytes} bytes"],
            expected=f"at most {most} bytes: far more than all weights of the model",
        )


def check_precision(manifest: Manifest, adapter: Adapter) -> None:
    """Refuse another precision than in training, if loading decomposes the weights again.

    Rounded weights have other components. Weights that are exact in the dtype of training are the
    same in a wider one, and so are decoded weights.

    Raises:
        MismatchError: the components would be others.
    """
    trained = (manifest.backbone.dtype, manifest.backbone.quantization)
    placed = [each for each in adapter.placed if each.method.decomposes_again()]
    if not placed or trained[0] is None:
        return
    actual = adapter.backbone.dtype_and_quantization(adapter.state.originals())
    if actual == trained or _as_exact(trained, actual, placed, adapter.anatomy):
        return
    precisions = [" ".join(filter(None, each)) for each in (actual, trained)]
    named = zip(("dtype", "quantize"), trained, strict=True)
    options = [f"{name}={value!r}" for name, value in named if value]
    names = sorted({each.method.name for each in placed})
    can_store = hasattr(placed[0].method, "stored")
    raise MismatchError(
        f"the adapter {manifest.name!r} was trained on components of weights in another precision, "
        "and its file does not contain them",
        offenders=[f"this model: {precisions[0]}", *names],
        expected=f"a backbone in {precisions[1]}, as in training",
        hint=f"load_backbone({manifest.backbone.location!r}, {', '.join(options)})"
        + f", or train with {placed[0].method.name}(stored=true)" * can_store,
    )


def _as_exact(
    trained: Sequence[str | None],
    actual: Sequence[str | None],
    placed: Iterable[PlacedModule],
    anatomy: Anatomy,
) -> bool:
    """Return whether unquantized weights are exact in the dtype of training."""
    narrow, wide = (DTYPES.get(dtype or "") for dtype, _ in (trained, actual))
    # Weights decoded while loading have the values of the codes.
    coded = [kind for _, kind in (trained, actual) if kind and kind not in DECODED]
    if coded or narrow is None or wide is None:
        return False
    if torch.promote_types(narrow, wide) != wide:
        return False
    weights = (weight_at(each.site, anatomy) for each in placed)
    return all(w.is_meta or torch.equal(w.to(narrow).to(w.dtype), w) for w in weights)


def check_tensors(manifest: Manifest, adapter: Adapter) -> None:
    """Refuse missing and unexpected tensors, and other shapes than the model needs.

    Raises:
        MismatchError: some do not fit; the error lists every such tensor.
    """
    own, tensors = adapter.tensors(), manifest.tensors
    problems = [f"missing: {name}" for name in sorted(own.keys() - tensors.keys())]
    problems += [f"unexpected: {name}" for name in sorted(tensors.keys() - own.keys())]
    problems += [
        f"{name}: shape {tensors[name].shape}, the backbone needs {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if tuple(own[name].shape) != tensors[name].shape
    ]
    if problems:
        raise MismatchError(
            f"the adapter {adapter.name!r} does not fit this model", offenders=problems
        )


def check_values(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Refuse numbers that are not finite in the dtype that they get on this model.

    Values must be finite in the dtype of the adapter's tensor. Except in a task head, they must
    also be finite in the backbone's dtype: a file may have F64, and 1e5 is infinite in fp16.

    Raises:
        MismatchError: some are not finite; the error lists every such tensor.
    """
    own, backbone = adapter.tensors(), adapter.backbone.dtype
    check_places(tensors, adapter)
    problems = []
    for name, tensor in tensors.items():
        if not own[name].is_floating_point():
            continue
        dtypes = (own[name].dtype,) if name.startswith(f"{HEAD}.") else (own[name].dtype, backbone)
        extremes = torch.stack(tensor.detach().aminmax()).double()
        for dtype in dtypes:
            if not bool(extremes.to(dtype).isfinite().all()):
                worst = float(max(extremes, key=abs))
                problems.append(f"{name}: {worst:.3g} in {tensor.dtype}, infinite in {dtype}")
                break
    if problems:
        raise MismatchError(
            f"numbers of the adapter {adapter.name!r} become infinite on this model",
            expected="numbers within the range of the model's dtype",
            hint="load the backbone with dtype='fp32', or copy or pull the adapter again",
            offenders=problems,
        )


def check_places(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Refuse positions in weights that are not integers or are out of range.

    Raises:
        MismatchError: some are invalid; the error lists every such tensor.
    """
    own = adapter.tensors()
    limits = {
        f"{placed.site.id}.{placed.method.name}.{name}": limit
        for placed in adapter.placed
        for name, limit in place_limits(placed.module).items()
    }
    problems = [
        f"{name}: {tensor.dtype}, must be {own[name].dtype}"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not own[name].is_floating_point()
    ]
    for name in limits.keys() & tensors.keys():
        low, high = tensors[name].long().aminmax()
        if not 0 <= low <= high < limits[name]:
            problems.append(f"{name}: {int(low)} to {int(high)}, must be 0 to {limits[name] - 1}")
    if problems:
        raise MismatchError(
            f"places of the adapter {adapter.name!r} do not fit this model",
            expected="places inside the weights",
            offenders=problems,
        )


def fit_head(manifest: Manifest, adapter: Adapter) -> None:
    """Give an adapter a head of the saved size, with its labels.

    Raises:
        MismatchError: the model has no head, or its head cannot have as many outputs.
    """
    saved = manifest.head
    if saved is None:
        adapter.head = None
    elif adapter.head is None:
        raise MismatchError(
            f"the adapter {manifest.name!r} has a task head, the model has none",
            hint=f"load_backbone({manifest.backbone.location!r}, task={saved.kind!r}, "
            f"labels={list(manifest.labels)!r})",
        )
    elif adapter.backbone.foreign:  # its own head size, and no class names
        return
    elif saved.activation:
        adapter.head = _layered(adapter.head, saved.activation, manifest)
        _set_head_labels(adapter.head, manifest, saved.problem_type)
    else:
        old, outputs = adapter.backbone.pretrained.config.num_labels or 0, len(manifest.labels) or 1
        heads = adapter.head.own.items()
        resized = [_resize(m, f"{HEAD}.{n}", manifest.tensors, old, outputs) for n, m in heads]
        if outputs != old and not any(resized):
            raise MismatchError(
                f"the adapter {manifest.name!r} does not fit this model",
                offenders=[
                    f"{counted(outputs, 'label')}, and no head with as many outputs in its file"
                ],
                expected="one output for each label",
            )
        _set_head_labels(adapter.head, manifest, saved.problem_type)


def _layered(head: AdapterHead, activation: str, manifest: Manifest) -> AdapterHead:
    """Return a head with the layers of a file instead of the layers of the model's class."""
    prefix = f"{HEAD}."
    infos = {n: i.shape for n, i in manifest.tensors.items() if n.startswith(prefix)}
    shapes = {name.removeprefix(prefix): shape for name, shape in infos.items()}
    try:
        own = layered_head(head.original, shapes, activation)
    except (KeyError, ValueError) as error:
        raise MismatchError(
            f"the head of the adapter {manifest.name!r} cannot be built on this model: {error}",
            offenders=[f"activation {activation}", *(f"{n}: {s}" for n, s in infos.items())],
            expected="the weights of one or two linear layers",
        ) from error
    for name, module in own.items():
        module.to(device_of(head.own[name])).train(head.own[name].training)
    return replace(head, own=own)


def _resize(
    head: nn.Module, prefix: str, tensors: Mapping[str, TensorInfo], old: int, outputs: int
) -> bool:
    """Replace the output layer of a head with `old` rows by a layer with `outputs` rows.

    Returns whether the head had such a layer.
    """
    resized = False
    for path, module in head.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            saved = tensors.get(".".join(part for part in (prefix, path, name) if part))
            fits = saved is not None and saved.shape == (outputs, *parameter.shape[1:])
            if fits and parameter.shape[0] == old != outputs:
                setattr(module, name, nn.Parameter(torch.empty(saved.shape, dtype=parameter.dtype)))  # type: ignore[union-attr]
                resized = True
                if isinstance(module, nn.Linear):
                    module.out_features = outputs
    return resized


def _set_head_labels(head: AdapterHead, manifest: Manifest, problem_type: str | None) -> None:
    labels = manifest.labels or ("LABEL_0",)
    head.labels = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": problem_type if manifest.labels else "regression",
    }
