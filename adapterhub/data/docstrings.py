"""A small text corpus included in every Python installation: the standard library's docstrings.

The task: classify a docstring by the part of the library that it belongs to. The texts are the
first paragraphs of the docstrings of modules, classes and functions, read from the source files
with `ast`; no module is imported. Graphical modules are excluded, since some systems ship Python
without them.
"""

from __future__ import annotations

import ast
import collections
import functools
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from adapterhub.data.examples import Example
from adapterhub.errors import DataError

# Modules and packages of each class; modules missing from the running Python are skipped.
PARTS = {
    "text": "argparse cmd codecs csv configparser difflib fnmatch getopt gettext html json locale "
    "optparse plistlib pprint quopri re reprlib shlex string stringprep textwrap tomllib base64 "
    "_strptime getpass",
    "data": "_collections_abc _pydecimal _weakrefset abc bisect calendar collections colorsys copy "
    "copyreg dataclasses datetime _pydatetime enum fractions functools graphlib hashlib heapq hmac "
    "numbers operator random secrets statistics types uuid weakref zoneinfo",
    "files": "_pyio _compression bz2 dbm filecmp fileinput genericpath glob gzip io linecache lzma "
    "netrc ntpath os pathlib pickle posixpath shelve shutil sqlite3 stat tarfile tempfile zipfile "
    "zipapp zipimport",
    "network": "cgi ftplib http imaplib ipaddress nntplib poplib smtplib socket socketserver ssl "
    "telnetlib urllib webbrowser wsgiref xmlrpc",
    "concurrency": "_threading_local asyncio concurrent contextlib multiprocessing queue sched "
    "selectors signal subprocess threading",
    "testing": "bdb cProfile cgitb doctest logging pdb profile pstats timeit trace traceback "
    "tracemalloc unittest warnings",
    "language": "ast code codeop compileall dis importlib inspect keyword modulefinder opcode "
    "pickletools pkgutil platform py_compile pyclbr pydoc runpy site symtable sysconfig tabnanny "
    "token tokenize typing",
    "documents": "email mailbox mailcap mimetypes xml",
}
_EXCLUDED = frozenset({"test", "tests", "idle_test", "lib2to3", "__pycache__"})
_MIN_LENGTH, _MAX_LENGTH = 40, 400  # characters
_MAX_PER_MODULE = 60  # docstrings; no single module should dominate its class
_EVAL_SHARE = 0.25
_MIN_PER_CLASS = 40  # docstrings


def load_docstrings(
    seed: int = 0, limit_per_class: int = 300
) -> tuple[list[Example], list[Example]]:
    """Return training and evaluation examples, about 3 to 1.

    Every class is in both parts; no module is in both.

    Raises:
        DataError: the source files of the standard library are not installed.
    """
    train: list[Example] = []
    evaluation: list[Example] = []
    for label, modules in _corpus(Path(sysconfig.get_path("stdlib"))):
        rng = random.Random(f"{seed} {label}")
        train_texts, evaluation_texts = _split(modules, limit_per_class, rng)
        train += [Example(text, None, label) for text in train_texts]
        evaluation += [Example(text, None, label) for text in evaluation_texts]
    return train, evaluation


_Modules = tuple[tuple[str, ...], ...]


@functools.cache
def _corpus(stdlib: Path) -> tuple[tuple[str, _Modules], ...]:
    """Return the texts by class and module, without texts that occur in several classes."""
    modules_of = {label: [_paragraphs(p) for p in _sources(stdlib, label)] for label in PARTS}
    labels_of_key: dict[str, set[str]] = collections.defaultdict(set)
    for label, modules in modules_of.items():
        for text in (text for module in modules for text in module):
            labels_of_key[_key(text)].add(label)
    unique = {key for key, labels in labels_of_key.items() if len(labels) == 1}
    corpus = tuple((label, _distinct(modules, unique)) for label, modules in modules_of.items())
    counts = {label: sum(map(len, modules)) for label, modules in corpus}
    if min(counts.values()) < _MIN_PER_CLASS or min(len(modules) for _, modules in corpus) < 2:
        raise DataError(
            f"{stdlib} does not contain the source files of Python's standard library",
            offenders=[f"{label}: {count} docstrings" for label, count in counts.items()],
            expected=f"at least {_MIN_PER_CLASS} docstrings of each class in .py files",
            hint="use a Python installed with its source files, or your own data",
        )
    return corpus


def _sources(stdlib: Path, label: str) -> Iterator[Path]:
    for name in sorted(PARTS[label].split()):
        files = [stdlib / f"{name}.py", *sorted((stdlib / name).rglob("*.py"))]
        for path in files:
            if path.is_file() and not _EXCLUDED.intersection(path.relative_to(stdlib).parts):
                yield path


def _paragraphs(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the library's strings
        tree = ast.parse(path.read_bytes())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [" ".join(doc.split("\n\n")[0].split()) for doc in docs]
    return [t for t in texts if _MIN_LENGTH <= len(t) <= _MAX_LENGTH and ">>>" not in t]


def _key(text: str) -> str:
    return re.sub(r"\W+", " ", text.casefold()).strip()


def _distinct(modules: Iterable[list[str]], unique: set[str]) -> _Modules:
    """Keep each text at its first occurrence by key, and drop modules without texts."""
    seen: set[str] = set()
    distinct = []
    for module in modules:
        texts = {_key(text): text for text in module if _key(text) in unique}
        distinct.append(tuple(text for key, text in texts.items() if key not in seen))
        seen.update(texts)
    return tuple(texts for texts in distinct if texts)


def _split(modules: _Modules, limit: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """Split by module: in random order, the modules that fit go to evaluation."""
    capped = [rng.sample(texts, min(len(texts), _MAX_PER_MODULE)) for texts in modules]
    total = sum(map(len, capped))
    evaluation_size = round(total * _EVAL_SHARE)
    train: list[str] = []
    evaluation: list[str] = []
    for texts in rng.sample(capped, len(capped)):
        fits = len(evaluation) + len(texts) <= evaluation_size
        (evaluation if fits else train).extend(texts)
    share = min(1.0, limit / total)
    return _sample(train, share, rng), _sample(evaluation, share, rng)


def _sample(texts: list[str], share: float, rng: random.Random) -> list[str]:
    return rng.sample(texts, max(1, round(len(texts) * share)))
