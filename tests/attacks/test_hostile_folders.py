"""Hostile adapter folders: forged manifests with a valid digest, headers, links, other files.

Each is refused, or has no effect; only the three known files are ever opened. Of what a manifest
may contain, tests/files/test_manifest.py has more.
"""

import io
import itertools
import json
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import (
    CARD,
    MANIFEST,
    TENSORS,
    Bomb,
    Tree,
    bomb,
    forge,
    forge_file,
    join_header,
    read_tree,
    refused,
    sealed,
    split_header,
    state_of,
)

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import MismatchError
from adapterhub.files.native import Saved, write_adapter
from tests.kit import tiny_models
from tests.kit.selection import long_table

Attack = Callable[[Path], object]
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
    "labels: a million": put("labels", [""] * 10**6),
    "labels: fewer than the head has": put("labels", ["a", "b"]),
    "tensor name: surprise": tensor("__class__.__init__.__globals__"),
    "file name: pickle": put("files/adapter.bin", "0" * 64),
    "digest of a file: short": put("files/adapter.safetensors", "0"),
    "fingerprint: another": put("backbone/fingerprint", "bf16-" + "0" * 64),
    # shapes
    "shape: float": shape([2.0, 32]),
    "shape: product overflows to the right size": shape([2**32 + 2, 2**32]),
    "shape: many dimensions": shape([1] * 9),
    "shape: other": shape([32, 2]),
    "dtype: other": lambda tree: [t.update(dtype="F16") for t in tree["tensors"].values()],
    "tensors: one missing": lambda tree: tree["tensors"].popitem(),
    "tensors: one more": tensor("encoder.0.attn.k.lora.A"),
    "tensors: 19,000": lambda tree: [tensor(f"t{i}", size=[1])(tree) for i in range(19_000)],
    # methods
    "method: unknown": method("evil"),
    "methods: none": put("methods", []),
    "methods: one 64 times": lambda tree: tree.update(methods=tree["methods"] * 64),
    "methods: two in one": put("methods", [{"lora": {}, "head": {}}]),
    "option: code": lora(**CODE),
    "option: too many": lora(ranks={f"encoder.{i}.attn.q": 1 for i in range(10_000)}),
    "rank: huge": lora(rank=10**12),
    "rank: float": lora(rank=2.0),
    "ranks: idle pattern": lora(ranks={ESC: 3}),
    "dropout: more than all": lora(dropout=1e300),
    "sites: none such": lora(sites=[ESC]),
    "sites: thousands of wildcards": lora(sites=["*a" * 20_000]),
    "sites: thousands of patterns": lora(sites=[f"*{i}*" for i in range(4000)]),
    "sites: nested wildcards": lora(sites=["*" * 100 + "[!" + "a" * 100 + "]" * 100 + "x"]),
    "layers: huge range": lora(layers="0..999999999"),
    "layers: top of many digits": lora(layers="top " + "9" * 5000),
    "layers: negative": lora(layers=[-1]),
    "prompt: huge": method("prompt", length=10**12),
    "prefix: huge network": method("prefix", length=1, reparametrize=True, middle=10**12),
    "compacter: huge products": method("compacter", n=10**6, size=10**6),
    "compacter: activation": method("compacter", activation="__import__"),
    "pissa: for ever": method("pissa", rank=2, iterations=10**12),
    "full: decay": method("full", decay=1e-300),
    "staged: many groups": method("staged", groups=["+".join("abcdefgh" * 3000)]),
    # the rest of the schema
    "head: denied": put("head", False),
    "task: a path": put("task", "../../x"),
    "unknown field in the backbone: arguments": put("backbone/kwargs", {"local": "x"}),
    "training: deep": put("training", json.loads("{" + '"a":{' * 24 + "}" * 25)),
    "metrics: beyond 64 bits": put("metrics", {"accuracy": 2**63}),
}

TEXTS = ["__class__", ESC + OVERRIDE, "../../x"]
HARMLESS: dict[str, Callable[[Tree], None]] = {
    "training": put(
        "training",
        {
            "recipe": CODE | {"task": "classification", "backbone": "evil/model", "text": TEXTS},
            "__class__": {"__proto__": {"a": 1}},
        },
    ),
    "labels": put("labels", TEXTS),
}


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def torch_file(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2), "y": Bomb(canary)}, buffer)
    return buffer.getvalue()


DISGUISED: dict[str, Callable[[Path], bytes]] = {
    "pickle": bomb,
    "torch file": torch_file,
    "zip": lambda canary: zipped({"../../escape": b"x", "/etc/x": b"x", "data.pkl": bomb(canary)}),
    "pickle behind a header": lambda canary: join_header(b"{}", bomb(canary)),
}


LINKED = {
    "symbolic link": lambda path, real: path.symlink_to(real),
    "dangling link": lambda path, real: path.symlink_to(real.with_name("nothing")),
    "link to itself": lambda path, real: path.symlink_to(path),
    "link to a device": lambda path, real: path.symlink_to("/dev/zero"),
    "pipe": lambda path, real: os.mkfifo(path),
    "folder": lambda path, real: path.mkdir(),
}
if hasattr(os, "geteuid") and os.geteuid() == 0:
    LINKED["device"] = lambda path, real: os.mknod(path, 0o020666, os.makedev(1, 5))


