"""Start from a trained adapter: its tensors become the initial values of a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from adapterhub.adapters.adapter import HEAD, HEADS, Adapter
from adapterhub.adapters.attach import snapshot_for
from adapterhub.adapters.compatibility import (
    check_backbone,
    check_processor,
    check_size,
    check_values,
)
from adapterhub.adapters.state import get_state
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import Saved
from adapterhub.hooks.head import activation_between
from adapterhub.methods.common.base import method_text, restore_methods


@dataclass(frozen=True)
class StartedHead:
    """The result for the task head: taken from the saved adapter, or the reason why not."""

    taken: bool
    reason: str = ""


def start_from(adapter: Adapter, source: str | Path | Saved) -> StartedHead:
    """Copy the tensors of a saved adapter into a new one, with its head if the labels are the same.

    Raises:
        MismatchError: the saved adapter has another backbone, tokenizer, method, sizes or sites.
            Nothing is changed.
        FileError: the adapter's files are broken.
    """
    saved = Saved.at(source)
    manifest = saved.manifest
    check_backbone(manifest, get_state(adapter.model))
    check_processor(manifest, adapter.model, snapshot_for(adapter.backbone, None))
    _check_foundations(manifest, adapter)
    _check_methods(manifest, adapter)
    check_size(manifest, (), get_state(adapter.model))
    head = _head(manifest, adapter)
    tensors = saved.tensors()
    own = adapter.tensors()
    kept = {
        n: t
        for n, t in tensors.items()
        if n in own and (head.taken or not _is_of_head(n) or _is_fresh(n))
    }
    check_values(kept, adapter)
    with torch.no_grad():
        for name, tensor in kept.items():
            own[name].copy_(tensor)
    return head


def _check_foundations(manifest: Manifest, adapter: Adapter) -> None:
    """Refuse an adapter on other foundations than the saved adapter was trained on."""
    own = [each.ref for each in adapter.foundations()]
    if [ref.digest for ref in manifest.on] == [ref.digest for ref in own]:
        return
    raise MismatchError(
        f"this run cannot start from the adapter {manifest.name!r}: other adapters are below it",
        offenders=[f"it is on {', '.join(map(str, manifest.on)) or 'the bare backbone'}"],
        expected=f"this run is on {', '.join(map(str, own)) or 'the bare backbone'}",
        hint=" ".join(f"--on {ref}" for ref in manifest.on) or "leave out --on",
    )


def _check_methods(manifest: Manifest, adapter: Adapter) -> None:
    """Refuse another method, or one with other sizes, sites or scales."""
    saved = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    texts = [" + ".join(map(method_text, methods)) for methods in (saved, adapter.methods)]
    if problems := list(_differences(manifest, adapter)):
        raise MismatchError(
            f"this run cannot start from the adapter {manifest.name!r}: they differ",
            offenders=[f"it has {texts[0]}", f"this run has {texts[1]}", *problems[:5]],
            expected="the same method with the same sizes, sites and layers",
            hint="leave --method out, to use the adapter's; `adapterhub combine ADAPTER "
            "--rank N` writes a low-rank adapter in another rank",
        )


def _differences(manifest: Manifest, adapter: Adapter) -> Iterator[str]:
    own, theirs = dict(adapter.tensors()), dict(manifest.tensors)
    # One of the two models may have a language-model head that its checkpoint lacks.
    heads = {n for n in own.keys() ^ theirs.keys() if _is_fresh(n)}
    heads |= {n for n in own.keys() | theirs.keys() if _is_of_head(n)}
    own = {n: t for n, t in own.items() if n not in heads}
    theirs = {n: t for n, t in theirs.items() if n not in heads}
    yield from (f"its files lack {name}" for name in own if name not in theirs)
    yield from (f"only its files have {name}" for name in theirs if name not in own)
    for name in own.keys() & theirs.keys():
        if tuple(own[name].shape) != theirs[name].shape:
            yield f"{name}: {theirs[name].shape} in its files, here {tuple(own[name].shape)}"
    saved = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    for method, other in zip(saved, adapter.methods, strict=False):
        theirs_of, ours_of = method.options(), other.options()
        for name in theirs_of.keys() & ours_of.keys() - set(method.training_options):
            if theirs_of[name] != ours_of[name]:
                yield f"{name}: {theirs_of[name]} in its files, here {ours_of[name]}"


def _is_of_head(name: str) -> bool:
    return name.startswith((f"{HEAD}.", f"{HEADS}."))


def _is_fresh(name: str) -> bool:
    """Return whether a tensor is newly initialized: the checkpoint lacks it."""
    return name.rpartition(".")[0].endswith(".fresh")


def _head(manifest: Manifest, adapter: Adapter) -> StartedHead:
    """Return whether the head of a saved adapter fits a new one's task, labels and sizes."""
    if adapter.head is None:
        return StartedHead(False)
    if manifest.heads:
        return StartedHead(False, "it has several")
    if manifest.head is None:
        return StartedHead(False, "it has none")
    if manifest.labels != adapter.labels:
        return StartedHead(False, "the labels are others")
    if manifest.head.problem_type != adapter.problem_type:
        return StartedHead(False, f"its problem type is {manifest.head.problem_type}")
    if manifest.head.pooling != (adapter.pooling.how if adapter.pooling else None):
        return StartedHead(False, "it reads another state of each text")
    if manifest.head.activation != activation_between(adapter.head.own):
        return StartedHead(False, "its layers are others")
    own = {n: tuple(t.shape) for n, t in adapter.tensors().items() if _is_of_head(n)}
    saved = {n: t.shape for n, t in manifest.tensors.items() if _is_of_head(n)}
    return StartedHead(True) if own == saved else StartedHead(False, "its layers are others")
