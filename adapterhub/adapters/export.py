"""Convert a saved adapter to peft's format, without loading its backbone's weights.

The backbone is built without weights from its configuration, and the adapter is attached to it. The
weights are loaded only if peft's files contain some of them: peft saves a whole module even if an
adapter trains only a part of it.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import attach
from adapterhub.adapters.load import adopted_family, load_folder
from adapterhub.adapters.route import activate
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.compare import same
from adapterhub.backbones.load import load_backbone, meta_model
from adapterhub.backbones.meta_model import stand_in
from adapterhub.backbones.probe import probe_batch
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import AdapterhubError, BackboneError, ConfigError
from adapterhub.files.card import model_kind
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import Saved
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.interchange.peft.exporter import NEW_TOKENS, on_others, to_peft, try_peft
from adapterhub.interchange.peft.files import PeftFiles, write_peft
from adapterhub.methods.common.base import Spec, parse_methods
from adapterhub.status import quiet_loading

_TOKENS, _PADDING = 11, 4
_PER_TOKEN = ("start_logits", "end_logits")


@dataclass(frozen=True)
class PeftExport:
    """An adapter in peft's format: its files, or the problems that prevent them.

    `kind` is the adapter's kind of model, if known.
    """

    files: PeftFiles | None
    problems: tuple[str, ...]
    kind: str | None


def in_peft(source: Path | Saved, backbone: str | None = None) -> PeftExport:
    """Convert the adapter of a folder to peft's format; problems are returned, not raised.

    If peft is installed, its outputs are compared with the adapter's outputs on a stand-in for the
    backbone; a difference is a problem.

    `backbone` is the location of the backbone, by default the one in its run or manifest.

    Raises:
        FileError: the folder has no valid adapter.
        BackboneError: `backbone` is given and cannot be read.
    """
    saved = Saved.at(source)
    manifest = saved.manifest
    location, revision = backbone_of_adapter(saved.folder, manifest, backbone)
    if location == manifest.backbone.id:
        revision = manifest.backbone.revision
    kind = model_kind(manifest)
    if manifest.tokens:
        return PeftExport(None, (NEW_TOKENS,), kind)
    if manifest.on:
        return PeftExport(None, (on_others(ref.name for ref in manifest.on),), kind)
    try:
        kind = kind or kind_of_checkpoint(location, revision)
        options: dict[str, Any] = {"task": kind, "labels": manifest.labels, "revision": revision}
        result = _export_without_weights(meta_model(location, **options), saved)
        if result is None:
            model, _ = load_backbone(location, **options)
            result = _export(load_folder(model, saved), manifest)
        files, problems = result
        if not problems and peft_is_installed():
            bare = meta_model(location, **options)
            problems = compare(lambda: _on_a_stand_in(bare, saved))
    except AdapterhubError as error:
        if isinstance(error, BackboneError) and backbone is not None:
            raise
        # Published problems name no local folder.
        problem = " ".join(error.problem.replace(location, manifest.backbone.id).split())
        return PeftExport(None, (problem,), kind)
    return PeftExport(None if problems else files, tuple(problems), kind)


def blocking(model: PreTrainedModel, method: Spec) -> list[str]:
    """List the features of a method that peft does not support on a model.

    The model may be without weights (`meta_model`). It is restored afterwards.

    Raises:
        ConfigError: an unknown method or option.
    """
    with attached_for_a_check(model, method) as adapter:
        if isinstance(adapter, list):
            return adapter
        return try_peft(adapter.export_source())[1]


@contextmanager
def attached_for_a_check(model: PreTrainedModel, method: Spec) -> Iterator[Adapter | list[str]]:
    """Attach a method to a model inside; if it does not fit, yield the reasons instead.

    Raises:
        ConfigError: an unknown method or option.
    """
    methods = parse_methods(method)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(model.device):
            adapter = attach(model, methods, name="check of an export")
    except ConfigError:
        raise
    except AdapterhubError as error:
        yield ["; ".join([error.problem, *error.offenders])]
        return
    try:
        yield adapter
    finally:
        adapter.detach()


def _export_without_weights(
    model: PreTrainedModel, saved: Saved
) -> tuple[PeftFiles, Sequence[str]] | None:
    """Export from a model without weights; None if peft's files need some of them."""
    adapter = attach_without_weights(model, saved)
    try:
        files, problems = _export(adapter, saved.manifest)
    except RuntimeError:  # torch does not compute with weights on the meta device
        return None
    needs_weights = not problems and any(t.is_meta for t in files.tensors.values())
    return None if needs_weights else (files, problems)


def _export(adapter: Adapter, manifest: Manifest) -> tuple[PeftFiles, Sequence[str]]:
    backbone = manifest.backbone
    source = replace(adapter.export_source(), backbone=backbone.id, revision=backbone.revision)
    return try_peft(source)


def kind_of_checkpoint(location: str, revision: str | None) -> str:
    """Return the kind of model that saved a checkpoint; "features" for unknown kinds."""
    config = meta_model(location, revision=revision).config
    saved_as = set(config.architectures or ())
    for kind, row in TASK_MODELS.items():
        classes = {cls.__name__ for cls in row.classes_for(config)}
        if not row.has_head and saved_as & classes:
            return kind
    return "features"


