"""The content policy of a hub: the files it accepts, by name and by contents.

Loading an adapter must never run code, so pickles and programs are refused under any name. Each
accepted kind of file has its own check. An administrator may allow more in a namespace. A refusal
names the file, the rule, and the command that allows it.
"""

from __future__ import annotations

import fnmatch
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapterhub.config.options import to_dict
from adapterhub.errors import AdapterhubError, FileError, one_line
from adapterhub.files import schema
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, from_json
from adapterhub.files.native import (
    BESIDE_FILE,
    BESIDE_SIGNATURE,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    TENSORS_FILE,
)
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, parse_signatures
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.commits import Tree, path_problem_of
from adapterhub.interchange.adapters_library.files import HEAD_CONFIG_FILE
from adapterhub.registry.foreign import CONFIG_FILE, MAX_CONFIG_BYTES
from adapterhub.registry.secrets import findings
from adapterhub.registry.store import Reference
from adapterhub.registry.trust import SignedSubject, Trust, checked_signatures
from adapterhub.registry.version_files import parse_beside
from adapterhub.web.errors import HubRefusal

ReadFile = Callable[[str, int], bytes]
"""Returns the first bytes of a file, by its sha256."""
RULES = {
    "pickle": "a pickle can run any code when it is loaded; safetensors cannot",
    "code": "code of a repository runs where it is loaded",
    "kind": "this kind of file is not one that the hub checks",
    "contents": "the contents do not match the file's name",
    "secrets": "texts may not have secrets",
    "backbone": "an adapter names its backbone by the id that others find it by",
}
MAX_HEADER = 25 << 20  # bytes of the header of a safetensors file
_USUAL_HEADER = 64 << 10  # bytes to read first: in a bucket each read is a request
_MOST_TEXT_SEARCHED = 1 << 20  # bytes of a text that are searched for secrets
_PICKLES = re.compile(r"(?i)\.(bin|pt|pth|ckpt|pkl|pickle|joblib|dill|npy|npz|h5|keras|mar|t7)$")
_CODE = re.compile(r"(?i)\.(py|pyc|pyx|so|dll|dylib|exe|sh|bat|ps1|js|jar|whl|ipynb|html?|svg)$")
_TEXTS = re.compile(
    r"(?i)(\.(md|txt|json|jsonl|ya?ml|csv|tsv|jinja|sig|toml|cff|license)|"
    r"(^|/)(\.gitattributes|\.gitignore|licen[cs]e|notice|vocab|merges|codes|authors|citation))$"
)
_MAGIC = {
    ".parquet": b"PAR1", ".arrow": b"ARROW1", ".png": b"\x89PNG", ".jpg": b"\xff\xd8\xff",
    ".jpeg": b"\xff\xd8\xff", ".gif": b"GIF8", ".webp": b"RIFF", ".gguf": b"GGUF",
    ".gz": b"\x1f\x8b", ".flac": b"fLaC", ".wav": b"RIFF", ".pdf": b"%PDF",
    ".zst": b"\x28\xb5\x2f\xfd",
}  # fmt: skip
_WEIGHTS = (".gguf", ".gz", ".zst")  # kinds of `_MAGIC` that hold weights
_CONFIGURATIONS = (MANIFEST_FILE, CONFIG_FILE, HEAD_CONFIG_FILE)
_SENTENCEPIECE = (".model", ".spm")  # protocol buffers, which have no magic number


@dataclass(frozen=True)
class NamespaceRules:
    """The rules that an administrator has set for a namespace.

    Attributes:
        allowed: names of rules that are switched off there.
        findings: codes of texts that are mistaken for secrets.
        protected: patterns of tags that only an admin may move or delete.
        signers: accepted keys; each version needs a signature by one of them, unless empty.
    """

    allowed: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()

    def protects(self, tag: str) -> bool:
        """Return whether a tag is protected."""
        return any(fnmatch.fnmatchcase(tag, pattern) for pattern in self.protected)


def parse_rules(text: str) -> NamespaceRules:
    """Parse the rules of a namespace from the database."""
    fields = json.loads(text)
    return NamespaceRules(**{name: tuple(value) for name, value in fields.items()})


def rules_text(rules: NamespaceRules) -> str:
    """Format the rules of a namespace for the database."""
    return json.dumps(to_dict(rules), sort_keys=True)


def check_name_of_file(path: object, rules: NamespaceRules) -> None:
    """Refuse a file by its path, before it is sent if the client checks first.

    Raises:
        HubRefusal: the path is not valid, or the rules do not allow such a file.
    """
    if problem := path_problem_of(path):
        raise HubRefusal(f"{str(path)[:200]!a} cannot be the path of a file: {problem}")
    name = str(path)
    if _PICKLES.search(name):
        _refuse(name, "pickle", rules)
    elif _CODE.search(name):
        _refuse(name, "code", rules)
    elif not (_TEXTS.search(name) or _suffix(name) in (".safetensors", *_SENTENCEPIECE, *_MAGIC)):
        _refuse(name, "kind", rules)


