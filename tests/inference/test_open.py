"""Opening a trained adapter: its folder, with the record of its training, is enough to predict."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import adapterhub as ah
from adapterhub.config.user_folders import state_folder
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError, FileError, MismatchError
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter, open_backbone, open_several
from adapterhub.inference.record import training_record
from adapterhub.tasks import parse_task
from tests.kit.data import sentences
from tests.kit.registries import IDENTITY


def test_a_backbone_alone_serves_only_tasks_without_a_trained_head(backbones):
    with pytest.raises(ConfigError, match="classification needs a trained head") as error:
        open_backbone(str(backbones("llama")), parse_task("classification"))
    assert "causal-lm" in error.value.expected
    predictor = open_backbone(str(backbones("llama")), parse_task("causal-lm"), max_length=9)
    assert predictor.setting.labels == ()


def test_a_long_input_is_read_whole_where_no_run_says_otherwise(backbones, tmp_path):
    """Of a bare backbone, as of an adapter of another library, prompts were cut at 128 tokens."""
    folder = shutil.copytree(backbones("llama"), tmp_path / "llama")
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        lengths = {"max_position_embeddings": 4_096, "model_max_length": 4_096}
        file.write_text(json.dumps(json.loads(file.read_text()) | lengths))
    predictor = open_backbone(str(folder), parse_task("causal-lm"))
    assert predictor.max_length == 2_048
    text = " ".join(["the movie was good"] * 60)
    encoded = predictor.task.encode([Example(text)], predictor.setting, labelled=False)
    whole = len(predictor.tokenizer(text)["input_ids"])
    assert len(encoded.rows[0]["input_ids"]) >= whole > 200


def test_several_share_a_model_and_predict_as_alone(two_adapters):
    opened, examples = open_several(two_adapters), [Example(text) for text, _ in sentences(20)]
    first, second = (opened.predictors[name] for name in two_adapters)
    assert first.model is second.model
    assert (len(first.setting.labels), len(second.setting.labels)) == (2, 6)
    for name in (*two_adapters, *two_adapters):  # and again, after the other one
        alone = open_adapter(two_adapters[name].reference).predict(examples)
        together = opened.predict(name, examples)
        for one, other in zip(alone, together, strict=True):
            assert one.as_dict()["label"] == other.as_dict()["label"]
            assert one.as_dict()["scores"] == pytest.approx(other.as_dict()["scores"], abs=1e-6)
    source = two_adapters["mood"]
    with pytest.raises(DataError, match="labels"):
        open_adapter(source.reference).evaluate([Example("fine", label="neutral")])
    digest = Saved.at(Path(source.reference) / "adapter").digest
    open_several({"mood": replace(source, digest=digest)})
    with pytest.raises(MismatchError, match="another adapter here"):
        open_several({"mood": replace(source, digest="0" * 64)})


@pytest.fixture
def trained_here(backbone, data, adapterhub, tmp_path, monkeypatch):
    """A run that was typed with a relative path to a local backbone."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    home = tmp_path / "home"
    shutil.copytree(backbone, home / "my-bert")
    monkeypatch.chdir(home)
    files = ("--train", data[0], "--eval", data[1], "--output", "run")
    options = ("train.epochs=1", "train.tensorboard=false")
    assert adapterhub("train", "--backbone", "./my-bert", *files, *options)[0] == 0
    return home


def predicted(adapterhub, reference, *options):
    code, out, err = adapterhub("predict", reference, "a good movie", "--json", *options)
    return json.loads(out) if code == 0 else err


def placed(way: str, home: Path) -> str:
    """Bring the adapter to its place, and return the reference."""
    if way == "run":
        return "run"
    if way == "moved run":
        return str(shutil.move("run", home.parent / "elsewhere"))
    if way == "copy":
        return str(shutil.copytree("run/adapter", home.parent / "copy"))
    if way.startswith("./run"):
        return str(home / "run")
    ah.publish("run", "polite")
    return "polite" if way == "published" else str(ah.pull("polite", home.parent / "pulled"))


def test_the_backbone_is_found_again(trained_here, adapterhub, monkeypatch, tmp_path):
    expected = predicted(adapterhub, "run")
    assert isinstance(expected, dict), expected
    ways = ("run", "moved run", "copy", "published", "pulled", "./run from elsewhere")
    for number, way in enumerate(ways):
        home = Path(shutil.copytree(trained_here, tmp_path / f"{number}" / "home"))
        shutil.rmtree(home / "my-bert")
        monkeypatch.chdir(home)
        reference = placed(way, home)
        if way != "run":
            (tmp_path / "there").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "there")
        assert predicted(adapterhub, reference) == expected, way


