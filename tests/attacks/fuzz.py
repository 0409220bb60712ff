"""Fuzz what reads untrusted files: any exception but AdapterhubError is a finding.

    PYTHONPATH=.:tests/attacks python tests/attacks/fuzz.py --seconds 300 [--seed 0]

Each input is a valid file, written at run time, after one to four mutations. Most mutated manifests
get a valid digest, so that the checks behind the digest are reached. A finding is printed with the
seed that reproduces it. Checkpoints of other libraries are attacked in test_hostile_foreign.py;
tests/files/test_native.py and test_hostile_runs.py flip bits, and test_fuzz.py draws specs.
"""

import argparse
import collections
import copy
import gzip
import json
import random
import re
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forge
import pyarrow
import pyarrow.parquet
import torch

import adapterhub as ah
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.files.native import Saved
from adapterhub.inference.record import read_training_record
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe import recipe

# Random mutations of bytes and of JSON trees

TOKENS = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[31m", b"\xe2\x80\xae", b"\r", b"\n",
    b"\t", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b"(", b")", b":", b",", b"#", b"- ", b"&a ",
    b"*a", b"!!python/object/apply:os.system", b"<<: ", b"NaN", b"Infinity", b"1e999", b"-0",
    b"true", b"null", b"9" * 400, b"18446744073709551616", b"\\ud800", b"\\U0011ffff", b"\\x",
    b"../", b"/etc/passwd", b"__class__", b"[" * 200, b"{" * 200, b"\x80\x04K\x01.", b"PK\x03\x04",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**53, 10**12, 2**63 - 1, 2**63, -(2**63),
    0.0, -1.5, 1e-300, 1e308, "", "a", "*", "**", "..", "../x", "/etc/passwd", "~", "C:\\x", "\0",
    "\x1b[31m", "\u202e", "\u2028", "é", "😀", "a" * 300, "0..9999999", "top 99", "__class__",
    "lora", "F32", "F16", "BOOL", "U8", "os.system", [], {}, [[]], [0], [-1], ["*"], {"a": 1},
    {"*": 10**9}, {"__class__": {}}, [10**12], [2**32, 2**32], [1] * 40, list(range(50)),
]  # fmt: skip
NUMBERS = [value for value in VALUES if type(value) is int]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Apply one to four random changes to bytes."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(0, len(data)), rng.choice([1, 1, 2, 4, 8, 16, 64, 256])
        cut = data[at : at + length]
        data = rng.choice(
            [
                lambda at=at, d=data: d[:at] + bytes([rng.randrange(256)]) + d[at + 1 :],
                lambda at=at, d=data: d[:at] + rng.choice(TOKENS) + d[at:],
                lambda at=at, d=data: d[:at] + rng.choice(TOKENS) + d[at + 1 :],
                lambda at=at, d=data, n=length: d[:at] + d[at + n :],
                lambda at=at, d=data: d[:at],
                lambda at=at, d=data, c=cut: d[:at] + c * rng.choice([2, 3, 50]) + d[at:],
                lambda d=data, c=cut: (lambda to: d[:to] + c + d[to:])(rng.randint(0, len(d))),
                lambda d=data: re.sub(
                    rb"\d+", lambda m: str(rng.choice(NUMBERS)).encode(), d, count=1
                ),
            ]
        )()
    return data


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each node of a JSON tree as (container, key)."""
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in pairs:
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def mutate_tree(rng: random.Random, tree: forge.Tree, under: str | None = None) -> forge.Tree:
    """Apply one to four random changes to the values and keys of a JSON tree."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 4)):
        root = tree.get(under) if under else tree
        candidates = list(nodes(root)) if isinstance(root, (dict, list)) else []
        if not candidates:
            tree[under or "x"] = copy.deepcopy(rng.choice(VALUES))
            continue
        holder, key = rng.choice(candidates)
        kind = rng.randrange(6)
        if kind < 3:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            other, name = rng.choice(candidates)
            if isinstance(other, list) or name in other:
                holder[key] = copy.deepcopy(other[name]) if not isinstance(other, list) else 0
        elif kind == 4 and isinstance(holder, dict):
            name = rng.choice([v for v in VALUES if isinstance(v, str)])
            holder[name] = holder.pop(key)
        else:
            del holder[key]
    return tree


# What reads untrusted files

Target = Callable[[random.Random], None]


