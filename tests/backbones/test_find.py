"""Finding the files of a backbone. Without a network: the Hub is replaced by functions."""

from __future__ import annotations

import hashlib
import sys

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from adapterhub.backbones import find
from adapterhub.backbones.find import PackagedBackbone, find_backbone, is_hub_id
from adapterhub.errors import BackboneError

COMMIT = "0" * 40


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
    (folder / "model.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setitem(
        find.PACKAGED, "acme/tiny", PackagedBackbone("acme_tiny", "model", digest, "tiny")
    )
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


def test_a_package_with_other_weights_is_refused(offline, package):
    (package / "model.safetensors").write_bytes(b"others")
    with pytest.raises(BackboneError, match="does not contain the weights of acme/tiny") as error:
        find_backbone("acme/tiny")
    assert "--force-reinstall acme-tiny" in error.value.hint


def test_a_package_that_is_not_installed_is_named(offline, monkeypatch):
    monkeypatch.setitem(
        find.PACKAGED, "acme/tiny", PackagedBackbone("no_such_package", "model", "", "tiny")
    )
    with pytest.raises(BackboneError, match="package is not installed") as error:
        find_backbone("acme/tiny")
    assert error.value.hint == 'pip install "adapterhub[tiny]"'


@pytest.mark.parametrize("backbone", ["acme/other", "no/such/folder"])
def test_a_backbone_that_does_not_exist_is_named(offline, backbone):
    with pytest.raises(BackboneError, match=f"no backbone '{backbone}'") as error:
        find_backbone(backbone)
    assert "hf auth login" in error.value.hint


def test_the_form_of_a_hub_id():
    assert all(map(is_hub_id, ["bert-base-uncased", "google/bert_uncased.v2"]))
    assert not any(map(is_hub_id, ["", ".", "./bert", "a/b/c", "a\\b", "/bert", "a b"]))
