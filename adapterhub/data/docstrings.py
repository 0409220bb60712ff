"""A small real corpus that is on every machine: the docstrings of Python's standard library.

The task: which part of the library does a docstring describe? The texts are the first paragraphs of
the docstrings of modules, classes and functions, read from the source files with `ast`; no module
is imported. Graphical modules are left out: many systems ship Python without them.
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

# Modules and packages of each class. Names that one version of Python lacks are skipped there.
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
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "lib2to3", "__pycache__"})
_SHORTEST, _LONGEST = 40, 400  # characters
_PER_MODULE = 60  # so that no single module stands for its class
_EVAL_SHARE = 0.25
_FEWEST = 40  # docstrings without which a class cannot be learned


def load_docstrings(
    seed: int = 0, limit_per_class: int = 300
) -> tuple[list[Example], list[Example]]:
    """Training and evaluation examples, about 3 to 1; no module is in both, each class is.

    Raises DataError where the source of the standard library is not on disk.
    """
    train: list[Example] = []
    evaluation: list[Example] = []
    for label, modules in _corpus(Path(sysconfig.get_path("stdlib"))):
        rng = random.Random(f"{seed} {label}")
        held_out = _split(modules, limit_per_class, rng)
        for side, texts in zip((train, evaluation), held_out, strict=True):
            side += [Example(text, None, label) for text in texts]
    return train, evaluation


_Modules = tuple[tuple[str, ...], ...]


@functools.cache
def _corpus(stdlib: Path) -> tuple[tuple[str, _Modules], ...]:
    """For each class, for each of its modules, the texts that stand nowhere else."""
    found = {label: [_paragraphs(p) for p in _sources(stdlib, label)] for label in PARTS}
    seen: dict[str, set[str]] = collections.defaultdict(set)
    for label, modules in found.items():
        for text in (text for module in modules for text in module):
            seen[_key(text)].add(label)
    corpus = tuple((label, _distinct(modules, seen)) for label, modules in found.items())
    counts = {label: sum(map(len, modules)) for label, modules in corpus}
    if min(counts.values()) < _FEWEST or min(len(modules) for _, modules in corpus) < 2:
        raise DataError(
            f"{stdlib} does not hold the source files of Python's standard library",
            offenders=[f"{label}: {count} docstrings" for label, count in counts.items()],
            expected=f"at least {_FEWEST} docstrings of each class in .py files",
            hint="use a Python that is installed with its source files, or data of your own",
        )
    return corpus


def _sources(stdlib: Path, label: str) -> Iterator[Path]:
    for name in sorted(PARTS[label].split()):
        files = [stdlib / f"{name}.py", *sorted((stdlib / name).rglob("*.py"))]
        for path in files:
            if path.is_file() and not _LEFT_OUT.intersection(path.relative_to(stdlib).parts):
                yield path


def _paragraphs(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Escapes in others' strings are not the user's matter.
        tree = ast.parse(path.read_bytes())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    firsts = [" ".join(doc.split("\n\n")[0].split()) for doc in docs]
    return [text for text in firsts if _SHORTEST <= len(text) <= _LONGEST and ">>>" not in text]


def _key(text: str) -> str:
    return re.sub(r"\W+", " ", text.casefold()).strip()


def _distinct(modules: Iterable[list[str]], seen: dict[str, set[str]]) -> _Modules:
    taken: set[str] = set()
    kept = []
    for module in modules:
        texts = {_key(text): text for text in module if len(seen[_key(text)]) == 1}
        kept.append(tuple(text for key, text in texts.items() if key not in taken))
        taken.update(texts)
    return tuple(texts for texts in kept if texts)


def _split(modules: _Modules, limit: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """Whole modules, in a random order, go to evaluation while they fit into its share."""
    capped = [rng.sample(texts, min(len(texts), _PER_MODULE)) for texts in modules]
    total = sum(map(len, capped))
    room = round(total * _EVAL_SHARE)
    train: list[str] = []
    evaluation: list[str] = []
    for texts in rng.sample(capped, len(capped)):
        side = evaluation if len(evaluation) + len(texts) <= room else train
        side += texts
    keep = min(1.0, limit / total)
    return _sample(train, keep, rng), _sample(evaluation, keep, rng)


def _sample(texts: list[str], share: float, rng: random.Random) -> list[str]:
    return rng.sample(texts, max(1, round(len(texts) * share)))
