"""Runs on top of trained adapters: `on`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError, MismatchError, TrainingError
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter
from adapterhub.inference.record import read_training_record
from adapterhub.loop.report import Reporter, TrainingLine
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.loading import run_origins
from adapterhub.training.run import prepare, run
from tests.kit.data import sentences, write_tsv
from tests.kit.selection import ALL


class Notes(Reporter):
    """Keeps the notes and losses of a run, and may stop it after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.said: list[str] = []
        self.losses: list[float] = []
        self.stop_after = stop_after

    def note(self, text: str) -> None:
        self.said.append(text)

    def trained(self, line: TrainingLine, timing: Any) -> None:
        self.losses.append(line.loss)

    def advance(self, step: int) -> None:
        if step - 1 == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))


WORDS = (
    "method=pfeiffer(size=4)", "train.max_steps=4", "name=lang", "dtype=fp32", "attention=eager",
    "train.log_every=1", "train.learning_rate=0.01", "train.tensorboard=false",
    "train.report=false",
)  # fmt: skip


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    return recipe_with(*WORDS, output="lang")


@pytest.fixture(scope="module")
def lang_once(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rows = tmp_path_factory.mktemp("once"), sentences(64)
    files = {
        "train": str(write_tsv(folder / "train.tsv", rows)),
        "eval": str(write_tsv(folder / "dev.tsv", rows[::3])),
    }
    flags = {"backbone": str(backbone), "output": str(folder / "lang"), "data": files}
    return run(read(None, WORDS, flags), Reporter()).folder


@pytest.fixture
def lang(recipe: Recipe, lang_once: Path) -> Path:
    """A copy of the folder of the recipe's run."""
    return Path(shutil.copytree(lang_once.parent, recipe.output)) / lang_once.name


def on(recipe: Recipe, *names: str | Path, output: str = "task", **changes: Any) -> Recipe:
    folder = str(Path(recipe.output).with_name(output))
    train = replace(recipe.train, **changes.pop("train", {}))
    fields = {"on": tuple(map(str, names)), "method": "lora(rank=2)", "name": output, "seed": 5}
    return replace(recipe, **{**fields, "output": folder, "train": train, **changes})


def predictions(folder: Path | str) -> list[Any]:
    """Open an adapter by its folder or its name alone, and predict."""
    opened, texts = open_adapter(folder), ("the movie was good", "a very awful end")
    examples = [opened.task.example([text], read_training_record(folder).data) for text in texts]
    return opened.predict(examples)


def test_it_trains_on_a_frozen_adapter_and_records_it(recipe: Recipe, lang: Path) -> None:
    notes = Notes()
    prepared = prepare(on(recipe, lang))
    below = prepared.adapter.on[0]
    saved = Saved.at(lang).tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in below.tensors().items())
    assert below.active
    assert not any(p.requires_grad for p in below.parameters())
    outcome = run(on(recipe, lang), notes)
    digest = Saved.at(outcome.folder).manifest.on[0].digest
    assert f"trains on top of lang (sha256 {digest[:12]}), frozen" in notes.said
    manifest = Saved.at(outcome.folder).manifest
    assert (manifest.on[0].name, manifest.on[0].reference) == ("lang", None)
    assert str(lang.parent) not in (outcome.folder / "adapter.json").read_text()
    assert "on top of" in (outcome.folder / "README.md").read_text()
    written = read(Path(recipe.output).with_name("task") / "recipe.yaml")
    assert written.on == (str(lang),)
    alone = run(on(recipe, output="alone"), Reporter())
    assert alone.metrics != outcome.metrics or alone.result.history != outcome.result.history


def test_a_run_folder_is_enough_to_predict(recipe: Recipe, lang: Path) -> None:
    folder = run(on(recipe, lang), Reporter()).folder
    expected = predictions(folder)
    lang.parent.rename(lang.parent.with_name("elsewhere"))
    assert predictions(folder.parent) == expected


BELOW = ("pfeiffer(size=4)", "prefix", "lora", "bitfit", "prompt")
ON_TOP = ("head", "lora(layers=top 1)")
PAIRS = [(below, method) for below in BELOW for method in ON_TOP]


