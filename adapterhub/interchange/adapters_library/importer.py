"""Checkpoints of `adapters` (AdapterHub), translated for a backbone.

Its files do not tell the weights of the backbone that the adapter was trained on: the model that
the user gives is taken as the one. Tensors are named by the modules of the model that they sit on:

    bert.encoder.layer.0.output.adapters.NAME.adapter_down.0.weight      a bottleneck adapter
    bert.encoder.layer.0.attention.self.query.loras.NAME.lora_A          LoRA, and (IA)^3 as lora_B
    bert.prefix_tuning.prefix_tunings.NAME.self_prefix.control_trans     a prefix, of all layers
    bert.shared_parameters.NAME.phm_rule                                 what Compacter shares

Options alone decide where tensors must be: one that is missing there, or has no place, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import MismatchError
from adapterhub.interchange.adapters_library.bottleneck import import_bottleneck
from adapterhub.interchange.adapters_library.files import (
    AdaptersFiles,
    MethodConfig,
    read_adapters,
    read_options,
)
from adapterhub.interchange.adapters_library.head import head_task, import_head
from adapterhub.interchange.adapters_library.low_rank import import_adapters_low_rank
from adapterhub.interchange.adapters_library.places import Held
from adapterhub.interchange.adapters_library.prefix import import_adapters_prefix
from adapterhub.interchange.imported import CheckpointInfo, ImportedAdapter
from adapterhub.interchange.translation import Translation

# The model types whose layers `adapters` changes in a way that is compared with ours by tests. On
# others it hooks into the model, and norms the sum of a block with the norm of the last layer.
KNOWN = frozenset(
    ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "gpt2", "llama", "mistral")
) | frozenset(("t5", "mt5", "bart", "mbart"))
_OLD_NAMES = re.compile(
    r"\.(attention_text_task|attention_text_lang|layer_text_task|layer_text_lang)_adapters\."
)
_IMPORTERS: Mapping[str, Callable[[MethodConfig, Held, Translation], None]] = {
    "bottleneck": import_bottleneck,
    "prefix_tuning": import_adapters_prefix,
    "lora": import_adapters_low_rank,
}


def import_adapters(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """The checkpoint of `adapters` in a folder, for a backbone; without `head` it leaves the task
    head out.

    Raises:
        FileError: the files are broken, or have options that are not known here.
        MismatchError: they do not fit the backbone; everything that does not is listed.
    """
    return from_adapters(read_adapters(folder, allow_pickle=allow_pickle, head=head), anatomy)


def adapters_checkpoint_info(folder: Path) -> CheckpointInfo:
    """What a checkpoint of `adapters` says before a backbone is loaded for it.

    Raises:
        FileError: its configuration cannot be read.
    """
    config, head = read_options(folder)
    options = head.get("config") if isinstance(head.get("config"), dict) else {}
    name, count = config.get("model_name"), (options or head).get("num_labels", 0)
    return CheckpointInfo(
        backbone=name if isinstance(name, str) and name else None,
        task=head_task(options) if options else None,
        outputs=count if isinstance(count, int) else 0,
    )


def from_adapters(files: AdaptersFiles, anatomy: Anatomy) -> ImportedAdapter:
    """A checkpoint of `adapters` in our terms."""
    _check_type(files, anatomy)
    draft = Translation(anatomy)
    held = Held(files.name, _renamed(files.tensors))
    for part in files.parts:
        _IMPORTERS[part.kind](part, held, draft)
    draft.problems += [f"{name}: has no place here" for name in held.left()]
    labels: tuple[str, ...] | None = None
    task: str | None = None
    if files.head is not None:
        task, labels = import_head(files.head, draft)
    draft.finalize()
    draft.raise_problems(f"the checkpoint {files.name!r} of adapters")
    return ImportedAdapter(
        format="adapters",
        name=files.name,
        methods=tuple(draft.methods),
        tensors=draft.tensors,
        head=draft.head,
        labels=draft.labels if labels is None else labels,
        task=task,
        backbone=files.model_name,
        notes=tuple(draft.notes),
    )


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_OLD_NAMES.sub(".adapters.", name): tensor for name, tensor in tensors.items()}


def _check_type(files: AdaptersFiles, anatomy: Anatomy) -> None:
    here = anatomy.model.config.model_type
    if files.model_type == here and here in KNOWN:
        return
    wanted: Iterable[str] = [files.model_type] if files.model_type in KNOWN else sorted(KNOWN)
    raise MismatchError(
        f"the checkpoint {files.name!r} is for a {files.model_type} backbone, this is a {here}",
        expected=f"a model of type {', '.join(wanted)}",
        hint="load the backbone that it was trained on"
        if files.model_type in KNOWN
        else "other types are not imported, for what they compute is not verified",
    )
