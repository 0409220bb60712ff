"""Hostile checkpoints of other libraries: junk options, slow regular expressions, wrong files."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import Tree, bomb, join_header, refused
from fuzz import VALUES, mutate_bytes
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import AdapterhubError
from adapterhub.interchange.peft import targets
from tests.kit import tiny_models
from tests.kit.selection import long_table

# torch's loader warns about pickles with unusual content.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIG = "adapter_config.json"
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "bert"
PEFT = {"lora": "lora(rank=2)", "dora": "dora(rank=2)", "ia3": "ia3", "norms": "norms"}
ADAPTERS = ("pfeiffer", "lora", "ia3", "compacter", "prefix", "unipelt")
SOURCES = [f"peft-{name}" for name in PEFT] + [f"adapters-{name}" for name in ADAPTERS]


@pytest.fixture(scope="module")
def backbones() -> dict[str, PreTrainedModel]:
    return {
        "peft": tiny_models.model("bert"),
        "adapters": AutoModel.from_pretrained(GOLDEN / "backbone"),
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Export peft checkpoints."""
    folder: Path = tmp_path_factory.mktemp("exported")
    for name, method in PEFT.items():
        adapter = ah.attach(tiny_models.model("bert"), method)
        tiny_models.scramble(adapter)
        adapter.export(folder / name)
    return folder


@pytest.fixture
def checkpoint(exported: Path, backbones, tmp_path: Path):
    """Return a function that copies a checkpoint and returns it with its model."""

    def copy(source: str) -> tuple[Path, PreTrainedModel]:
        form, _, name = source.partition("-")
        folder = (exported if form == "peft" else GOLDEN) / name
        return Path(shutil.copytree(folder, tmp_path / "theirs")), backbones[form]

    yield copy
    for model in backbones.values():
        if find_state(model):
            ah.detach(model)


def load(model: PreTrainedModel, folder: Path) -> Any:
    return ah.load(model, folder, any_backbone=True, allow_pickle=True, head=False)


def edit(folder: Path, change: Callable[[Tree], Any]) -> None:
    tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    change(tree)
    (folder / CONFIG).write_text(json.dumps(tree), encoding="utf-8")


# Expressions like (a+)+ take 2^n steps on a path of n letters that does not match.
EVIL = r"(?:(?:[a-z0-9_.]|[a-z0-9_.]{2})+)+[!&]"
PLACES: dict[str, tuple[str, Tree]] = {
    "target_modules": ("peft-lora", {"target_modules": EVIL}),
    "exclude_modules": ("peft-lora", {"exclude_modules": EVIL}),
    "modules_to_save": ("peft-lora", {"modules_to_save": [EVIL]}),
    "layers_pattern": ("peft-lora", {"layers_pattern": EVIL, "layers_to_transform": [0]}),
    "rank_pattern": ("peft-lora", {"rank_pattern": {EVIL: 3}}),
    "alpha_pattern": ("peft-lora", {"alpha_pattern": {EVIL: 3}}),
    "many": ("peft-lora", {"rank_pattern": {f"{EVIL}{n}": 3 for n in range(1000)}}),
    "feedforward_modules": ("peft-ia3", {"feedforward_modules": EVIL}),
    "norms": ("peft-norms", {"target_modules": EVIL}),
}


@long_table("place", PLACES, 3)
def test_an_exponential_regular_expression_is_stopped(checkpoint, place, monkeypatch) -> None:
    source, change = PLACES[place]
    folder, model = checkpoint(source)
    monkeypatch.setattr(targets, "SECONDS", 0.1)
    edit(folder, lambda tree: tree.update(change))
    with refused(model, "takes too long"):
        load(model, folder)


@long_table(
    ("place", "text"),
    itertools.product(
        [place for place in PLACES if place != "many"],
        ["(", "(" * 5000, "a{9999999999999}", "[", "(?P<x"],
    ),
)
def test_an_invalid_regular_expression_is_refused(checkpoint, place, text) -> None:
    source, change = PLACES[place]
    folder, model = checkpoint(source)
    edit(
        folder,
        lambda tree: tree.update(
            json.loads(json.dumps(change).replace(json.dumps(EVIL), json.dumps(text)))
        ),
    )
    with refused(model, "is not a regular expression"):
        load(model, folder)


@long_table("source", SOURCES, parts=4)
def test_junk_in_any_option_is_valid_or_refused(checkpoint, source) -> None:
    folder, model = checkpoint(source)
    valid = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    rng, keys = random.Random(0), list(model.state_dict())
    places = [(valid, name) for name in valid]
    config = valid.get("config") or {}
    for options in [config, *(config.get("configs") or ())]:
        places += [(options, name) for name in options]
    tried = 0
    for holder, name in places:
        original = holder[name]
        for value in rng.sample(VALUES, 2):
            holder[name] = value
            (folder / CONFIG).write_text(json.dumps(valid), encoding="utf-8")
            try:
                load(model, folder).detach()
            except AdapterhubError as error:
                str(error).encode()
            assert list(model.state_dict()) == keys
            tried += 1
        holder[name] = original
    assert tried >= 10
    (folder / CONFIG).write_text(json.dumps(valid), encoding="utf-8")
    load(model, folder)