def overlap(header: Tree) -> None:
    one, two = sorted(header)[:2]
    header[two]["data_offsets"] = header[one]["data_offsets"]


# tests/files/test_native.py has more of what a header may contain.
HEADERS: dict[str, Callable[[Tree], None]] = {
    "overlapping": overlap,
    "overflow to the right size": lambda header: header[min(header)].update(shape=[2**63 + 32, 2]),
    "many tensors": lambda header: header.update(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    ),
}
READ = (TENSORS, MANIFEST)
RAW: dict[str, Callable[[bytes, bytes], bytes]] = {
    "100 MB claimed": lambda head, rest: join_header(head, rest, 100 << 20),
    "2^64 - 1 claimed": lambda head, rest: join_header(head, rest, 2**64 - 1),
    "one byte less claimed": lambda head, rest: join_header(head, rest, len(head) - 1),
    "only a length": lambda head, rest: b"\0" * 8,
    "shorter than a length": lambda head, rest: b"\0" * 7,
    "9 MB of header": lambda head, rest: join_header(head + b" " * (9 << 20), rest),
    "a name given twice": lambda head, rest: join_header(
        head.replace(b"{", b"{" + head[1 : head.index(b"}") + 1] + b",", 1), rest
    ),
    "a field given twice": lambda head, rest: join_header(
        head.replace(b'"dtype":', b'"dtype":"F32","dtype":', 1), rest
    ),
    "20,000 lists deep": lambda head, rest: join_header(b"[" * 20_000 + b"]" * 20_000, rest),
    "invalid UTF-8": lambda head, rest: join_header(head.replace(b"encoder", b"en\xffoder"), rest),
    "NaN": lambda head, rest: join_header(head, rest[:-4] + struct.pack("<f", float("nan"))),
    "infinity": lambda head, rest: join_header(head, rest[:-4] + struct.pack("<f", float("-inf"))),
    "one byte more": lambda head, rest: join_header(head, rest + b"\0"),
    "one byte less": lambda head, rest: join_header(head, rest[:-1]),
    "an archive behind": lambda head, rest: join_header(head, rest + zipped({"../x": b""})),
}


def in_bytes(name: str, change: Callable[[bytes], bytes]) -> Attack:
    """Return an attack on the bytes of a file, which then agree with the manifest."""

    def attack(folder: Path) -> None:
        before = (folder / name).read_bytes()
        changed = change(before)
        assert changed != before
        forge_file(folder, name, changed) if name == TENSORS else (folder / name).write_bytes(
            changed
        )

    return attack


def in_header(change: Callable[[Tree], None]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, numbers = split_header(data)
        change(header)
        return join_header(header, numbers)

    return changed


def in_parts(change: Callable[[bytes, bytes], bytes]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        return change(data[8 : 8 + length], data[8 + length :])

    return changed


def in_place_of(name: str, kind: str) -> Attack:
    """Return an attack that puts something else where a file was."""

    def attack(folder: Path) -> None:
        real = folder.parent / "real"
        (folder / name).rename(real)
        try:
            LINKED[kind](folder / name, real)
        except PermissionError:
            pytest.skip("creating one needs more permissions")

    return attack


def disguised(name: str, kind: str) -> Attack:
    return lambda folder: in_bytes(name, lambda _: DISGUISED[kind](folder.parent / "canary"))(
        folder
    )


def sparse(folder: Path) -> None:
    """Make a sparse file of 60 GB that agrees with its manifest."""
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[15 * 10**9]))
    with open(folder / TENSORS, "ab") as file:
        file.truncate(60 * 10**9 + 4000)


# By name: the attack on a sound folder, and what the refusal names.
CASES: dict[str, tuple[Attack, str]] = {
    "a sparse file": (sparse, ""),
    **{n: (lambda f, c=change: forge(f, c), "") for n, change in REFUSED.items()},
    **{f"header: {n}": (in_bytes(TENSORS, in_header(c)), TENSORS) for n, c in HEADERS.items()},
    **{f"file: {n}": (in_bytes(TENSORS, in_parts(c)), TENSORS) for n, c in RAW.items()},
    **{f"{n} as {kind}": (disguised(n, kind), n) for n in READ for kind in DISGUISED},
    **{f"{n} is a {k}": (in_place_of(n, k), n) for n in READ for k in LINKED},
}
LINKS = [kind for kind in LINKED if "link" in kind]
CASES |= {f"{CARD} is a {kind}": (in_place_of(CARD, kind), CARD) for kind in LINKS}
CASES[f"{MANIFEST} is a link to itself"] = (
    in_place_of(MANIFEST, "link to itself"),
    "has no adapter",
)


@long_table("name", CASES, parts=6)
def test_a_hostile_adapter_is_refused(saved: Path, model, canary: Path, name: str) -> None:
    attack, named = CASES[name]
    attack(saved)
    with refused(model, named):
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


