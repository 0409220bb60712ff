"""Put a published adapter on a model, by its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.state import backbone_fingerprint
from adapterhub.registry.api import pull, read_reference


def load(
    model: PreTrainedModel,
    reference: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> Adapter:
    """Put a saved adapter on a model, with its head and labels, and make it the active one.

    `reference` is a folder, or a name in a registry: `"./out/polite"`, `"polite@v2"`,
    `"hf:someone/polite"`. Of a name with adapters for several backbones, the one for this model is
    taken. `name` replaces the name that it was saved under. `any_backbone` skips the check of the
    fingerprint: the adapter was trained on other weights, and what it computes here is up to you.
    `allow_pickle` takes another library's adapter from a pickle, without running code, where it has
    no safetensors. `options` are those of `adapterhub.adapters.load.load_folder`: tokenizer,
    any_tokenizer, head.

    Raises:
        ConfigError: no reference. RegistryError: it is not there, or not for this backbone.
        FileError: the files are broken. MismatchError: the files are sound, but for another
            backbone; every tensor that does not fit is listed. AttachError: the name is taken.
    """
    place = read_reference(reference)
    local = place.place == "local" and not any_backbone
    own = backbone_fingerprint(model) if local else None
    folder = pull(reference, backbone=own, registry=registry, allow_pickle=allow_pickle)
    options |= {"any_backbone": any_backbone, "allow_pickle": allow_pickle}
    return load_folder(model, folder, name=name, **options)
