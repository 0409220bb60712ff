"""The gate: every change to downloadable data passes it, at the end of its transaction.

`changing` opens the transaction of each commit, delete, move, tag, branch, upload, import and
mirrored file. At its end the gate reads the changes (`Changes`) and refuses all of them unless
these promises of the hub hold:

- contents follow the rules of the namespace, also after a move;
- where signers are listed, one of them has signed each file that is loaded, and each version;
- the files of a namespace, with the space reserved for uploads, fit its quota;
- a version is complete, matches its manifest, and has the next number;
- only admins remove protected tags, versions and branches.

A whole hub is restored with its rules, from a backup of admitted data.

The rules are about names and contents of files. Loading an adapter must never run code, so pickles
and programs are refused under any name. Each accepted kind of file has its own check. An
administrator may allow more in a namespace. A refusal names the file, the rule, and the command
that allows it.
"""

from __future__ import annotations

import fnmatch
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from sqlalchemy import Connection, select

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
from adapterhub.hub.accounts import ADMIN, Owner, Visitor, namespace_of
from adapterhub.hub.blobs import BlobInfo, StagedBlob
from adapterhub.hub.commits import (
    PACKED_WEIGHTS,
    PICKLES,
    TAG,
    Tree,
    path_problem_of,
    promised_bytes,
    read_tree,
    sizes_of,
    suffix_of,
    used_bytes,
)
from adapterhub.hub.database import NewVersion, changes_of, commits, received_reader
from adapterhub.hub.repositories import HubRepository, repository_of_id
from adapterhub.hub.state import Hub
from adapterhub.interchange.adapters_library.files import HEAD_CONFIG_FILE
from adapterhub.registry.foreign import CONFIG_FILE, MAX_CONFIG_BYTES
from adapterhub.registry.secrets import findings
from adapterhub.registry.store import MOST_VERSIONS, Reference, is_version_folder
from adapterhub.registry.trust import SignedSubject, Trust, checked_signatures
from adapterhub.registry.version_files import parse_beside
from adapterhub.web.errors import DeniedError, HubRefusal, TakenError, TooManyBytesError

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
    if PICKLES.search(name):
        _refuse(name, "pickle", rules)
    elif _CODE.search(name):
        _refuse(name, "code", rules)
    elif not (_TEXTS.search(name) or suffix_of(name) in (".safetensors", *_SENTENCEPIECE, *_MAGIC)):
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
    suffix = suffix_of(path)
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
    return "" if 8 + length + end == size else "its size differs from its header"


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
    digests: dict[str, str] = {}
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
                    digests |= {file: blob.sha256, **from_json(data, file).files}
                elif (beside := parse_beside(data)).manifest == digests.get(MANIFEST_FILE):
                    digests |= beside.files
                break
    return digests


