"""Runs that start from a trained adapter, with `from`, or train on top of several, with `on`."""

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
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.run import prepare, run
from tests.kit.data import sentences, write_tsv
from tests.kit.runs import Notes, adapter_bytes
from tests.kit.selection import ALL

WORDS = (
    "train.max_steps=4", "dtype=fp32", "attention=eager", "train.log_every=1",
    "train.learning_rate=0.01", "train.tensorboard=false", "train.report=false",
)  # fmt: skip
METHODS = {"lang": "pfeiffer(size=4)", "first": "lora(rank=2)"}


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    return recipe_with(*WORDS, "method=pfeiffer(size=4)", "name=lang", output="lang")


@pytest.fixture(scope="module")
def trained(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two adapters once; return the folder of their runs."""
    folder, rows = tmp_path_factory.mktemp("once"), sentences(64)
    files = {
        "train": str(write_tsv(folder / "train.tsv", rows)),
        "eval": str(write_tsv(folder / "dev.tsv", rows[::3])),
    }
    for name, method in METHODS.items():
        flags = {"backbone": str(backbone), "output": str(folder / name), "data": files}
        run(read(None, [*WORDS, f"method={method}", f"name={name}"], flags), Reporter())
    return folder


@pytest.fixture
def lang(recipe: Recipe, trained: Path) -> Path:
    """A copy of the adapter of the recipe's run."""
    return Path(shutil.copytree(trained / "lang", recipe.output)) / "adapter"


@pytest.fixture
def first(trained: Path) -> Path:
    return trained / "first" / "adapter"


def derived(recipe: Recipe, output: str, **changes: Any) -> Recipe:
    folder = str(Path(recipe.output).with_name(output))
    train = replace(recipe.train, **changes.pop("train", {}))
    return replace(
        recipe, **{"name": output, "seed": 5, "output": folder, "train": train}, **changes
    )


def second(recipe: Recipe, start: str | Path, output: str = "second", **changes: Any) -> Recipe:
    return derived(recipe, output, **{"method": None, "from_": str(start), **changes})


def on(recipe: Recipe, *names: str | Path, output: str = "task", **changes: Any) -> Recipe:
    below = tuple(map(str, names))
    return derived(recipe, output, **{"on": below, "method": "lora(rank=2)", **changes})


def predictions(folder: Path | str) -> list[Any]:
    """Open an adapter by its folder or its name alone, and predict."""
    opened, texts = open_adapter(folder), ("the movie was good", "a very awful end")
    examples = [opened.task.example([text], read_training_record(folder).data) for text in texts]
    return opened.predict(examples)


def assert_starts(prepared: Any, start: Path) -> None:
    """A run begins with the tensors of an adapter."""
    saved = Saved.at(start).tensors()
    assert all(torch.equal(t, saved[n]) for n, t in prepared.adapter.tensors().items())


def test_it_begins_with_the_tensors_of_the_other_and_records_it(recipe, first):
    assert_starts(prepare(second(recipe, first)), first)
    reporter = Notes()
    outcome = run(second(recipe, first), reporter)
    assert f"starts from {first}, with its head, since the labels are the same" in reporter.notes
    manifest = Saved.at(outcome.folder).manifest
    origin = manifest.training["from"]
    assert (origin["name"], origin["version"]) == ("first", None)
    assert len(origin["digest"]) == 64
    before = Saved.at(first).manifest
    assert manifest.methods == before.methods
    assert not {"on", "from"} & before.training.keys()
    assert str(first) not in (outcome.folder / "adapter.json").read_text()
    assert "| starts from | first, sha256 " in (outcome.folder / "README.md").read_text()
    assert read(Path(recipe.output).with_name("second") / "recipe.yaml").from_ == str(first)


def test_a_published_one_is_found_by_its_name_and_with_other_labels_the_head_is_new(
    recipe, first, tmp_path
):
    ah.publish(first, "helper")
    rows = [(f"text {n}", f"class{n % 3}") for n in range(60)]
    source = str(write_tsv(tmp_path / "other.tsv", rows))
    other = second(recipe, "helper", data=replace(recipe.data, train=source, eval=None))
    origin = Saved.at(run(other, notes := Notes()).folder).manifest.training["from"]
    assert (origin["name"], origin["version"]) == ("helper", "v1")
    assert notes.about("a newly initialized head: the labels are others")
    with pytest.raises(MismatchError, match="cannot start from") as error:
        prepare(second(recipe, first, method="lora(rank=4)"))
    assert "adapterhub combine ADAPTER --rank" in str(error.value)


@pytest.mark.parametrize("derive", [second, on])
def test_a_stopped_run_goes_on_and_one_on_another_adapter_is_another_run(recipe, lang, derive):
    train = {"max_steps": 8, "save_every": 2, "eval_every": 4}
    whole, stopped = (derive(recipe, lang, output=n, train=train) for n in ("whole", "stopped"))
    run(whole, Reporter())
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Notes(stop_after=5))
    run(stopped, Reporter(), resume=True)
    assert adapter_bytes(stopped.output) == adapter_bytes(whole.output)
    other = run(replace(recipe, output=f"{recipe.output}-2", seed=3), Reporter()).folder
    with pytest.raises((TrainingError, ConfigError)):
        run(derive(recipe, other, output="stopped", train=train), Reporter(), resume=True)


