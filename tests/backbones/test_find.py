"""The files, the folder, the name and the origin of a backbone, without a network."""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

import adapterhub as ah
from adapterhub.anatomy.backbone import DTYPES, Backbone, local_name
from adapterhub.backbones import find
from adapterhub.backbones.quantized import QUANTIZATIONS
from adapterhub.backbones.torch_free_checks import (
    DTYPE_NAMES,
    QUANTIZATION_LIBRARIES,
    check_backbone_options,
)
from adapterhub.config.user_folders import state_folder
from adapterhub.errors import BackboneError, ConfigError, MismatchError
from adapterhub.files.native import Saved
from tests.kit import tiny_models

COMMIT = "0" * 40
FILES = ("model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json")


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*args, **options):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(find, "snapshot_download", unreachable)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package with a backbone, listed under the Hub id `acme/tiny`."""
    folder = tmp_path / "acme_tiny" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "acme_tiny" / "__init__.py").touch()
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in FILES}
    packaged = find.PackagedBackbone("acme_tiny", "model", digests, "tiny")
    monkeypatch.setitem(find.PACKAGED, "acme/tiny", packaged)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("acme_tiny", None)


def test_a_hub_id_is_downloaded_at_a_revision(monkeypatch, tmp_path):
    folder = tmp_path / COMMIT
    calls = []
    monkeypatch.setattr(
        find, "snapshot_download", lambda name, **options: calls.append((name, options)) or folder
    )
    assert find.find_backbone("acme/other", "v1") == (folder, COMMIT)
    ((name, options),) = calls
    assert (name, options["revision"]) == ("acme/other", "v1")
    assert "*.gguf" in options["ignore_patterns"]


def test_a_folder_and_a_packaged_backbone_are_found_offline(offline, package, tmp_path):
    assert find.find_backbone(str(tmp_path)) == (tmp_path, None)
    assert find.find_backbone("acme/tiny") == (package, None)
    with pytest.raises(BackboneError, match="Hub is unreachable"):
        find.find_backbone("acme/tiny", "v1")


@pytest.mark.parametrize(
    "name", [*FILES, "adapter_config.json", "pytorch_model.bin", "1_Pooling/x"]
)
@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: b"", None])
def test_a_package_with_other_files_is_refused(offline, package, name, change):
    """transformers would read some: adapter_config.json names an adapter to load."""
    if name in FILES:
        data = (package / name).read_bytes()
        (package / name).unlink()
        if change:
            (package / name).write_bytes(change(data))
        problem = "sha256" if change else "missing"
    else:
        (package / name).write_text("{}")
        problem = "unexpected"
    with pytest.raises(BackboneError, match="does not contain the files of acme/tiny") as error:
        find.find_backbone("acme/tiny")
    (offender,) = error.value.offenders
    assert offender.startswith(f"{name}: {problem}")
    assert "--force-reinstall acme-tiny" in error.value.hint


@pytest.mark.parametrize(
    ("backbone", "problem", "hint"),
    [
        ("acme/other", "no backbone 'acme/other'", "hf auth login"),
        ("acme/missing", "package is not installed", 'pip install "adapterhub[tiny]"'),
        *((folder, f"no backbone '{folder}': the folder does not exist", "")
          for folder in ("./bert", "no/such/folder", "/no/such")),
        (local_name("tiny-bert", lambda: f"bf16-{'0' * 64}"), "was in a folder",
         "load_backbone(FOLDER)"),
    ],
)  # fmt: skip
def test_a_backbone_that_does_not_exist_is_named(backbone, problem, hint, offline, monkeypatch):
    missing = find.PackagedBackbone("no_such_package", "model", {}, "tiny")
    monkeypatch.setitem(find.PACKAGED, "acme/missing", missing)
    with pytest.raises(BackboneError, match=re.escape(problem)) as error:
        find.find_backbone(backbone)
    assert hint in (error.value.hint or "")


def test_the_form_of_a_hub_id():
    assert all(map(find.is_hub_id, ["bert-base-uncased", "google/bert_uncased.v2"]))
    assert not any(map(find.is_hub_id, ["", ".", "./bert", "a/b/c", "a\\b", "/bert", "a b"]))


NAME = "bert--0123456789ab"


def records() -> list[Path]:
    return sorted((state_folder() / "backbones").glob("*.json"))


def test_a_folder_is_found_by_the_name_of_the_backbone(tmp_path, monkeypatch):
    assert find.recorded_folder(NAME) is None
    monkeypatch.chdir(tmp_path)
    find.remember_folder(NAME, Path("bert"))
    assert find.recorded_folder(NAME) == str(tmp_path / "bert")
    assert find.recorded_folder("bert--ba9876543210") is None
    find.remember_folder(NAME, tmp_path / "moved")
    assert find.recorded_folder(NAME) == str(tmp_path / "moved")
    assert len(records()) == 1
    assert [p.name for p in records()[0].parent.iterdir()] == [records()[0].name]


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"[]", b"\xff", b'{"folder": 1, "name": "bert--0123456789ab"}', b"[" * 99_999,
     b'{"folder": "relative", "name": "bert--0123456789ab"}', b'{"folder": "/x", "name": "y"}'],
)  # fmt: skip
def test_a_damaged_record_is_ignored_and_replaced(tmp_path, data):
    find.remember_folder(NAME, tmp_path)
    records()[0].write_bytes(data)
    assert find.recorded_folder(NAME) is None
    find.remember_folder(NAME, tmp_path)
    assert find.recorded_folder(NAME) == str(tmp_path)


def test_a_pipe_or_link_is_not_read_and_a_state_that_cannot_be_written_is_no_error(
    tmp_path, monkeypatch
):
    find.remember_folder(NAME, tmp_path)
    (path,) = records()
    path.rename(tmp_path / "other.json")
    path.symlink_to(tmp_path / "other.json")
    assert find.recorded_folder(NAME) is None
    path.unlink()
    os.mkfifo(path)
    assert find.recorded_folder(NAME) is None
    monkeypatch.setenv("ADAPTERHUB_STATE", str(tmp_path / "other.json"))
    find.remember_folder(NAME, tmp_path)
    assert find.recorded_folder(NAME) is None


DIGEST = "0123456789ab"


def fingerprint():
    return f"bf16-{DIGEST}{'c' * 52}"


def named(name, commit=None):
    model = tiny_models.model("bert", "features")
    model.config._name_or_path = name
    model.config._commit_hash = commit
    return model


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("google/bert", "google/bert"),
        ("bert-base", "bert-base"),
        (f"/cache/models--google--bert/snapshots/{COMMIT}", "google/bert"),
        (f"C:\\cache\\models--google--bert\\snapshots\\{COMMIT}", "google/bert"),
        ("/home/me/my model/", f"my-model--{DIGEST}"),
        ("a/b/tiny..bert", f"tiny-bert--{DIGEST}"),
        ("acme/bert--with-a", f"bert--with-a--{DIGEST}"),
        (f"/{'x' * 200}", f"{'x' * 100}--{DIGEST}"),
        ("/", f"unnamed-bert--{DIGEST}"),
        ("", f"unnamed-bert--{DIGEST}"),
    ],
)
def test_the_name_is_valid_on_any_machine(path, name):
    assert Backbone.of(named(path, COMMIT)).name_and_revision(fingerprint) == (name, COMMIT)
    assert find.is_local_name(name) == (not find.is_hub_id(name))


def test_a_folder_in_the_working_directory_is_not_a_hub_id(backbone, monkeypatch, tmp_path):
    """Nor after a change of the working directory."""
    shutil.copytree(backbone, tmp_path / "google" / "bert")
    monkeypatch.chdir(tmp_path)
    assert Backbone.of(named("google/bert")).name_and_revision(fingerprint)[0] == f"bert--{DIGEST}"
    model, _ = ah.load_backbone("google/bert")
    monkeypatch.chdir("/")
    assert Backbone.of(model).name_and_revision(fingerprint)[0] == f"bert--{DIGEST}"
    assert Backbone.of(model).origin == tmp_path / "google" / "bert"


def test_the_origin_is_the_folder_as_long_as_it_exists(backbone, tmp_path):
    model, _ = ah.load_backbone(str(backbone))
    assert Backbone.of(model).origin == backbone
    by_transformers = transformers.AutoModel.from_pretrained(backbone)
    assert Backbone.of(by_transformers).origin == backbone
    assert Backbone.of(named(str(tmp_path / "deleted"))).origin is None
    assert Backbone.of(named("acme/never-downloaded")).origin is None


# Checks before any library is imported.


def test_the_names_are_those_of_loading():
    assert set(DTYPE_NAMES) == DTYPES.keys()
    assert QUANTIZATIONS.keys() == QUANTIZATION_LIBRARIES.keys()


@pytest.mark.parametrize(
    ("file", "place", "problem"),
    [
        *((None, name, "no backbone") for name in ("a/b/c", "/no/such", "a b")),
        ("x.bin", "x.bin", "is a file"),
        ("model/config.json", ".", r"--backbone .*model"),  # the one checkpoint in a folder
    ],
)
def test_a_place_without_a_checkpoint_is_refused(file, place, problem, tmp_path):
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(BackboneError, match=problem):
        check_backbone_options(str(tmp_path / place) if file else place)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)bitsandbytes.*adapterhub\[quantized\]"):
        check_backbone_options("a/b", None, "nf4")


def test_adapters_load_on_the_same_weights_from_any_folder_and_on_no_others(backbone, tmp_path):
    folders = [shutil.copytree(backbone, tmp_path / name / "model") for name in "abc"]
    tiny_models.model("bert", "features", seed=1).save_pretrained(folders[2])
    models = [ah.load_backbone(str(folder))[0] for folder in folders]
    for folder, model in zip(folders, models, strict=True):
        ah.attach(model, "lora", name="mine").save(folder.with_name("saved"))
        ah.detach(model)
    saved = [folder.with_name("saved") for folder in folders]
    ids = [Saved.at(each).manifest.backbone.id for each in saved]
    assert ids[0] == ids[1] != ids[2]
    assert [name.partition("--")[0] for name in ids] == ["model"] * 3
    models[1].config._name_or_path = "acme/the-hub-s-copy"
    ah.load(models[0], saved[1])
    ah.load(models[1], saved[0])
    for model, other in ((models[2], saved[0]), (models[0], saved[2])):
        with pytest.raises(MismatchError, match="different backbone") as error:
            ah.load(model, other, name="other")
        assert "load_backbone('path/to/model')" in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "quantize", "problem"), [("fp8", None, "fp8"), (None, "nf5", "nf5")]
)
def test_unknown_precisions_are_refused(dtype, quantize, problem):
    with pytest.raises(ConfigError, match=problem):
        check_backbone_options("a/b", dtype, quantize)