def check_contents(path: str, file: BinaryIO, size: int, rules: NamespaceRules) -> None:
    """Refuse a file by its contents, or by its header if it is large.

    Raises:
        HubRefusal: the rules do not allow it.
    """
    check_name_of_file(path, rules)
    start = _start(file, 64)
    if re.match(rb"\x80[\x02-\x05]|\x80\x8a|\x93NUMPY", start) or _is_torch_zip(start, file):
        _refuse(path, "pickle", rules)
    if start.startswith((b"\x7fELF", b"MZ", b"#!", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe")):
        _refuse(path, "code", rules)
    suffix = _suffix(path)
    if suffix == ".safetensors":
        if problem := safetensors_problem(file, size):
            _refuse(path, "contents", rules, problem)
    elif _TEXTS.search(path):
        _check_text(path, file, size, rules)
    elif suffix in _MAGIC and size and not start.startswith(_MAGIC[suffix]):
        _refuse(path, "contents", rules)
    if (check := _OWN.get(path)) is not None:
        check(path, file, size, rules)


def safetensors_problem(file: BinaryIO, size: int) -> str:
    """Return the problem in the header of a safetensors file, or ""."""
    length = int.from_bytes(_start(file, 8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        return f"its header claims {length:,} bytes"
    header, problems = schema.parse_object(file.read(length), MAX_HEADER)
    header.pop("__metadata__", None)
    if problems:
        return f"its header is not JSON of tensors: {problems[0]}"
    end = 0
    try:
        for info in sorted(header.values(), key=lambda info: info["data_offsets"]):
            first, last = info["data_offsets"]
            if type(first) is not int or type(last) is not int or first != end or last < first:
                return "its tensors have gaps or overlap"
            if not isinstance(info["dtype"], str) or not all(type(n) is int for n in info["shape"]):
                return "a tensor has no dtype or no shape"
            end = last
    except (KeyError, TypeError, ValueError):
        return "a tensor of its header has no place"
    return "" if 8 + length + end == size else "it is shorter or longer than its header says"


def signature_problem(
    tree: Tree, read: ReadFile, name: str, rules: NamespaceRules, version: str = ""
) -> str:
    """Return the file that lacks a required signature by a listed key, or "".

    In each folder, every file that a library loads must be listed in a manifest signed by a listed
    key, or in the list of files next to it, signed likewise. Texts, images and tables are exempt.

    Args:
        tree: the files of a commit.
        read: reads a file by its sha256.
        name: the repository that a signature must be for.
        rules: the rules of the namespace.
        version: the version to be created; a signature may be for this version or for any.
    """
    if not rules.signers:
        return ""
    folders: dict[str, dict[str, BlobInfo]] = {}
    for path, blob in tree.items():
        folder, slash, own = path.rpartition("/")
        folders.setdefault(folder + slash, {})[own] = blob
    for folder, files in folders.items():
        loaded = {own: blob.sha256 for own, blob in files.items() if _is_loaded(own)}
        if not loaded:
            continue
        try:
            signed = _signed_files(files, read, name, rules, version or None)
        except AdapterhubError as error:
            return f"{folder}{SIGNATURE_FILE}: {error.problem}"
        for own, sha256 in sorted(loaded.items()):
            if signed.get(own) != sha256:
                keys = ", ".join(rules.signers)
                return (
                    f"{one_line(folder + own, 200)}: {name} takes files that one of these keys has "
                    f"signed{f' for {version}' * bool(version)}: {keys}; adapterhub push FOLDER "
                    "URL --sign KEY signs an adapter"
                )
    return ""


def _signed_files(
    files: Mapping[str, BlobInfo],
    read: ReadFile,
    name: str,
    rules: NamespaceRules,
    version: str | None,
) -> dict[str, str]:
    """Return the files of a folder that a listed key has signed, with their digests."""
    found: dict[str, str] = {}
    for file, signature in ((MANIFEST_FILE, SIGNATURE_FILE), (BESIDE_FILE, BESIDE_SIGNATURE)):
        blob, signed = files.get(file), files.get(signature)
        if blob is None or signed is None:
            continue
        subject = SignedSubject(Reference("server", name), blob.sha256, name, version)
        statements = parse_signatures(read(signed.sha256, MAX_SIGNATURE_BYTES), signature)
        for each in checked_signatures(statements, subject, Trust()):
            keys = {each.signature.key, each.signature.signer.id}
            if each.is_valid and keys & {*rules.signers}:
                data = read(blob.sha256, MAX_MANIFEST_BYTES)
                if file == MANIFEST_FILE:
                    found |= {file: blob.sha256, **from_json(data, file).files}
                elif (beside := parse_beside(data)).manifest == found.get(MANIFEST_FILE):
                    found |= beside.files
                break
    return found


def is_weights(path: str) -> bool:
    """Return whether a file contains model weights, by its name."""
    return _suffix(path) in (".safetensors", *_WEIGHTS) or bool(_PICKLES.search(path))


def _is_loaded(name: str) -> bool:
    """Return whether libraries load a file as weights, code or configuration."""
    if name.casefold() in _CONFIGURATIONS:
        return True
    is_data = _suffix(name) in (*_SENTENCEPIECE, *_MAGIC) and _suffix(name) not in _WEIGHTS
    return not (_TEXTS.search(name) or is_data)


def check_version(tree: Tree, read: ReadFile, version: str) -> None:
    """Refuse a version whose files differ from its manifest: it could not be loaded.

    A repository without a manifest, as other libraries write it, is taken as committed.

    Raises:
        HubRefusal: a file is missing or differs.
    """
    blob = tree.get(MANIFEST_FILE)
    if blob is None:
        return
    try:
        manifest = from_json(read(blob.sha256, MAX_MANIFEST_BYTES), MANIFEST_FILE)
    except FileError as error:
        raise HubRefusal(f"{version}: {error.problem}") from None
    for file in {TENSORS_FILE, *manifest.files}:
        found = tree.get(file)
        if found is None or found.sha256 != manifest.files.get(file):
            state = "is missing" if found is None else "is another one"
            raise HubRefusal(
                f"{version} would not be whole: {file}, as {MANIFEST_FILE} names it, {state}; "
                "commit both, then tag the commit"
            )
    tensors = tree[TENSORS_FILE].sha256
    start = read(tensors, _USUAL_HEADER)
    end = 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER)
    start = start if end <= len(start) else read(tensors, end)
    header, _ = schema.parse_object(start[8:end], MAX_HEADER)
    header.pop("__metadata__", None)
    declared = {name: (info.dtype, [*info.shape]) for name, info in manifest.tensors.items()}
    if declared != {name: (info["dtype"], info["shape"]) for name, info in header.items()}:
        raise HubRefusal(f"{version} would not be whole: {TENSORS_FILE} has other tensors")


def _check_text(path: str, file: BinaryIO, size: int, rules: NamespaceRules) -> None:
    if size > _MOST_TEXT_SEARCHED:
        return  # data that is never read as code
    data = _start(file, size)
    try:
        data.decode()
    except UnicodeDecodeError:
        _refuse(path, "contents", rules, "it is not text in UTF-8")
    if b"\0" in data:
        _refuse(path, "contents", rules, "it is not text")
    if "secrets" in rules.allowed or re.search(r"(?i)(^|/)(tokenizer\.json|vocab|merges)", path):
        return
    for finding in findings({path: data}):
        if "path" not in finding.problem and finding.code not in rules.findings:
            where = f"{finding.place}: {finding.problem}"
            raise HubRefusal(
                f"{one_line(path, 200)}, {where}: {RULES['secrets']}. Remove it and revoke it; if "
                f"it is none, an administrator allows it: adapterhub hub org DIR "
                f"OWNER --allow-finding {finding.code}"
            )


def _check_manifest(path: str, file: BinaryIO, size: int, rules: NamespaceRules) -> None:
    if size > MAX_MANIFEST_BYTES:
        _refuse(path, "contents", rules, f"it has more than {MAX_MANIFEST_BYTES:,} bytes")
    try:
        from_json(_start(file, size), path)
    except FileError as error:
        _refuse(path, "contents", rules, "; ".join((error.problem, *error.offenders[:3])))


def _check_peft(path: str, file: BinaryIO, size: int, rules: NamespaceRules) -> None:
    if size > MAX_CONFIG_BYTES:
        _refuse(path, "contents", rules, f"it has more than {MAX_CONFIG_BYTES:,} bytes")
    config, problems = schema.parse_object(_start(file, size), MAX_CONFIG_BYTES)
    if problems:
        _refuse(path, "contents", rules, problems[0])
    backbone = config.get("base_model_name_or_path")
    if isinstance(backbone, str) and re.match(r"[/\\~.]|[A-Za-z]:[\\/]", backbone):
        _refuse(path, "backbone", rules, f"base_model_name_or_path is {one_line(backbone, 100)!r}")


def _is_torch_zip(start: bytes, file: BinaryIO) -> bool:
    """Return whether a file is a zip archive with a pickle, as torch writes it."""
    if not start.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            return any(_PICKLES.search(name) for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return True


def _start(file: BinaryIO, most: int) -> bytes:
    """Return the first bytes of a file."""
    file.seek(0)
    return file.read(most)


def _refuse(path: str, rule: str, rules: NamespaceRules, detail: str = "") -> None:
    if rule in rules.allowed:
        return
    shown = f"{one_line(path, 200)}: {RULES[rule]}" + (
        f" ({one_line(detail, 300)})" if detail else ""
    )
    remedy = {
        "pickle": "Save it with safetensors",
        "code": "Leave it out",
        "backbone": "Name the backbone by its id",
    }.get(rule, "Leave it out, or correct it")
    raise HubRefusal(
        f"{shown}. {remedy}; or an administrator allows it: adapterhub hub org DIR OWNER "
        f"--allow {rule}"
    )


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


_OWN: Mapping[str, Callable[[str, BinaryIO, int, NamespaceRules], None]] = {
    MANIFEST_FILE: _check_manifest,
    CONFIG_FILE: _check_peft,
}
