"""Hostile manifests with a valid digest: each is refused, or the change has no effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import (
    MANIFEST,
    SECONDS,
    Tree,
    forge,
    read_tree,
    refused,
    sealed,
    state_of,
)

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.selection import long_table

ESC, OVERRIDE = "\x1b[2J\x1b]0;owned\x07", "\u202egnp.exe"


def put(path: str, value: Any) -> Callable[[Tree], None]:
    """Return a function that sets a field, such as `backbone/id`."""

    def change(tree: Tree) -> None:
        *parents, last = path.split("/")
        for name in parents:
            tree = tree[int(name)] if isinstance(tree, list) else tree[name]
        tree[last] = value

    return change


def lora(**options: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["methods"][0]["lora"].update(options)


def method(name: str, **options: Any) -> Callable[[Tree], None]:
    return put("methods", [{name: options}])


def shape(value: Any) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        first = sorted(tree["tensors"])[0]
        tree["tensors"][first]["shape"] = value

    return change


def tensor(name: str, dtype: Any = "F32", size: Any = (2,)) -> Callable[[Tree], None]:
    return lambda tree: tree["tensors"].update({name: {"dtype": dtype, "shape": list(size)}})


CODE = {
    "auto_map": {"AutoModel": "evil--modeling.Evil"},
    "trust_remote_code": True,
    "_target_": "os.system",
    "class_path": "subprocess.Popen",
    "init_args": {"args": ["touch canary"]},
    "tokenizer_kwargs": {"trust_remote_code": True},
    "__reduce__": ["os.system", "touch canary"],
}

REFUSED: dict[str, Callable[[Tree], None]] = {
    # names that are paths or contain terminal escapes
    "name: parent folder": put("name", "../../etc/cron.d/x"),
    "name: absolute": put("name", "/etc/passwd"),
    "name: windows": put("name", "C:\\Windows\\x"),
    "name: network": put("name", "\\\\evil\\share"),
    "name: dots in the middle": put("name", "a/../../b"),
    "name: NUL": put("name", "a\0b"),
    "name: escape": put("name", ESC),
    "name: right to left": put("name", OVERRIDE),
    "name: long": put("name", "a" * 10**5),
    "name: empty": put("name", ""),
    "name: a list": put("name", ["a"]),
    "label: given twice": put("labels", ["a", "a", "b"]),
    "label: a number": put("labels", ["a", 3]),
    "labels: a million": put("labels", [""] * 10**6),
    "labels: more than the head has": put("labels", [str(i) for i in range(50_000)]),
    "labels: fewer than the head has": put("labels", ["a", "b"]),
    "label: long": put("labels", ["a" * 10**5]),
    "tensor name: parent folder": tensor("../../x"),
    "tensor name: absolute": tensor("/etc/passwd"),
    "tensor name: dots": tensor("a..b"),
    "tensor name: escape": tensor(ESC),
    "tensor name: NUL": tensor("a\0"),
    "tensor name: surprise": tensor("__class__.__init__.__globals__"),
    "file name: parent folder": lambda tree: tree["files"].update({"../../x": "0" * 64}),
    "file name: other": put("files/model.py", "0" * 64),
    "file name: pickle": put("files/adapter.bin", "0" * 64),
    "digest of a file: short": put("files/adapter.safetensors", "0"),
    "backbone: absolute path": put("backbone/id", "/home/user/secret"),
    "backbone: parent folder": put("backbone/id", "../secret"),
    "backbone: hidden parent": put("backbone/id", "a/../../b"),
    "backbone: home": put("backbone/id", "~/secret"),
    "backbone: network": put("backbone/id", "\\\\evil\\share"),
    "backbone: URL": put("backbone/id", "https://evil.example/x"),
    "backbone: option": put("backbone/id", "--help"),
    "revision: parent folder": put("backbone/revision", "../../x"),
    "revision: absolute": put("backbone/revision", "/etc/passwd"),
    "fingerprint: another": put("backbone/fingerprint", "bf16-" + "0" * 64),
    # shapes
    "shape: negative": shape([-2, 32]),
    "shape: zero": shape([0, 32]),
    "shape: bool": shape([True, 32]),
    "shape: float": shape([2.0, 32]),
    "shape: text": shape(["2", 32]),
    "shape: not a list": shape({"0": 2}),
    "shape: beyond 64 bits": shape([2**62, 2**62]),
    "shape: product overflows to 0": shape([2**32, 2**32]),
    "shape: product overflows to the right size": shape([2**32 + 2, 2**32]),
    "shape: a terabyte": shape([2**38]),
    "shape: many dimensions": shape([1] * 9),
    "shape: other": shape([32, 2]),
    "dtype: unknown": tensor("x", "F8_E4M3"),
    "dtype: a class": tensor("x", "torch.storage._UntypedStorage"),
    "dtype: null": tensor("x", None),
    "dtype: other": lambda tree: [t.update(dtype="F16") for t in tree["tensors"].values()],
    "tensors: none": put("tensors", {}),
    "tensors: one missing": lambda tree: tree["tensors"].popitem(),
    "tensors: one more": tensor("encoder.0.attn.k.lora.A"),
    "tensors: 19,000": lambda tree: [tensor(f"t{i}", size=[1])(tree) for i in range(19_000)],
    "tensors: 100,000": put("tensors", {str(i): {} for i in range(10**5)}),
    # methods
    "method: unknown": method("evil"),
    "method: a path": method("os.system"),
    "method: private": method("__class__"),
    "methods: none": put("methods", []),
    "methods: 65": put("methods", [{"head": {}}] * 65),
    "methods: one 64 times": lambda tree: tree.update(methods=tree["methods"] * 64),
    "methods: two in one": put("methods", [{"lora": {}, "head": {}}]),
    "methods: text": put("methods", "lora(rank=10**12)"),
    "option: unknown": lora(init="os.system"),
    "option: code": lora(**CODE),
    "option: private": lora(__class__="x", __dict__={}),
    "option: too many": lora(ranks={f"encoder.{i}.attn.q": 1 for i in range(10_000)}),
    "rank: huge": lora(rank=10**12),
    "rank: beyond 64 bits": lora(rank=2**63 - 1),
    "rank: negative": lora(rank=-(10**12)),
    "rank: float": lora(rank=2.0),
    "rank: true": lora(rank=True),
    "ranks: huge": lora(ranks={"*": 10**12}),
    "ranks: one huge": lora(ranks={"encoder.1.attn.v": 10**12}),
    "ranks: idle pattern": lora(ranks={ESC: 3}),
    "dropout: more than all": lora(dropout=1e300),
    "sites: none such": lora(sites=[ESC]),
    "sites: thousands of wildcards": lora(sites=["*a" * 20_000]),
    "sites: thousands of patterns": lora(sites=[f"*{i}*" for i in range(4000)]),
    "sites: nested wildcards": lora(sites=["*" * 100 + "[!" + "a" * 100 + "]" * 100 + "x"]),
    "layers: huge range": lora(layers="0..999999999"),
    "layers: range of many digits": lora(layers="0.." + "9" * 5000),
    "layers: many digits": lora(layers="9" * 5000),
    "layers: top of many digits": lora(layers="top " + "9" * 5000),
    "layers: huge number": lora(layers=2**62),
    "layers: negative": lora(layers=[-1]),
    "layers: many": lora(layers=list(range(5000))),
    "prompt: huge": method("prompt", length=10**12),
    "prompt: negative": method("prompt", length=-5),
    "prefix: huge": method("prefix", length=10**12),
    "prefix: huge network": method("prefix", length=1, reparametrize=True, middle=10**12),
    "p-tuning: huge": method("p-tuning", length=10**12),
    "p-tuning: huge network": method("p-tuning", length=1, middle=10**8, encoder="lstm"),
    "p-tuning: negative network": method("p-tuning", length=1, middle=-5),
    "houlsby: huge": method("houlsby", size=10**12),
    "houlsby: huge at a site": method("houlsby", sizes={"ffn": 10**12}),
    "houlsby: activation": method("houlsby", activation="os.system"),
    "compacter: huge": method("compacter", size=10**12),
    "compacter: huge products": method("compacter", n=10**6, size=10**6),
    "compacter: activation": method("compacter", activation="__import__"),
    "mam: huge": method("mam", length=10**12),
    "mam: huge network": method("mam", size=10**12),
    "dora: huge": method("dora", rank=10**12),
    "pissa: huge": method("pissa", rank=10**12),
    "pissa: for ever": method("pissa", rank=2, iterations=10**12),
    "pissa: root of a negative number": method("pissa", rank=2, alpha=-1.0),
    "full: decay": method("full", decay=1e-300),
    "staged: decay": method("staged", decay=1e300),
    "staged: many groups": method("staged", groups=["+".join("abcdefgh" * 3000)]),
    "unfreeze: size": method("unfreeze", size=-1),
    "freeze: huge": method("freeze", top=10**12),
    # the rest of the schema
    "schema: newer": put("schema_version", 99),
    "schema: true": put("schema_version", True),
    "schema: text": put("schema_version", "1"),
    "head: a number": put("head", 1),
    "head: denied": put("head", False),
    "task: a path": put("task", "../../x"),
    "task: long": put("task", "a" * 10**5),
    "tokenizer: a path": put("tokenizer", "/etc/passwd"),
    "unknown field": put("loader", {"trust_remote_code": True}),
    "unknown field: private": put("__class__", "Manifest"),
    "unknown field in the backbone": put("backbone/trust_remote_code", True),
    "unknown field in the backbone: arguments": put("backbone/kwargs", {"local": "x"}),
    "training: absolute path": put("training", {"recipe": {"output": "/home/user"}}),
    "training: a path as a key": put("training", {"/home/user": 1}),
    "training: a list": put("training", [1]),
    "training: deep": put("training", json.loads("{" + '"a":{' * 24 + "}" * 25)),
    "training: many": put("training", {str(i): [i] for i in range(20_000)}),
    "metrics: text": put("metrics", {"accuracy": "1"}),
    "metrics: beyond 64 bits": put("metrics", {"accuracy": 2**63}),
    "metrics: escape": put("metrics", {ESC: 1.0}),
    "versions: escape": put("versions", {"torch": ESC}),
    "versions: a path": put("versions", {"torch": "/usr/lib/x"}),
}

HARMLESS: dict[str, Callable[[Tree], None]] = {
    "training: code": put("training", {"recipe": CODE | {"task": "classification"}}),
    "training: another backbone": put("training", {"recipe": {"backbone": "evil/model"}}),
    "training: private": put("training", {"__class__": "x", "__proto__": {"a": 1}}),
    "training: escape": put("training", {"note": ESC + OVERRIDE}),
    "label: escape": put("labels", ["ham", ESC, OVERRIDE]),
    "label: private": put("labels", ["__class__", "__init__", "id2label"]),
    "label: a path": put("labels", ["../../x", "/etc/passwd", "C:\\x"]),
    "unknown field: null": put("loader", None),
    "unknown field: empty": put("hooks", []),
}


@long_table("attack", REFUSED)
def test_a_hostile_manifest_is_refused(saved: Path, model, attack: str) -> None:
    before = (saved / MANIFEST).read_bytes()
    forge(saved, REFUSED[attack])
    assert (saved / MANIFEST).read_bytes() != before
    with refused(model):
        ah.load(model, saved)


@pytest.mark.parametrize("attack", HARMLESS)
def test_a_harmless_change_has_no_effect(saved: Path, model, attack: str) -> None:
    before = state_of(model)
    expected = logits(model, ah.load(model, saved))
    forge(saved, HARMLESS[attack])
    assert torch.equal(logits(model, ah.load(model, saved)), expected)
    assert state_of(model) == before


def logits(model, adapter):
    """Compute the logits with an adapter, and detach it."""
    with torch.no_grad():
        output = model(**tiny_models.batch()).logits
    adapter.detach()
    return output


def text(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode("utf-8", "surrogatepass"), 1)

    return change


RAW: dict[str, Callable[[bytes], bytes]] = {
    "byte-order mark": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "invalid UTF-8": text('"name": "default"', '"name": "de\udcff"'),
    "NUL": lambda data: data + b"\0",
    "NUL in a name": text('"name": "default"', '"name": "de\0fault"'),
    "lone surrogate": text('"name": "default"', '"name": "\\ud800"'),
    "lone surrogate as a key": text('"name": "default"', '"name": "default", "\\udc00": 1'),
    "a key given twice": text('"schema_version": 1', '"schema_version": 1, "schema_version": 1'),
    "a nested key given twice": text('"rank": 2', '"rank": 2, "rank": 1000'),
    "NaN": text('"rank": 2', '"rank": NaN'),
    "Infinity": text('"rank": 2', '"rank": -Infinity'),
    "a number too large": text('"rank": 2', '"rank": 1e999'),
    "a number of 100,000 digits": text('"rank": 2', '"rank": ' + "9" * 100_000),
    "20,000 lists deep": lambda data: b"[" * 20_000 + b"]" * 20_000,
    "20,000 objects deep": lambda data: b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "20,000 deep in a field": text('"training": {}', '"training": ' + "[" * 20_000 + "]" * 20_000),
    "unclosed": lambda data: b"[" * 500_000,
    "comments": text('"schema_version": 1', '/* */ "schema_version": 1'),
    "two documents": lambda data: data + data,
    "a trailing blank": lambda data: data + b" ",
    "a pickle": lambda data: b"\x80\x04K\x01.",
    "a list": lambda data: b"[]\n",
    "null": lambda data: b"null\n",
    "text": lambda data: b'"adapter"\n',
    "empty": lambda data: b"",
    "two megabytes": lambda data: data + b" " * (2 << 20),
    "another order": lambda data: json.dumps(json.loads(data), indent=2).encode() + b"\r\n",
    "escaped letters": text('"name"', '"\\u006eame"'),
    "a changed digit": text('"rank": 2', '"rank": 3'),
}


@long_table("attack", RAW)
def test_non_canonical_bytes_are_refused(saved: Path, model, attack: str) -> None:
    data = RAW[attack]((saved / MANIFEST).read_bytes())
    (saved / MANIFEST).write_bytes(data)
    with refused(model, MANIFEST):
        ah.load(model, saved)


def test_a_forged_manifest_equals_a_written_one(saved: Path, model) -> None:
    """Otherwise attacks would be refused for a wrong digest alone."""
    assert sealed(read_tree(saved)) == (saved / MANIFEST).read_bytes()
    ah.load(model, saved).detach()


def test_the_tables_are_not_empty() -> None:
    assert len(REFUSED) >= 110
    assert len(RAW) >= 29
    assert len(HARMLESS) >= 9
    assert SECONDS <= 10