def weights_of(folder: Path) -> str:
    names = ("adapter_model.safetensors", "adapter.safetensors", "pytorch_adapter.bin")
    return next(name for name in names if (folder / name).exists())


@long_table("source", [s for s in SOURCES if s not in ("adapters-prefix", "adapters-unipelt")], 4)
def test_non_finite_missing_and_unknown_tensors_are_refused(checkpoint, source) -> None:
    folder, model = checkpoint(source)
    path = folder / weights_of(folder)
    tensors = load_file(path)
    name = min(tensors)
    wrong = {
        "NaN": {**tensors, name: torch.full_like(tensors[name], float("nan"))},
        name: {k: v for k, v in tensors.items() if k != name},
        "no.such": {**tensors, "base_model.model.no.such.lora_A.weight": torch.ones(2, 2)},
        "climbs": {**tensors, "../../climbs": torch.ones(2)},
        "empty": {**tensors, name: tensors[name][:0]},
        **{f"{n} {each}": {**tensors, each: torch.full_like(tensors[each].double(), n)}
           for n in (1e300, -1e300) for each in list(tensors)[:4]},
    }  # fmt: skip
    for number, case in wrong.items():
        save_file(case, path, {"format": "pt"})
        with refused(model, "infinite in fp32" if "e+300" in number else ""):
            load(model, folder)


def one_tensor(**fields: Any) -> Tree:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}


RAW: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x08\0\0",
    "no tensors": join_header({}, b""),
    "100 MB of header": join_header({}, b"", 100_000_000),
    "out of range": join_header(one_tensor(data_offsets=[0, 10**12]), bytes(8)),
    "overlapping": join_header({**one_tensor(), "b": one_tensor()["a"]}, bytes(8)),
    "a terabyte": join_header(one_tensor(shape=[2**38]), bytes(8)),
    "zero": join_header(one_tensor(shape=[0, 2**60], data_offsets=[0, 0]), b""),
    "a trailing program": join_header(one_tensor(), bytes(8) + b"\x80\x04cos\nsystem\n."),
    "deep": (20_000).to_bytes(8, "little") + b"[" * 20_000,
}
JSON = {
    "a key twice": b'{"peft_type": "LORA", "peft_type": "IA3"}',
    "20,000 deep": b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "two megabytes": b'{"a": "' + b"x" * (2 << 20) + b'"}',
    "NaN": b'{"peft_type": "LORA", "r": NaN}',
    "a number too large": b'{"peft_type": "LORA", "lora_alpha": 1e999}',
    "UTF-16": '{"peft_type": "LORA"}'.encode("utf-16"),
}
FILES: dict[str, Callable[[Path], object]] = {
    **{n: lambda path, data=data: path.write_bytes(data) for n, data in (RAW | JSON).items()},
    "a pickle": lambda path: path.write_bytes(bomb(path.parent.parent / "canary")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path),
    "nothing": lambda path: path.symlink_to(path.with_name("gone")),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@long_table(
    ("source", "kind"),
    [
        *itertools.product(["peft-lora", "adapters-lora"], FILES),
        *((s, "a pickle") for s in SOURCES),
    ],
    parts=4,
)
def test_another_file_in_place_of_theirs_is_refused(checkpoint, canary, source, kind) -> None:
    folder, model = checkpoint(source)
    for name in (weights_of(folder), CONFIG):
        original = (folder / name).read_bytes()
        (folder / name).unlink()
        FILES[kind](folder / name)
        with refused(model):
            load(model, folder)
        shutil.rmtree(folder / name) if kind == "a folder" else (folder / name).unlink()
        (folder / name).write_bytes(original)


@pytest.mark.parametrize("new", [True, False])
def test_a_broken_pickle_raises_one_error(checkpoint, new) -> None:
    """Torch raises many kinds of exceptions on changed bytes."""
    folder, model = checkpoint("adapters-pickle")
    path = folder / "pytorch_adapter.bin"
    tensors = torch.load(path, weights_only=True)
    torch.save(tensors, path, _use_new_zipfile_serialization=new)
    data, refusals = path.read_bytes(), set()
    for seed in range(30):
        path.write_bytes(mutate_bytes(random.Random(seed), data))
        try:
            load(model, folder).detach()
        except AdapterhubError as error:
            refusals.add(str(error).partition("cannot be read: ")[2].partition(":")[0])
    assert len(refusals) >= 3
