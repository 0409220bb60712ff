"""Refuse to publish files that contain secrets or paths of this machine.

Two rule sets: detect-secrets' rules, which its maintainers update, and our own: keys of services
that it lacks, passwords recognized by the word before them, and paths. Its rules by entropy, for
public addresses and by keyword are left out, since digests, versions and prose match them. Its
rules for Artifactory and for passwords in URLs are left out too: they match words in capitals and
references such as http://localhost:8080/owner/name@v1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from adapterhub.errors import FileError, one_line
from adapterhub.files.native import SIGNATURE_FILE
from adapterhub.files.schema import shorten

_BINARY = (".safetensors",)
_MOST_IN_A_PLACE = 80  # characters: the place of a finding is displayed, and may be a hostile key

# Modules of detect_secrets.plugins that are left out, see above.
_LEFT_OUT = ("high_entropy_strings", "ip_public", "keyword", "artifactory", "basic_auth")
_MOST_NAMED = 200  # characters: a longer value is not a key recognized only by its name
_LEAST_SECRET = 4  # characters: shorter ones are seldom passwords and often words
_NETRC = "a password in a netrc file"
_KEYS = {
    "a Hugging Face token": [r"\bhf_[A-Za-z0-9]{30,}", r"\bapi_org_[A-Za-z]{30,}"],
    "an OpenAI key": [r"\bsk-[A-Za-z0-9_-]{20,}"],  # also of Anthropic (sk-ant-) and OpenRouter
    "a GitHub token": [r"\bgithub_pat_\w{30,}"],
    "an Azure key": [r"\b(?:AccountKey|SharedAccessKey|sig)=[A-Za-z0-9+/%=]{40,}"],
    "a Google key": [
        r"\bAIza[0-9A-Za-z_-]{35}", r"\bya29\.[\w-]{20,}", r"\bGOCSPX-[\w-]{20,}",
    ],
    "a Slack token": [r"\bxoxe-[0-9A-Za-z-]{10,}", r"\bxapp-\d-[0-9A-Za-z-]{20,}"],
    "a webhook": [
        r"hooks\.slack\.com/workflows/\w+/\w+", r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]+",
        r"\.webhook\.office\.com/webhookb2/\S+", r"chat\.googleapis\.com/v1/spaces/\S+key=",
    ],
    "a W&B key": [r"(?i:wandb\S{0,20}\s*[:=]\s*\W?[0-9a-f]{40}\b)", r"\bwandb_v1_\w{20,}"],
    "a Kaggle key": [r"\bKGAT_\w{20,}", r"\"key\"\s*:\s*\"[0-9a-f]{32}\""],
    "a Stripe key": [r"\b(?:[rsp]k_(?:live|test)_|whsec_)[0-9A-Za-z]{16,}"],
    "a package registry's token": [
        r"\bnpm_[A-Za-z0-9]{30,}", r"\bdckr_(?:pat|oat)_[\w-]{20,}",
        r"\brubygems_[0-9a-f]{40,}", r"_authToken=\S{8,}", r"\bAKC[a-zA-Z0-9]{20,}",
    ],
    "a key of an AI service": [
        r"\bgsk_[A-Za-z0-9]{30,}", r"\bxai-[A-Za-z0-9]{30,}", r"\br8_[A-Za-z0-9]{30,}",
        r"\bpplx-[A-Za-z0-9]{30,}", r"\bnvapi-[\w-]{30,}", r"\bcsk-[a-z0-9]{30,}",
    ],
    "a cloud service's token": [
        r"\bdapi[0-9a-f]{32}", r"\bdo[opr]_v1_[0-9a-f]{40,}", r"\bhv[sbr]\.[\w-]{20,}",
        r"\bdp\.(?:pt|st|ct|sa)\.\w{20,}", r"\bsbp_[0-9a-f]{40}", r"\bpscale_\w+_[\w.-]{20,}",
        r"\bATATT3[\w=-]{20,}", r"\bglsa_\w{30,}", r"\bglc_[\w=]{30,}", r"\bNRAK-[A-Z0-9]{20,}",
        r"\bsntry[su]_\w{20,}", r"\bPMAK-[\w-]{20,}", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
        r"\blin_api_\w{20,}", r"\bntn_\w{30,}", r"\bHRKU-[\w-]{20,}", r"\bkey-[0-9a-f]{32}\b",
    ],
    "a private key": [
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY", r"\bAGE-SECRET-KEY-1[0-9A-Z]{20,}",
        r"PuTTY-User-Key",
    ],
    "a password in a URL": [
        r"(?i:\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]*:[^\s/@\"'<>]+@)",
        # Alone, as in the URL of a git remote; a user name is shorter, or lacks digits.
        r"(?i:\b[a-z][a-z0-9+.-]*://(?=[^\s/@]*\d)[^\s/:@\"'<>]{16,}@)",
    ],
    _NETRC: [
        r"(?i:\b(?:machine\s+\S+|default)(?:\s+(?:login|account)\s+\S+)*\s+password\s+\S+)",
        r"(?i:\blogin\s+\S+(?:\s+password\s+(?=\S*\d)|\s*\n\s*password\s+)\S{4,})",
    ],
    "an authorization header": [
        r"(?i:\bbearer\s+[\w.~+/=-]{16,})", r"(?i:\bauthorization:?\s*basic\s+[\w+/=]{8,})",
    ],
    "a password on a command line": [
        r"(?i:(?<!\w)--(?:password|passwd|pass|token|api[_-]?key|secret)[= ])"
        r"(?![-<$\[{*.\s])[^\s\"']{4,}",
        r"\bcurl\b[^\n]{0,200}\s-u\s+\S+:\S{3,}",
    ],
}  # fmt: skip
# A token that follows a letter, as after a lost space or quote; it must have a digit.
_INSIDE = re.compile(
    r"(?<=\w)(?=(?:hf_|api_org_|gh[pousr]_|github_pat_|gl(?:pat|dt|ft|soat|rt)-|AKIA|AIza|"
    r"GOCSPX-|xox[abeoprs]-|npm_|pypi-|gsk_|xai-|nvapi-|dapi|[rsp]k_live_|KGAT_|sk-(?:[a-z]+\d*-)*)"
    r"(?=[A-Za-z0-9_]*\d)[A-Za-z0-9_]{16})"
)
# A key of W&B and others has the form of a commit; one of these words distinguishes it.
_HEX_KEY = re.compile(r"(?<![\w@/-])(?<! at )(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{40}(?![\w-])")
_OF_COMMITS = re.compile(r"(?i)commit|revision|\brev\b|sha-?1|\bgit\b|hash|digest|snapshot|version")
_SECRETS = {kind: re.compile("|".join(patterns)) for kind, patterns in _KEYS.items()}

_OWNERS = "api auth access secret private client account service signing encryption master ssh db "
_OWNERS += "database admin root user"
_NOUNS = (
    r"pass(?:word|wd|phrase|code)", "pwd", r"secret(?:[ _-]?access)?[ _-]?key", "secret",
    r"(?:api|auth|access|private)[ _-]?key", r"client[ _-]?secret", "credentials?",
    r"(?:api|auth|access|refresh|bearer|secret|hub|hf|session)[ _-]?token",
    "kennwort", "passwort", "mot de passe", "contrase(?:\u00f1|n)a",
)  # fmt: skip
_WORD = rf"(?:(?:{_OWNERS.replace(' ', '|')})[ _-]?){{0,3}}(?:{'|'.join(_NOUNS)})"
_NAMED = re.compile(
    rf"(?i)(?:^|[^a-z]){_WORD}[\"'`\])]*\s*(?P<by>:=|[:=])\s*"
    r"(?:(?P<quote>[\"'`])(?P<quoted>.{1,200}?)(?P=quote)|(?P<bare>[^\s\"'`]{1,200}))"
)
_KEY_NAME = re.compile(rf"(?i)(?:.*[^a-z])?{_WORD}")
# Not secrets: variables, calls, placeholders, and the words that describe a field.
_PLACEHOLDER = re.compile(
    r"(?i)\W*|[<$%{\[(].*|(?:\w+\.)*\w+[(\[].*|x{3,}|\*+|\.{2,}.*|your\b.*|my[_-].*|"
    r"none|null|nil|true|false|yes|no|n/a|tbd|todo|str(?:ing)?|int|bool|any|optional|required|hidden|"
    r"redacted|removed|example|placeholder|changeme|secret|password|token|empty|unset|missing|env|"
    r"environment|default"
)
# Absolute and home paths. After a letter, digit or dot, a slash is part of a URL or of a relative
# path; system folders and routes of web services reveal nothing about a machine.
_PATHS = re.compile(
    r"""(?<![\w./\\})])(?:-[A-Z])?/(?!(?:dev|bin|usr/bin|api|v\d+)/)[\w.+@%-]+/[\w.+@%-]
    |(?<![\w./\\])/root(?![\w.-])
    |\bfile:/+[^\s/]
    |(?<![\w~])~(?:[A-Za-z_][\w.-]*)?[/\\][\w.]
    |(?<![A-Za-z0-9])[A-Za-z]:[\\/]{1,4}(?:[\w.$ -]+[\\/]|(?:users|documents|home)\b)
    |(?<![\w\\])\\{2,4}(?:\?\\|[\w.$-]+\\{1,2}[\w$.-])""",
    re.VERBOSE | re.IGNORECASE,
)


_SIGNATURE = re.compile(r"at signatures\.\d+\.signature")


@dataclass(frozen=True)
class Finding:
    """A secret or path in a file, without its text; `code` allows it."""

    file: str
    place: str
    problem: str
    code: str


def refuse_leaks(files: Mapping[str, bytes], allowed: Collection[str] = ()) -> None:
    """Refuse to publish text that contains a path of this machine or a secret.

    In tensor files, only the header is searched. `allowed` has codes of findings that the user
    accepts.

    Raises:
        FileError: a file contains one; the error lists each place, without the secret.
    """
    leaks = [f for f in findings(files) if f.code not in allowed]
    if leaks:
        raise FileError(
            "these files contain private information",
            offenders=shorten([f"{f.file}, {f.place}: {f.problem} ({f.code})" for f in leaks]),
            expected="no absolute paths, tokens, keys or passwords",
            hint="correct the text or the recipe, and save the adapter again; if it is no secret: "
            f"--allow-finding {leaks[0].code} (allow_findings=[...])",
        )


def findings(files: Mapping[str, bytes]) -> list[Finding]:
    """List the secrets and paths in files, each kind once per place."""
    return [
        Finding(name, place, problem, _code(name, place, problem, data))
        for name, data in files.items()
        for place, problem in _in_file(data if not name.endswith(_BINARY) else _header(data))
        # Numbers of 64 bytes sometimes look like a key; their form is checked elsewhere.
        if not (name == SIGNATURE_FILE and _SIGNATURE.fullmatch(place))
    ]


def _in_file(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (place, problem), by the keys and values of a JSON document, or else by line."""
    if values := list(_json_texts(data)):
        for path, key, text in values:
            across = (p for pair in pairwise(text.split("\n")) for p in _problems_across(*pair))
            for problem in dict.fromkeys((*_problems_in(text, key), *across)):
                yield f"at {one_line(path, _MOST_IN_A_PLACE)}", problem
        return
    lines = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, 1):
        yield from ((f"line {number}", problem) for problem in _problems_in(line))
    for number, pair in enumerate(pairwise(lines), 1):
        yield from ((f"lines {number} and {number + 1}", p) for p in _problems_across(*pair))