def test_it_trains_on_a_frozen_adapter_and_records_it(recipe, lang):
    """A run folder is enough to predict."""
    notes = Notes()
    below = prepare(on(recipe, lang)).adapter.on[0]
    saved = Saved.at(lang).tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in below.tensors().items())
    assert below.active
    assert not any(p.requires_grad for p in below.parameters())
    outcome = run(on(recipe, lang), notes)
    manifest = Saved.at(outcome.folder).manifest
    assert f"trains on top of lang (sha256 {manifest.on[0].digest[:12]}), frozen" in notes.notes
    assert (manifest.on[0].name, manifest.on[0].reference) == ("lang", None)
    assert str(lang.parent) not in (outcome.folder / "adapter.json").read_text()
    assert "on top of" in (outcome.folder / "README.md").read_text()
    written = read(Path(recipe.output).with_name("task") / "recipe.yaml")
    assert written.on == (str(lang),)
    alone = run(on(recipe, output="alone"), Reporter())
    assert alone.metrics != outcome.metrics or alone.result.history != outcome.result.history
    expected = predictions(outcome.folder)
    lang.parent.rename(lang.parent.with_name("elsewhere"))
    assert predictions(outcome.folder.parent) == expected


BELOW = ("prompt", "pfeiffer(size=4)", "prefix", "lora", "bitfit")
ON_TOP = ("head", "lora(layers=top 1)")
PAIRS = [(below, method) for below in BELOW for method in ON_TOP]


@pytest.mark.parametrize(("below", "method"), PAIRS if ALL else [PAIRS[0], PAIRS[3]])
def test_frozen_layers_are_kept_with_what_is_below(recipe, below, method):
    """Layers are recorded and replayed with the adapter below; a prompt's tokens are not rows."""
    lang = run(replace(recipe, method=below), Reporter()).folder
    losses = {}
    for where in ("off", "memory"):
        notes = Notes()
        train = {"frozen_cache": where, "max_steps": None, "epochs": 2, "batch_size": 16}
        run(on(recipe, lang, output=where, method=method, train=train), notes)
        losses[where] = torch.tensor(notes.losses)
        about = [line for line in notes.notes if "frozen layer" in line]
        assert len(about) == (where != "off" and below != "prompt"), notes.notes
    assert len(losses["off"]) == 8
    assert torch.allclose(losses["memory"], losses["off"], atol=0.02)


def test_a_published_chain_is_found_by_name(recipe, lang):
    ah.publish(lang)
    domain = run(on(recipe, "lang", output="domain", method="houlsby(size=4)"), Reporter()).folder
    assert str(Saved.at(domain).manifest.on[0]) == "lang@v1"
    ah.publish(domain)
    task = run(on(recipe, "domain@v1"), Reporter()).folder
    expected = predictions(task)
    ah.publish(task)
    assert predictions("task") == expected


def test_a_fusion_has_them_as_its_sources(recipe, lang):
    """One with sources of its own is on top: MAD-X with task adapters that are mixed."""
    other = run(replace(recipe, output=f"{recipe.output}-2", seed=3), Reporter()).folder
    spec = {"adapterfusion": {"adapters": [str(lang), str(other)]}}
    prepared = prepare(on(recipe, lang, output="mixed", method=spec))
    assert [below.name[:4] for below in prepared.adapter.on] == ["lang"]
    notes = Notes()
    folder = run(on(recipe, lang, other, output="fused", method="adapterfusion"), notes).folder
    manifest = Saved.at(folder).manifest
    assert manifest.on == ()
    recorded = manifest.training["on"]
    assert [each["name"] for each in recorded] == ["lang", "lang"]
    assert len({each["digest"] for each in recorded}) == 2
    assert any(line.startswith("built from copies of lang") for line in notes.notes)
    assert "built from" in (folder / "README.md").read_text()
    expected = predictions(folder)
    ah.publish(folder)
    lang.parent.rename(lang.parent.with_name("elsewhere"))
    assert predictions("fused") == expected


def test_starting_from_a_stacked_one_needs_the_same_foundation(recipe, lang):
    task = run(on(recipe, lang), Reporter()).folder
    again = second(recipe, task)
    with pytest.raises(MismatchError, match="other adapters are below it") as error:
        prepare(again)
    assert error.value.hint == "--on lang"
    assert_starts(prepare(replace(again, on=(str(lang),))), task)
