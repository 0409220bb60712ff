"""Import of checkpoints of `adapters` (AdapterHub), translated for a backbone.

The files do not identify the backbone's weights: the user's model is assumed to be the right one.
Tensors are named by the modules that they belong to:

    bert.encoder.layer.0.output.adapters.NAME.adapter_down.0.weight      a bottleneck adapter
    bert.encoder.layer.0.attention.self.query.loras.NAME.lora_A          LoRA, and (IA)^3 as lora_B
    bert.prefix_tuning.prefix_tunings.NAME.self_prefix.control_trans     prefixes of all layers
    bert.shared_parameters.NAME.phm_rule                                 shared by Compacter's sites

The options determine the expected tensors: missing and unexpected ones are refused.
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
from adapterhub.interchange.adapters_library.module_paths import RemainingTensors
from adapterhub.interchange.adapters_library.prefix import import_adapters_prefix
from adapterhub.interchange.imported_adapter import CheckpointInfo, ImportedAdapter
from adapterhub.interchange.tensor_files import most_bytes
from adapterhub.interchange.translation import Translation

# Model types for which tests compare the results with those of `adapters`. On other types it uses
# a generic integration, which applies the last layer's norm to the sum of a block.
SUPPORTED = frozenset(
    ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "gpt2", "llama", "mistral")
) | frozenset(("t5", "mt5", "bart", "mbart"))
_OLD_NAMES = re.compile(
    r"\.(attention_text_task|attention_text_lang|layer_text_task|layer_text_lang)_adapters\."
)
_IMPORTERS: Mapping[str, Callable[[MethodConfig, RemainingTensors, Translation], None]] = {
    "bottleneck": import_bottleneck,
    "prefix_tuning": import_adapters_prefix,
    "lora": import_adapters_low_rank,
}


def import_adapters(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """Import the checkpoint of `adapters` in a folder for a backbone.

    Raises:
        FileError: the files are damaged, or have options that are not supported.
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    most = most_bytes(anatomy)
    files = read_adapters(folder, allow_pickle=allow_pickle, head=head, most=most)
    return from_adapters(files, anatomy)


def adapters_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Read what a checkpoint of `adapters` records about its backbone and its head.

    Raises:
        FileError: a configuration cannot be read.
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
    """Translate a checkpoint of `adapters` for a backbone.

    Raises:
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    _check_model_type(files, anatomy)
    translation = Translation(anatomy)
    remaining = RemainingTensors(files.name, _with_current_names(files.tensors))
    for part in files.parts:
        _IMPORTERS[part.kind](part, remaining, translation)
    translation.problems += [f"{name}: unexpected tensor" for name in remaining.names()]
    labels: tuple[str, ...] | None = None
    task: str | None = None
    if files.head is not None:
        task, labels = import_head(files.head, files, translation)
    translation.finalize()
    translation.raise_problems(f"the checkpoint {files.name!r} of adapters")
    return ImportedAdapter(
        format="adapters",
        name=files.name,
        methods=tuple(translation.methods),
        tensors=translation.tensors,
        head=translation.head,
        labels=translation.labels if labels is None else labels,
        task=task,
        activation=translation.activation,
        backbone=files.model_name,
        notes=tuple(translation.notes),
    )


def _with_current_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_OLD_NAMES.sub(".adapters.", name): tensor for name, tensor in tensors.items()}


def _check_model_type(files: AdaptersFiles, anatomy: Anatomy) -> None:
    model_type = anatomy.model.config.model_type
    if files.model_type == model_type and model_type in SUPPORTED:
        return
    is_supported = files.model_type in SUPPORTED
    expected: Iterable[str] = [files.model_type] if is_supported else sorted(SUPPORTED)
    raise MismatchError(
        f"the checkpoint {files.name!r} is for a {files.model_type} backbone, not {model_type}",
        expected=f"a model of type {', '.join(expected)}",
        hint="load the backbone that it was trained on"
        if is_supported
        else "other types are not imported: no test compares their outputs",
    )