class Fuzzer:
    """The targets by name, and the valid files that they mutate."""

    def __init__(self, folder: Path, methods: list[str]) -> None:
        self.folder = folder
        self.model = forge.new_model()
        self.state = forge.state_of(self.model)
        record = {"recipe": {"task": "classification", "data": {"text": "text", "label": "label"},
                             "train": {"max_length": 64}}, "seed": 3}  # fmt: skip
        self.adapters = []
        for i, method in enumerate(methods or self._fitting()):
            valid = forge.save_valid(folder / f"valid-{i}", method)
            tree = forge.read_tree(valid) | {"training": record}
            (valid / forge.MANIFEST).write_bytes(forge.sealed(tree))
            self.adapters.append({p.name: p.read_bytes() for p in valid.iterdir()})
        self.place = folder / "target"
        self.place.mkdir()
        self.data = self._data()
        names = [name for name in dir(self) if name.startswith("read_")]
        self.targets: dict[str, Target] = {
            **{name.removeprefix("read_"): getattr(self, name) for name in names},
            # Of a manifest as JSON, or of a part of it, with the digest updated.
            "manifest": self._read_tree,
            "methods": lambda rng: self._read_tree(rng, "methods"),
            "record": lambda rng: self._read_tree(
                rng, "training", lambda: read_training_record(self.place)
            ),
        }

    def _fitting(self) -> list[str]:
        def fits(name: str) -> bool:
            try:
                ah.attach(self.model, name).detach()
            except AdapterhubError:
                return False
            return True

        return [name for name in sorted(METHODS) if fits(name)]

    def _put(self, files: dict[str, bytes]) -> Path:
        for name, data in files.items():
            (self.place / name).write_bytes(data)
        return self.place

    def _load(self) -> None:
        try:
            ah.load(self.model, self.place).detach()
        finally:
            assert forge.state_of(self.model) == self.state, "the model has changed"

    def read_numbers(self, rng: random.Random) -> None:
        """Change the bytes of a safetensors file, and update its digest."""
        self._put(files := rng.choice(self.adapters))
        data = mutate_bytes(rng, files[forge.TENSORS])
        forge.forge_file(self.place, forge.TENSORS, data)
        _, tensors = Saved.at(self.place).read()
        assert all(bool(torch.isfinite(t).all()) for t in tensors.values())

    def read_headers(self, rng: random.Random) -> None:
        """Change a safetensors header as JSON, and update the digest."""
        self._put(files := rng.choice(self.adapters))
        header, numbers = forge.split_header(files[forge.TENSORS])
        length = rng.choice([None] * 20 + [0, 7, 10**6, 10**8, 2**63, 2**64 - 1])
        data = forge.join_header(mutate_tree(rng, header), numbers, length)
        forge.forge_file(self.place, forge.TENSORS, data)
        _, tensors = Saved.at(self.place).read()
        assert all(t.numel() for t in tensors.values())

    def _read_tree(
        self, rng: random.Random, under: str | None = None, read: Callable[[], object] | None = None
    ) -> None:
        files = dict(rng.choice(self.adapters))
        files[forge.MANIFEST] = forge.sealed(
            mutate_tree(rng, json.loads(files[forge.MANIFEST]), under)
        )
        self._put(files)
        (read or self._load)()

    def read_recipe(self, rng: random.Random) -> None:
        """Change the bytes of a recipe."""
        options = DataOptions(train="train.tsv")
        text = recipe.Recipe(backbone="a/b", output="out", data=options).to_yaml().encode()
        path = self.folder / "recipe.yaml"
        path.write_bytes(mutate_bytes(rng, text))
        parse_methods(recipe.read(path).method)

    def _data(self) -> dict[str, bytes]:
        rows = [{"text": f"a text, number {i}", "label": "01"[i % 2]} for i in range(8)]
        lines = "text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\n" for r in rows)
        parquet = self.folder / "d.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
        return {
            "d.tsv": lines.encode(),
            "d.csv": "".join(f'"{r["text"]}",{r["label"]}\n' for r in rows).encode(),
            "d.jsonl": "".join(json.dumps(r) + "\n" for r in rows).encode(),
            "d.parquet": parquet.read_bytes(),
            "d.conll": b"a B-X\nb O\n\nc O\nd B-Y\n",
            "d.txt": b"one\ntwo\n",
            "d.tsv.gz": gzip.compress(lines.encode()),
        }

    def read_data(self, rng: random.Random) -> None:
        """Change the bytes of a data file."""
        name = rng.choice(sorted(self.data))
        path = self.folder / name
        path.write_bytes(mutate_bytes(rng, self.data[name]))
        read_examples(str(path), DataOptions(), labelled=rng.random() < 0.5)


def outcome_of(target: Target, rng: random.Random) -> str:
    """Run a target on one input; describe the outcome. Exceptions but AdapterhubError propagate."""
    try:
        target(rng)
    except AdapterhubError as error:
        text = f"{str(error).splitlines()[0]} {' '.join(error.offenders[:1])}"
        str(error).encode()
        return f"{type(error).__name__}: {re.sub(r'[^A-Za-z ]+', '#', text)[:120]}"
    return "accepted"


def fuzz(
    folder: Path,
    seed: int,
    inputs: int | None,
    seconds: float,
    only: str | None = None,
    methods: Sequence[str] = (),
) -> tuple[dict[str, collections.Counter[str]], list[str]]:
    """Fuzz in turn; return the outcomes of each target, counted, and tracebacks of the findings."""
    fuzzer = Fuzzer(folder, list(methods))
    outcomes: dict[str, collections.Counter[str]] = {
        name: collections.Counter() for name in fuzzer.targets if only in (None, name)
    }
    findings: list[str] = []
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end and (inputs is None or number < inputs):
        name = list(outcomes)[number % len(outcomes)]
        start = time.monotonic()
        try:
            outcome = outcome_of(fuzzer.targets[name], random.Random(f"{seed}-{number}"))
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f"{f.filename}:{f.lineno}" for f in frames if "/adapterhub/" in f.filename]
            outcome = f"FINDING {type(error).__name__} {' '.join(ours[-1:])}"
            if not outcomes[name][outcome]:  # one finding of a kind is enough to fix it
                findings.append(f"{name}, seed {seed}-{number}\n{traceback.format_exc()}")
            if isinstance(error, KeyboardInterrupt):
                break
        if time.monotonic() - start > 20:
            findings.append(f"{name}, seed {seed}-{number}: {time.monotonic() - start:.0f} s")
        outcomes[name][outcome] += 1
        number += 1
    return outcomes, findings


def main() -> None:
    """Run, and print the number of inputs and of distinct outcomes of each target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    options = parser.parse_args()
    limit = 24 << 30  # of the address space; a larger allocation is a finding
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        outcomes, findings = fuzz(Path(folder), options.seed, None, options.seconds, options.only)
    for name, counts in outcomes.items():
        print(f"{name:16} {counts.total():8,} inputs  {len(counts):5} outcomes")
    print(*[f"{len(findings)} findings", *findings[:20]], sep="\n\n")


if __name__ == "__main__":
    main()