def test_it_is_asked_for_once_where_it_is_not_known(
    trained_here, backbone, adapterhub, monkeypatch, tmp_path
):
    expected = predicted(adapterhub, "run")
    pulled = shutil.copytree("run/adapter", tmp_path / "pulled")
    model, tokenizer = ah.load_backbone(str(backbone))
    next(model.parameters()).data.add_(1.0)
    shutil.rmtree("my-bert")
    for part in (model, tokenizer):  # other weights in the folder that is remembered
        part.save_pretrained("my-bert")
    assert "was trained on a different backbone" in predicted(adapterhub, pulled)
    shutil.rmtree(state_folder())  # another machine
    name = json.loads((pulled / "adapter.json").read_bytes())["backbone"]["id"]
    error = predicted(adapterhub, pulled)
    assert "the backbone 'my-bert' was not found: it is not on the Hub" in error
    assert f"whose fingerprint starts with {name.rpartition('--')[2]}" in error
    assert "try: --backbone FOLDER" in error
    there = shutil.copytree(backbone, tmp_path / "there")
    model, _ = ah.load_backbone(str(there), task="classification", labels=["0", "1"])
    ah.load(model, "./run", any_backbone=True)
    assert not (state_folder() / "backbones").exists(), "this one may be another"
    assert predicted(adapterhub, pulled, "--backbone", there) == expected
    assert predicted(adapterhub, pulled) == expected, "it is remembered"
    shutil.rmtree(there)
    assert f"was in {there}, which does not exist any more" in predicted(adapterhub, pulled)


# The training record in a manifest: settings for new data, and nothing of another machine


def manifest(kind: str | None = "classification", task: str | None = None, **training: Any) -> Any:
    backbone = BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY)
    own = {"name": "polite", "methods": ({"lora": {}},), "head": kind and TaskHead(kind)}
    return Manifest(**own, backbone=backbone, task=task, training=training)


def test_settings_of_the_run_are_defaults_for_new_data():
    recipe = {
        "task": "seq2seq(metric=rouge)",
        "data": {"text": "question", "label": "answer"},
        "train": {"max_length": 64, "epochs": 9},
    }
    record = training_record(manifest(recipe=recipe, seed=7))
    assert record.task.name == "seq2seq"
    assert (record.data.text, record.data.label) == ("question", "answer")
    assert (record.max_length, record.seed) == (64, 7)
    # Where the data was and how many rows are dropped; without a length it is that of then.
    data = {"train": "/home/x/train.tsv", "eval": "hf:x/y", "rows": 100, "text": "t"}
    record = training_record(manifest(recipe={"data": data, "train": {"max_length": None}}))
    assert (record.data, record.max_length) == (DataOptions(text="t"), 128)
    # Without a recipe, the task is that of the manifest.
    record = training_record(manifest(task="tagging"))
    assert record.task.name == "tagging"
    assert (record.data, record.max_length, record.seed) == (DataOptions(), 2_048, 0)
    assert training_record(manifest()).task.name == "classification"
    with pytest.raises(ConfigError, match="does not record what kind of model"):
        training_record(manifest(None))
    assert training_record(manifest(None), "reranking").kind == "regression"


@pytest.mark.parametrize(
    ("training", "offender"),
    [
        ({"recipe": [1]}, "recipe is not a mapping"),
        ({"recipe": {"data": {"text": ["a"]}}}, "text"),
        ({"recipe": {"train": {"max_length": 0}}}, "max_length is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"recipe": {"task": "classify"}}, "unknown task"),
        ({"recipe": {"data": {"later": "x"}}}, "later is not an option"),
    ],
)
def test_a_broken_record_is_an_error_of_the_file(training, offender):
    """Options of a later version that change nothing are ignored."""
    with pytest.raises(FileError, match="training record of 'polite'") as error:
        training_record(manifest(**training))
    assert offender in "\n".join(error.value.offenders)
    data = {"text": "t", "later": None, "other": False}
    assert training_record(manifest(recipe={"data": data})).data == DataOptions(text="t")