@pytest.mark.parametrize(("below", "method"), PAIRS if ALL else [*PAIRS[::2], PAIRS[1]])
def test_frozen_layers_are_kept_with_what_is_below(recipe: Recipe, below: str, method: str) -> None:
    """Layers are recorded and replayed with the adapter below; a prompt's tokens are not rows."""
    lang = run(replace(recipe, method=below), Reporter()).folder
    losses = {}
    for where in ("off", "memory"):
        notes = Notes()
        train = {"frozen_cache": where, "max_steps": None, "epochs": 3, "batch_size": 16}
        run(on(recipe, lang, output=where, method=method, train=train), notes)
        losses[where] = torch.tensor(notes.losses)
        about = [line for line in notes.said if "frozen layer" in line]
        assert len(about) == (where != "off" and below != "prompt"), notes.said
    assert len(losses["off"]) == 12
    assert torch.allclose(losses["memory"], losses["off"], atol=0.02)


def test_a_stopped_run_goes_on_and_another_foundation_is_another_run(
    recipe: Recipe, lang: Path
) -> None:
    train = {"max_steps": 8, "save_every": 2, "eval_every": 4}
    whole = run(on(recipe, lang, output="whole", train=train), Reporter())
    stopped = on(recipe, lang, train=train)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Notes(stop_after=5))
    resumed = run(stopped, Reporter(), resume=True)
    name = "adapter.safetensors"
    assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    other = run(replace(recipe, output=f"{recipe.output}-2", seed=3), Reporter()).folder
    with pytest.raises((TrainingError, ConfigError)):
        run(on(recipe, other, train=train), Reporter(), resume=True)


def test_a_published_chain_is_found_by_name(recipe: Recipe, lang: Path) -> None:
    ah.publish(lang)
    domain = run(on(recipe, "lang", output="domain", method="houlsby(size=4)"), Reporter()).folder
    assert str(Saved.at(domain).manifest.on[0]) == "lang@v1"
    ah.publish(domain)
    task = run(on(recipe, "domain@v1"), Reporter()).folder
    expected = predictions(task)
    ah.publish(task)
    assert predictions("task") == expected


def test_a_fusion_has_them_as_its_sources(recipe: Recipe, lang: Path) -> None:
    other = run(replace(recipe, output=f"{recipe.output}-2", seed=3), Reporter()).folder
    notes = Notes()
    fused = on(recipe, lang, other, output="fused", method="adapterfusion")
    folder = run(fused, notes).folder
    manifest = Saved.at(folder).manifest
    assert manifest.on == ()
    recorded = manifest.training["on"]
    assert [each["name"] for each in recorded] == ["lang", "lang"]
    assert len({each["digest"] for each in recorded}) == 2
    assert any(line.startswith("built from copies of lang") for line in notes.said)
    assert "built from" in (folder / "README.md").read_text()
    expected = predictions(folder)
    ah.publish(folder)
    lang.parent.rename(lang.parent.with_name("elsewhere"))
    assert predictions("fused") == expected


def test_a_fusion_with_sources_of_its_own_is_on_top(recipe: Recipe, lang: Path) -> None:
    """MAD-X with AdapterFusion: task adapters that are mixed on top of a language adapter."""
    ones = [
        run(replace(recipe, output=f"{recipe.output}-{n}", seed=n), Reporter()).folder
        for n in (1, 2)
    ]
    spec = {"adapterfusion": {"adapters": [str(one) for one in ones]}}
    prepared = prepare(on(recipe, lang, method=spec))
    assert [below.name[:4] for below in prepared.adapter.on] == ["lang"]


def test_starting_from_a_stacked_one_needs_the_same_foundation(recipe: Recipe, lang: Path) -> None:
    task = run(on(recipe, lang), Reporter()).folder
    again = on(recipe, output="again", from_=str(task), method=None)
    with pytest.raises(MismatchError, match="other adapters are below it") as error:
        prepare(again)
    assert error.value.hint == "--on lang"
    prepared = prepare(replace(again, on=(str(lang),)))
    saved = Saved.at(task).tensors()
    assert all(torch.equal(t, saved[n]) for n, t in prepared.adapter.tensors().items())


def test_without_any_nothing_is_recorded(recipe: Recipe, lang: Path) -> None:
    origins, _ = run_origins(recipe)
    assert (origins.start, origins.below, origins.copied) == (None, (), ())
    assert (origins.record(), origins.identity(), list(origins.notes())) == ({}, {}, [])
    assert "on" not in Saved.at(lang).manifest.training