def test_a_forged_manifest_equals_a_written_one(saved: Path, model) -> None:
    """Otherwise attacks would be refused for a wrong digest alone."""
    assert sealed(read_tree(saved)) == (saved / MANIFEST).read_bytes()
    ah.load(model, saved).detach()


OTHERS = ("adapter.bin", "adapter.pt", "pytorch_model.bin", "adapter_model.bin", "model.pkl",
          "training.pt", "__init__.py", "adapter.py", "conftest.py", "sitecustomize.py", "x.pth",
          "adapter.safetensors.index.json", "config.json", "adapter_config.json", "tokenizer.json",
          "torch.py", "safetensors.py", "recipe.yaml", ".adapterhub")  # fmt: skip


def test_other_files_are_never_opened(saved, model, canary, monkeypatch) -> None:
    for name in OTHERS:
        (saved / name).write_bytes(bomb(canary))
    opened: list[str] = []
    real = os.open

    def watched(path, *arguments, **options):
        opened.append(Path(os.fsdecode(path)).name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.chdir(saved)  # a module there must not shadow a real one
    assert ah.load(model, saved).active
    assert {TENSORS, MANIFEST} <= set(opened) <= {TENSORS, MANIFEST, CARD}


def test_a_hard_link_is_accepted_and_the_folder_may_be_a_symbolic_link(saved, tmp_path, model):
    """Caches share files by hard links, which give no access beyond that of a copy."""
    (saved / TENSORS).rename(tmp_path / "real")
    os.link(tmp_path / "real", saved / TENSORS)
    (tmp_path / "latest").symlink_to(saved)
    assert ah.load(model, tmp_path / "latest").active


# Finite numbers that would be infinite on the model: refused before the model is touched

METHODS = ("lora", "full", "prefix", "bitfit", "prompt", "ia3", "pfeiffer", "compacter", "head")
# (dtype of the file, number, dtype of the backbone) and whether it is refused.
NUMBERS = {
    ("F64", 1e300, "fp32"): True, ("F64", 3.5e38, "fp32"): True, ("F64", 1e300, "bf16"): True,
    ("F64", 1e5, "fp16"): True, ("F32", 1e5, "fp16"): True, ("F32", 3.4e38, "bf16"): True,
    ("BF16", 1e5, "fp16"): True, ("I64", 10**9, "fp16"): True,
    ("F64", 3e38, "fp32"): False, ("F64", 65000.0, "fp16"): False, ("F32", 3e38, "bf16"): False,
    ("I64", 60000, "fp16"): False,
}  # fmt: skip
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64,
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter of each method."""
    folder = tmp_path_factory.mktemp("adapters")
    for method in METHODS:
        adapter = ah.attach(tiny_models.model("bert"), method, name="a")
        tiny_models.scramble(adapter)
        adapter.save(folder / method)
    return {method: folder / method for method in METHODS}


def with_number(source: Path, target: Path, dtype: str, number: float) -> str:
    """Save an adapter with one number changed; return the name of its tensor."""
    manifest, tensors = Saved.at(source).read()
    name = next((n for n in tensors if not n.startswith("head.")), next(iter(tensors)))
    changed = tensors[name].to(DTYPES[dtype])
    changed.view(-1)[-1] = number
    bare = replace(manifest, tensors={}, files={})
    write_adapter(target, bare, {**tensors, name: changed})
    return name


@long_table(
    ("file", "number", "backbone", "method"),
    [(*number, method) for number, method in itertools.product(NUMBERS, METHODS)],
)
def test_a_number_that_becomes_infinite_is_refused(
    adapters, tmp_path, method, file, number, backbone
):
    is_refused = NUMBERS[file, number, backbone]
    if method == "head":  # a head computes in fp32
        is_refused = is_refused and number > torch.finfo(torch.float32).max
    name = with_number(adapters[method], tmp_path / "a", file, number)
    model = tiny_models.model("bert").to(DTYPES[backbone])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    if is_refused:
        with pytest.raises(MismatchError, match="become infinite") as error:
            ah.load(model, tmp_path / "a", any_backbone=True)
        (offender,) = error.value.offenders
        assert offender.startswith(f"{name}: ")
        first = torch.float32 if number > 3.41e38 or method == "head" else DTYPES[backbone]
        assert offender.endswith(f" in {DTYPES[file]}, infinite in {first}")
        assert not find_state(model) or not find_state(model).adapters
    else:
        adapter = ah.load(model, tmp_path / "a", any_backbone=True)
        assert all(bool(tensor.isfinite().all()) for tensor in adapter.tensors().values())
        ah.detach(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_sources_of_a_fusion_too(adapters: dict[str, Path], tmp_path: Path) -> None:
    with_number(adapters["pfeiffer"], tmp_path / "b", "F64", 1e300)
    sources = [str(adapters["pfeiffer"]), str(tmp_path / "b")]
    with pytest.raises(MismatchError, match="become infinite"):
        ah.attach(tiny_models.model("bert"), {"adapterfusion": {"adapters": sources}})