def attach_without_weights(model: PreTrainedModel, saved: Saved) -> Adapter:
    """Attach an adapter, with its tensors, to a backbone on the meta device.

    Raises:
        MismatchError: the adapter does not fit.
    """
    _mark_newly_initialized(model, saved.manifest)
    with torch.device("meta"):
        adapter = load_folder(model, saved, any_backbone=True, any_tokenizer=True)
    activate(model)
    modules: list[nn.Module] = [placed.module for placed in adapter.placed]
    modules += adapter.head.own.values() if adapter.head else []
    for module in modules:
        module.to_empty(device="cpu")
    for changed in adapter.changed:
        changed.kept = nn.Parameter(torch.empty_like(changed.kept, device="cpu"))
    values = saved.tensors()
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            tensor.copy_(values[name])
    return adapter


def _on_a_stand_in(model: PreTrainedModel, saved: Saved) -> Adapter:
    """Attach an adapter, with its tensors, to a stand-in for a backbone on the meta device."""
    replacement = stand_in(model)
    _mark_newly_initialized(replacement, saved.manifest)
    return load_folder(replacement, saved, any_backbone=True, any_tokenizer=True)


def _mark_newly_initialized(model: PreTrainedModel, manifest: Manifest) -> None:
    """Mark the parameters that were newly initialized when the adapter was trained."""
    with adopted_family(model, manifest):
        anatomy = anatomy_of(model)
    keys = {path: anatomy.key(path).rpartition(".") for path in anatomy.parameters()}
    new = (path for path, (site, _, n) in keys.items() if f"{site}.fresh.{n}" in manifest.tensors)
    Backbone.of(model).fresh = frozenset(new)


def peft_is_installed() -> bool:
    """Return whether peft is installed, so that outputs can be compared."""
    return importlib.util.find_spec("peft") is not None


def compare_method(model: PreTrainedModel, method: Spec) -> list[str]:
    """Compare the outputs of a method with random parameters on a stand-in for a model.

    The model may be without weights, and does not change. Return a line for each difference.
    """

    def build() -> Adapter:
        torch.manual_seed(0)
        adapter = attach(stand_in(model), method, name="comparison with peft")
        with torch.no_grad():
            for tensor in adapter.tensors().values():
                if tensor.requires_grad:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
        return adapter

    return compare(build)


def compare(build: Callable[[], Adapter]) -> list[str]:
    """Compare the outputs of an adapter with its export in peft; return the differences.

    `build` returns the only adapter of its model. The model is a stand-in with random weights, so
    that the backbone's weights are not read; it then gets peft's modules. The batch has rows
    without padding, with padding on the right and on the left.
    """
    library = "adapterhub"
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_loading():
        warnings.simplefilter("ignore")  # only differences in outputs matter
        try:
            adapter = build()
            model, files = adapter.backbone.pretrained, to_peft(adapter.export_source())
            expected = _outputs(model)
            adapter.detach()
            library = "peft"
            actual = _outputs(model, _in_peft(model, files))
        except AdapterhubError as error:
            return ["; ".join([error.problem, *error.offenders])]
        except Exception as error:  # of any kind: the code of peft and of the model is not ours
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            return [f"outputs cannot be compared with peft's, {library} fails: {reason}"]
    problems = same(expected, actual, torch.float32).problems
    return [f"peft computes another {problem}" for problem in problems]


def _in_peft(model: PreTrainedModel, files: PeftFiles) -> nn.Module:
    """Load a checkpoint into a model with peft."""
    import peft

    with tempfile.TemporaryDirectory() as temporary:
        write_peft(Path(temporary) / "peft", files)
        wrapper: nn.Module = peft.PeftModel.from_pretrained(model, Path(temporary) / "peft")
        return wrapper.eval()


def _outputs(model: PreTrainedModel, wrapper: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the outputs of a model, or of its wrapper, at tokens that are not padding."""
    batch = _padded_batch(model)
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        outputs = (wrapper or model)(**batch, return_dict=True)
    names = [name for name in outputs if name.endswith("logits")] or ["last_hidden_state"]
    values = {name: outputs[name] for name in names}
    return {
        # peft returns the outputs of virtual tokens too.
        name: value[:, -_TOKENS:][mask] if value.ndim == 3 or name in _PER_TOKEN else value
        for name, value in values.items()
    }


def _padded_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return three rows: without padding, and with padding on the right and on the left."""
    batch = probe_batch(model, rows=3, tokens=_TOKENS)
    ids = batch["input_ids"].view(3, _TOKENS)
    mask = batch["attention_mask"].view(3, _TOKENS)
    ids[1, -_PADDING - 1] = ids[1, -1].clone()
    for row, padding in ((1, slice(-_PADDING, None)), (2, slice(0, _PADDING))):
        ids[row, padding] = model.config.get_text_config().pad_token_id or 0
        mask[row, padding] = 0
    if "decoder_input_ids" in batch:
        batch["decoder_attention_mask"] = batch["attention_mask"]
    return batch
