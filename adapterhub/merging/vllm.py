"""Export of an adapter as a LoRA for vLLM, with conversion of other methods.

LoRA, rsLoRA and PiSSA are copied without loading weights, also at routed experts. Other affine
changes of a projection, such as DoRA or IA3, become the closest LoRA of the server's rank, which
loses a part:

    lost     ||W' - W - s B A|| / ||W' - W|| of the projection where it is largest
    missed   ||z - z'|| / ||z' - z0|| of the outputs for a probe: z with the LoRA, z' with the
             adapter, z0 without

Other methods are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.compatibility import check_backbone_files
from adapterhub.adapters.export import (
    attach_without_weights,
    attached_for_a_check,
    kind_of_checkpoint,
)
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import disabled
from adapterhub.backbones.checkpoint import opened_tensors, weight_files
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.load import load_backbone, meta_model
from adapterhub.backbones.probe import probe
from adapterhub.errors import BackboneError, MismatchError
from adapterhub.files.card import model_kind
from adapterhub.files.manifest import Manifest, with_head
from adapterhub.files.native import Saved
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.files.schema import shorten
from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import NEW_TOKENS, is_low_rank, on_others
from adapterhub.interchange.peft.files import PeftFiles, write_peft
from adapterhub.interchange.peft.vllm import DEFAULT_RANK, architecture_problems, try_vllm
from adapterhub.merging.combine import combine
from adapterhub.merging.merge import blockers
from adapterhub.methods.common.base import Spec
from adapterhub.methods.common.experts import ExpertsUpdate
from adapterhub.methods.common.site_module import OutputModule
from adapterhub.status import doing

_EXPERT = re.compile(r"\.experts\.\d+\.")
MOST_LOST = 0.1  # share of the update of a projection, by default


@dataclass(frozen=True)
class VllmExport:
    """An adapter as a LoRA for vLLM.

    Attributes:
        files: the LoRA.
        lost: the largest lost share of a projection's update.
        missed: the missed share of the change of the outputs.
        template: the chat template, if it differs from the backbone's.
    """

    files: PeftFiles
    lost: float = 0.0
    missed: float = 0.0
    template: str | None = None

    @property
    def rank(self) -> int:
        """The rank of all updates."""
        return int(self.files.config["r"])

    @property
    def stacked(self) -> bool:
        """Whether it updates stacked weights of experts."""
        return bool(self.files.config.get("target_parameters"))

    @property
    def notes(self) -> list[str]:
        """Notes for the operator of the server."""
        notes = []
        if self.lost:
            notes.append(
                f"converted to a LoRA of rank {self.rank}, which loses up to {self.lost:.2%} of "
                f"the update of a projection and misses {self.missed:.2%} of the change of the "
                "outputs for a probe"
            )
        if self.files.ends:
            ends = ", ".join(map(str, self.files.ends))
            notes.append(f"it ends texts at the tokens {ends}: send them as stop_token_ids")
        if self.stacked:
            notes.append(
                "its experts are stacked, as in the checkpoint: where vLLM's class of the model "
                "does not stack them, start it with --enable-mixed-moe-lora-format, and load the "
                "adapter with is_3d_lora_weight"
            )
        if self.template is not None:
            notes.append("its chats have a template of their own: serve with --chat-template")
        return notes

    def write(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write the LoRA to a folder.

        Raises:
            OutputError: the folder exists (unless `overwrite`), or cannot be written.
        """
        card = "\n".join(["A LoRA for vLLM.", *(f"- {note}" for note in self.notes), ""])
        write_peft(folder, self.files, card=card, overwrite=overwrite, template=self.template)


def in_vllm(
    source: str | Path | Saved,
    *,
    backbone: str | None = None,
    head: str | None = None,
    max_rank: int = DEFAULT_RANK,
    max_lost: float = MOST_LOST,
) -> VllmExport:
    """Convert the adapter of a folder to a LoRA for vLLM.

    Args:
        source: the adapter, or its folder.
        backbone: the location of its backbone, if not recorded in its run or manifest.
        head: the head to export, of an adapter with several.
        max_rank: the server's `--max-lora-rank`.
        max_lost: the largest share of the update of a projection that may be lost.

    Raises:
        MismatchError: vLLM cannot serve it (lists every reason), too much would be lost, or the
            backbone differs.
        FileError: the folder lacks a valid adapter.
        BackboneError: the backbone cannot be loaded.
    """
    saved = Saved.at(source)
    manifest = with_head(saved.manifest, head)
    _refuse([NEW_TOKENS] if manifest.tokens else [])
    _refuse([on_others(ref.name for ref in manifest.on)] if manifest.on else [])
    if backbone is not None:
        check_backbone_files(manifest, backbone)
    location, revision = backbone_of_adapter(saved.folder, manifest, backbone)
    kind = model_kind(manifest) or kind_of_checkpoint(location, revision)
    options: dict[str, Any] = {"task": kind, "labels": manifest.labels, "revision": revision}
    adapter = attach_without_weights(meta_model(location, **options), saved)
    _refuse(_problems(adapter))
    template = _own_template(manifest, location, revision)
    if _is_exact(adapter):
        stacked = _has_stacked_experts(location, revision)
        files, problems = try_vllm(_named(adapter, manifest), max_rank, stacked=stacked)
        _refuse(problems)
        return VllmExport(files, template=template)
    with doing(f"loading {location}"):
        model, _ = load_backbone(location, **options)
    adapter = load_folder(model, saved, head=head or True)
    with doing(f"converting {manifest.name}"):
        converted, missed = _converted(adapter, max_rank)
    files, problems = try_vllm(_named(converted, manifest), max_rank)
    _refuse([*_biases(adapter, converted), *problems])
    lost = converted.metadata.training["combined"]["lost"]
    if lost > max_lost:
        raise MismatchError(
            f"as a LoRA of rank {max_rank}, {manifest.name} loses {lost:.1%} of the update of a "
            f"projection, and misses {missed:.1%} of the change of the outputs",
            expected=f"at most {max_lost:.1%} of an update",
            hint="a larger --max-lora-rank, also of the server, or a larger --max-lost (of vLLM's "
            "plugin: ADAPTERHUB_VLLM_MAX_LORA_RANK, ADAPTERHUB_VLLM_MAX_LOST); or adapterhub "
            "merge, and serve the merged model",
        )
    return VllmExport(files, lost, missed, template)