def _json_texts(data: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield (path, key, text) for each text in a JSON document; none if it is not JSON."""
    try:
        tree = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return
    queue: list[tuple[str, str, object]] = [("", "", tree)]
    while queue:
        path, key, value = queue.pop()
        if isinstance(value, _Pairs):
            for name, item in value:
                below = f"{path}.{name}" if path else name
                yield f"{path}, a key" if path else "a key", "", name
                queue.append((below, name, item))
        elif isinstance(value, list):
            queue += [(f"{path}.{i}", key, item) for i, item in enumerate(value)]
        elif isinstance(value, str):
            yield path, key, value


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, duplicates included."""


def _code(name: str, place: str, problem: str, data: bytes) -> str:
    """Return a code that is valid for this finding in exactly these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return hashlib.sha256(f"{name}\0{place}\0{problem}\0{digest}".encode()).hexdigest()[:8]


def _header(data: bytes) -> bytes:
    """Return the text of a safetensors file: its header."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _problems_in(text: str, key: str = "") -> Iterator[str]:
    """Yield each kind of secret or path in a line, or in the value named `key` of a document."""
    if key and _KEY_NAME.fullmatch(key) and not _PLACEHOLDER.fullmatch(text.strip()):
        yield f"a value named {key[:40]!r}"
    named = f'"{key}": "{text}"' if key and len(text) <= _MOST_NAMED else text
    yield from _keys_in(_INSIDE.sub(" ", named))
    if _HEX_KEY.search(text) and not _OF_COMMITS.search(named):
        yield "a key of 40 digits"
    if _names_a_secret(text):
        yield "a password or key"
    if _PATHS.search(text):
        yield "an absolute path"


def _keys_in(text: str) -> Iterator[str]:
    """Yield each kind of key that a text contains, by its form."""
    yield from (kind for kind, pattern in _SECRETS.items() if pattern.search(text))
    yield from (kind for kind, plugin in _plugins().items() if any(plugin.analyze_string(text)))


def _problems_across(first: str, second: str) -> Iterator[str]:
    """Yield each kind of key that begins in one line and goes on in the next."""
    start, end = first.rstrip(" \t\r\\"), second.lstrip(" \t>#*|")
    in_words = {_NETRC} & {*_keys_in(f"{start}\n{end}")}
    broken = {*_keys_in(start + end)} - {_NETRC} | in_words
    yield from sorted(broken - {*_keys_in(start)} - {*_keys_in(end)})


@cache
def _plugins() -> Mapping[str, Any]:
    """Return detect-secrets' rules; only their patterns are used, never their online checks."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    plugins: Mapping[str, Any] = get_mapping_from_secret_type_to_class()
    return {
        f"a secret ({kind})": plugin()
        for kind, plugin in plugins.items()
        if plugin.__module__.rpartition(".")[2] not in _LEFT_OUT
    }


def _names_a_secret(text: str) -> bool:
    """Return whether a word for a secret is followed by a value that is not prose."""
    return any(_is_secret(match) for match in _NAMED.finditer(text))


def _is_secret(match: re.Match[str]) -> bool:
    quoted, value = match["quoted"], match["quoted"] or match["bare"].rstrip(",;.)")
    if len(value) < _LEAST_SECRET or _PLACEHOLDER.fullmatch(value):
        return False
    return (bool(quoted) and " " not in value) or match["by"] != ":" or _looks_random(value)


def _looks_random(word: str) -> bool:
    """Return whether a word has digits, signs or capitals where prose would not."""
    core = word.strip("\"'`*_()[].,")
    return len(core) >= _LEAST_SECRET and bool(re.search(r"\d|[^\w'-]|_|[a-z][A-Z]", core))
