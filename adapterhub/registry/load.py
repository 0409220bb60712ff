"""`ah.load`: fetch an adapter by its reference and attach it to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.state import backbone_fingerprint
from adapterhub.registry.pull import pull_verified
from adapterhub.registry.reference import read_reference


def load(
    model: PreTrainedModel,
    reference: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
    **options: Any,
) -> Adapter:
    """Attach a saved adapter to a model, with its head and labels, and activate it.

    If a name in the local registry exists for several backbones, the adapter for this model is
    loaded.

    Args:
        model: the backbone.
        reference: a folder, or an adapter in a registry: `"./out/polite"`, `"polite@v2"`,
            `"hf:someone/polite"`.
        name: the name to attach it under, if not the saved one.
        any_backbone: skip the fingerprint check. The adapter was trained on other weights, and its
            outputs on these are not guaranteed.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file;
            its code is not run.
        signed: require a signature by a trusted key, also where the configuration does not.
        options: the other options of `adapterhub.adapters.load.load_folder`: tokenizer,
            any_tokenizer, head.

    Raises:
        ConfigError: not a reference.
        RegistryError: not found, or not for this backbone.
        FileError: the files are broken.
        SignatureError: a signature is required, and there is none by a trusted key.
        MismatchError: the files are valid but for another backbone; every tensor that does not fit
            is listed.
        AttachError: the name is already used on this model, or it is not one of transformers.
    """
    require_model(model)
    in_registry = read_reference(reference).kind == "local"
    fingerprint = backbone_fingerprint(model) if in_registry and not any_backbone else None
    store = {"backbone": fingerprint, "registry": registry, "allow_pickle": allow_pickle}
    fetched = pull_verified(reference, signed=signed, **store)  # type: ignore[arg-type]
    options |= {"any_backbone": any_backbone, "allow_pickle": allow_pickle}
    return load_folder(model, fetched.folder, name=name, sha256=fetched.digest, **options)