def blocking_vllm(
    model: PreTrainedModel, method: Spec, max_rank: int = DEFAULT_RANK
) -> tuple[list[str], bool]:
    """List the features of a method on a model that vLLM cannot serve, even converted.

    The model may lack weights (`meta_model`), and is restored afterwards.

    Returns:
        The reasons, and whether it is converted, with a loss that depends on the weights.

    Raises:
        ConfigError: an unknown method or option.
    """
    with attached_for_a_check(model, method) as adapter:
        if isinstance(adapter, list):
            return adapter, False
        exact, problems = _is_exact(adapter), _problems(adapter)
        if exact and not problems:
            problems = try_vllm(adapter.export_source(), max_rank)[1]
        return problems, not exact


def _refuse(problems: list[str]) -> None:
    if problems:
        raise MismatchError(
            "vLLM cannot serve the adapter",
            offenders=shorten(problems),
            expected="updates of projections of a language model: lora, rslora, pissa, dora, ia3",
            hint="adapterhub serve; or adapterhub merge, and serve the merged model",
        )


def _problems(adapter: Adapter) -> list[str]:
    """List what prevents an adapter from being a LoRA in vLLM, by method."""
    problems = architecture_problems(adapter.backbone) + blockers(adapter)
    problems += [
        f"{method.name}: trains parameters of the backbone whole; vLLM adds only low-rank updates "
        "to projections"
        for method in adapter.methods
        if any(part.trains_backbone for part in method.parts())
    ]
    exact = _is_exact(adapter)  # a conversion only covers the weights of projections
    held = {
        f"{part.method.name} at {part.site.stack}.{part.site.role}"
        for part in adapter.export_source().parts
        if part.site.held and not (exact and is_low_rank(part))
    }
    return problems + [
        f"{place}: only updates of projections are exported" for place in sorted(held)
    ]


def _is_exact(adapter: Adapter) -> bool:
    """Return whether all updates are low-rank, so that they can be copied."""
    modules = [placed.module for placed in adapter.placed]
    return all(
        isinstance(module, ExpertsUpdate)
        or (isinstance(module, OutputModule) and module.factors() is not None)
        for module in modules
    )


def _converted(adapter: Adapter, rank: int) -> tuple[Adapter, float]:
    """Attach the LoRA of a rank that is closest to an adapter; return it and its missed share."""
    model = adapter.backbone.pretrained
    expected = probe(model)
    with disabled(model):
        bare = probe(model)
    converted = combine(model, [adapter.name], rank=rank, name=f"{adapter.name} for vLLM")
    merged = probe(model)
    shares = (_share(merged[n], expected[n], bare[n]) for n in bare)
    return converted, max(shares)


def _share(merged: Tensor, expected: Tensor, bare: Tensor) -> float:
    moved = (expected - bare).float().norm().clamp(min=1e-30)
    return float((merged - expected).float().norm() / moved)


def _biases(adapter: Adapter, converted: Adapter) -> Iterator[str]:
    """Yield the methods that change biases."""
    if changed := converted.changed:
        names = ", ".join(dict.fromkeys(placed.method.name for placed in adapter.placed))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        yield f"{names}: changes {changed[0].name}{more}; vLLM has no biases in a LoRA"


def _has_stacked_experts(location: str, revision: str | None) -> bool | None:
    """Return whether a checkpoint lacks a module per expert; None if it lacks weights."""
    folder, _ = find_backbone(location, revision)
    try:
        files = weight_files(folder)
    except BackboneError:
        return None
    for file in files:
        with opened_tensors(file) as tensors:
            if any(_EXPERT.search(tensor.name) for tensor in tensors):
                return False
    return True


def _named(adapter: Adapter, manifest: Manifest) -> ExportSource:
    """Return the input of an exporter, with the backbone's name from the manifest."""
    backbone = manifest.backbone
    return replace(adapter.export_source(), backbone=backbone.id, revision=backbone.revision)


def _own_template(manifest: Manifest, location: str, revision: str | None) -> str | None:
    """Return the chat template of an adapter, unless it equals the backbone's."""
    if manifest.chat_template is None:
        return None
    folder, _ = find_backbone(location, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return manifest.chat_template
    own = tokenizer.chat_template
    own = own.get("default") if isinstance(own, dict) else own
    return None if own == manifest.chat_template else manifest.chat_template