def _is_loaded(name: str) -> bool:
    """Return whether libraries load a file as weights, code or configuration."""
    if name.casefold() in _CONFIGURATIONS:
        return True
    is_data = (
        suffix_of(name) in (*_SENTENCEPIECE, *_MAGIC) and suffix_of(name) not in PACKED_WEIGHTS
    )
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
        actual = tree.get(file)
        if actual is None or actual.sha256 != manifest.files.get(file):
            state = "is missing" if actual is None else "is another one"
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
            detail = f"{finding.place}: {finding.problem}"
            raise HubRefusal(
                f"{one_line(path, 200)}, {detail}: {RULES['secrets']}. Remove it and revoke it; if "
                f"it is not one, an administrator allows it: adapterhub hub org DIR "
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
            return any(PICKLES.search(name) for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return True


def _start(file: BinaryIO, most: int) -> bytes:
    """Return the first bytes of a file."""
    file.seek(0)
    return file.read(most)


def _refuse(path: str, rule: str, rules: NamespaceRules, detail: str = "") -> None:
    if rule in rules.allowed:
        return
    message = f"{one_line(path, 200)}: {RULES[rule]}" + (
        f" ({one_line(detail, 300)})" if detail else ""
    )
    remedy = {
        "pickle": "Save it with safetensors",
        "code": "Leave it out",
        "backbone": "Name the backbone by its id",
    }.get(rule, "Leave it out, or correct it")
    raise HubRefusal(
        f"{message}. {remedy}; or an administrator allows it: adapterhub hub org DIR OWNER "
        f"--allow {rule}"
    )


_OWN: Mapping[str, Callable[[str, BinaryIO, int, NamespaceRules], None]] = {
    MANIFEST_FILE: _check_manifest,
    CONFIG_FILE: _check_peft,
}


MOST_SKIPPED = 1_000
"""Version numbers that an admin may skip, to copy a registry that has deleted some."""


@dataclass(frozen=True)
class CheckedFiles:
    """Files whose contents were checked before a transaction, so that writers need not wait.

    Attributes:
        rules: the rules used for the check.
        files: each file as its path and sha256.
    """

    rules: NamespaceRules = field(default_factory=NamespaceRules)
    files: frozenset[tuple[str, str]] = frozenset()


@contextmanager
def changing(
    hub: Hub, visitor: Visitor | None = None, checked: CheckedFiles | None = None
) -> Iterator[Connection]:
    """Change downloadable data in one transaction, which the gate admits at its end.

    Args:
        hub: the hub.
        visitor: the user who makes the change; None for the hub itself.
        checked: files whose contents were checked already.

    Raises:
        HubRefusal: the gate refuses the changes; nothing is changed.
    """
    with hub.database.writing() as connection:
        yield connection
        _Gate(hub, connection, visitor, checked or CheckedFiles()).admit()


def check_files(
    hub: Hub,
    files: Iterable[tuple[str, str, int]],
    rules: NamespaceRules,
    received: Mapping[str, StagedBlob] | None = None,
) -> CheckedFiles:
    """Check the contents of files, each given as its path, sha256 and size.

    `received` has the files that are not yet in place, by path.

    Raises:
        HubRefusal: the rules do not allow one of them.
    """
    checked = set()
    for path, sha256, size in files:
        staged = (received or {}).get(path)
        check_name_of_file(path, rules)
        with open(staged.path, "rb") if staged is not None else hub.blobs.open(sha256) as file:
            check_contents(path, file, size, rules)
        checked.add((path, sha256))
    return CheckedFiles(rules, frozenset(checked))


def check_moved(hub: Hub, repository: HubRepository, rules: NamespaceRules) -> CheckedFiles:
    """Check all downloadable contents of a repository against other rules.

    Raises:
        HubRefusal: the rules do not allow one of the files.
    """
    with hub.database.reading() as connection:
        trees = _trees(connection, repository.id).values()
        files = {(path, b.sha256, b.size) for tree in trees for path, b in tree.items()}
    return check_files(hub, sorted(files), rules)


def quota_of(hub: Hub, connection: Connection, namespace: int) -> int | None:
    """Return the quota of a namespace in bytes; None for no limit."""
    return _quota(hub, namespace_of(connection, namespace))


def _quota(hub: Hub, owner: Owner) -> int | None:
    return hub.options.quota if owner.quota is None else owner.quota


def check_room(
    hub: Hub,
    connection: Connection,
    namespace: int,
    size: int,
    *,
    is_kept: bool = False,
    is_early: bool = False,
) -> NamespaceRules:
    """Refuse files that exceed the quota of a namespace, including reserved space.

    Return the rules of the namespace, which apply to the files.

    Args:
        hub: the hub.
        connection: a transaction.
        namespace: the namespace of the files.
        size: the size of the new files in bytes.
        is_kept: whether the namespace already stores these files, or has space reserved for them.
        is_early: whether some files may still wait for their commit: count only commits.

    Raises:
        TooManyBytesError: the quota is exceeded.
    """
    owner = namespace_of(connection, namespace)
    quota, rules = _quota(hub, owner), parse_rules(owner.rules)
    if quota is None or not size:
        return rules
    used = used_bytes(connection, namespace, committed=is_early)
    promised = 0 if is_early else promised_bytes(connection, namespace)
    if used + promised + (0 if is_kept else size) <= quota:
        return rules
    before = f"{used - size * is_kept:,}" if not promised else f"{used:,}"
    waiting = f", and uploads are promised {promised:,}" if promised else ""
    raise TooManyBytesError(
        f"{owner.name} has used {before} of its {quota:,} bytes{waiting}, so {size:,} more do not "
        "fit; adapterhub hub org DIR NAME --quota SIZE changes it"
    )


class _Gate:
    """The check of a transaction's changes against the rules of the hub."""

    def __init__(
        self, hub: Hub, connection: Connection, visitor: Visitor | None, checked: CheckedFiles
    ) -> None:
        self.hub, self.connection, self.visitor, self.checked = hub, connection, visitor, checked
        self.changes = changes_of(connection)
        self.read = received_reader(connection, hub.blobs)

    def admit(self) -> None:
        """Refuse the changes, or store the new files.

        Raises:
            HubRefusal: a rule is violated.
        """
        changed = (repository_of_id(self.connection, each) for each in self.changes.repositories)
        known = {each.id: each for each in changed if each is not None}
        for repository in known.values():
            owner = namespace_of(self.connection, repository.namespace)
            if not repository.is_mirrored:
                self._check_repository(repository, parse_rules(owner.rules))
        self._check_rooms(known)
        for staged in self.changes.files:
            self.hub.blobs.put(staged)
        self.changes.are_admitted = True

    def _check_repository(self, repository: HubRepository, rules: NamespaceRules) -> None:
        own = repository.id
        self._check_refs(repository, rules)
        versions = [each for each in self.changes.versions if each.repository == own]
        for version in versions:
            self._check_number(version)
        came_from = self.changes.moved.get(own, repository.namespace)
        if own in self.changes.moved:
            trees = _trees(self.connection, own)
        else:
            named = [oid for repository, oid in self.changes.commits if repository == own]
            trees = _trees(self.connection, own, named)
        is_foreign = came_from != repository.namespace
        for oid, tree in trees.items():
            is_new = self.changes.commits.get((own, oid), False)
            known = set() if is_foreign else self._known_before(own, oid, tree, is_new=is_new)
            self._check_contents(tree, rules, known)
            self._check_signed(repository, tree, rules)
        for version in versions:
            for tree in _trees(self.connection, own, [version.commit]).values():
                check_version(tree, self.read, f"v{version.number}")
                self._check_signed(repository, tree, rules, f"v{version.number}")

    def _check_refs(self, repository: HubRepository, rules: NamespaceRules) -> None:
        """Require an admin to remove versions, protected tags and branches."""
        for own, kind, name in sorted(self.changes.refs):
            if own != repository.id or self._is_admin(repository):
                continue
            if kind != TAG or is_version_folder(name) or rules.protects(name):
                owner = repository.name.partition("/")[0]
                raise DeniedError(f"only an admin of {owner} may delete or move {name}")

    def _check_number(self, version: NewVersion) -> None:
        """Require consecutive version numbers that were never used before."""
        number, following = version.number, version.before + 1
        repository = repository_of_id(self.connection, version.repository)
        assert repository is not None
        if number < following:
            raise TakenError(
                f"v{number} was given before: a number is not used again; the next is v{following}"
            )
        skipped = MOST_SKIPPED if self._is_admin(repository) else 0
        if self.hub.options.is_read_only:  # it shows a registry
            skipped = MOST_VERSIONS
        if number > following + skipped:
            raise TakenError(
                f"v{number} is not the next version: it is v{following}. Versions are numbered one "
                f"after the other; an admin may skip {MOST_SKIPPED:,} numbers"
            )

    def _is_admin(self, repository: HubRepository) -> bool:
        return self.visitor is None or self.visitor.may(ADMIN, repository.namespace)

    def _known_before(
        self, repository: int, oid: str, tree: Tree, *, is_new: bool
    ) -> Set[tuple[str, str]]:
        """Return the files of a commit that the repository had before: they are checked already."""
        own = _files(tree)
        if not is_new:
            return own
        parent = select(commits.c.parent).where(
            commits.c.repository == repository, commits.c.oid == oid
        )
        before = [each for each in self.connection.execute(parent).scalars() if each]
        known = self.checked.files.union(
            *map(_files, _trees(self.connection, repository, before, with_removed=True).values())
        )
        if not own <= known:  # a restored version has them from an older commit
            new = {each for each, is_new in self.changes.commits.items() if is_new}
            trees = _trees(self.connection, repository)
            older = [each for own, each in trees.items() if (repository, own) not in new]
            known = known.union(*map(_files, older))
        return own & (known - self.checked.files)

    def _check_contents(
        self, tree: Tree, rules: NamespaceRules, known: Set[tuple[str, str]]
    ) -> None:
        """Refuse names and contents of new files that violate the rules."""
        done = self.checked.files if self.checked.rules == rules else frozenset()
        staged = {each.info.sha256: each for each in self.changes.files}
        for path, blob in tree.items():
            if (path, blob.sha256) not in done and (path, blob.sha256) not in known:
                received = {path: staged[blob.sha256]} if blob.sha256 in staged else None
                check_files(self.hub, [(path, blob.sha256, blob.size)], rules, received)

    def _check_signed(
        self, repository: HubRepository, tree: Tree, rules: NamespaceRules, version: str = ""
    ) -> None:
        problem = signature_problem(tree, self.read, repository.name, rules, version)
        if problem:
            raise HubRefusal(problem)

    def _check_rooms(self, known: Mapping[int, HubRepository]) -> None:
        """Refuse files that exceed the quotas of the namespaces."""
        fresh: dict[int, set[str]] = {}
        for own, sha256 in self.changes.granted:
            if own in known:
                fresh.setdefault(known[own].namespace, set()).add(sha256)
        for own, came_from in self.changes.moved.items():
            if own in known and known[own].namespace != came_from:
                trees = _trees(self.connection, own).values()
                moved = {blob.sha256 for tree in trees for blob in tree.values()}
                fresh.setdefault(known[own].namespace, set()).update(moved)
        for namespace, digests in fresh.items():
            size = sizes_of(self.connection, digests)
            check_room(self.hub, self.connection, namespace, size, is_kept=True)


def _files(tree: Tree) -> Set[tuple[str, str]]:
    return {(path, blob.sha256) for path, blob in tree.items()}


def _trees(
    connection: Connection,
    repository: int,
    oids: Iterable[str] | None = None,
    *,
    with_removed: bool = False,
) -> dict[str, Tree]:
    """Return the trees of all downloadable commits, or of some, by oid."""
    chosen = select(commits.c.oid, commits.c.tree).where(commits.c.repository == repository)
    if not with_removed:
        chosen = chosen.where(commits.c.is_removed.is_(False))
    if oids is not None:
        chosen = chosen.where(commits.c.oid.in_([*oids]))
    rows = connection.execute(chosen).all()
    return {row.oid: read_tree(connection, row.tree) for row in rows}
