"""Each check of a saved adapter, by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

import adapterhub as ah
from adapterhub.adapters.compatibility import check_backbone_name, check_size, fit_head
from adapterhub.adapters.state import backbone_fingerprint, get_state
from adapterhub.anatomy.backbone import local_name
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import TensorInfo
from adapterhub.interchange.translation import ImportedAdapter
from adapterhub.methods.common.base import restore_methods
from tests.kit import tiny_models


@pytest.fixture
def attached():
    model = tiny_models.model("bert", id2label={0: "a", 1: "b", 2: "c"}, label2id={})
    adapter = ah.attach(model, "lora(rank=2)")
    tensors = {n: TensorInfo("F32", tuple(t.shape)) for n, t in adapter.tensors().items()}
    return model, adapter, replace(adapter.manifest(), tensors=tensors)


def test_methods_far_larger_than_their_file_are_refused_unbuilt(attached):
    model, _, manifest = attached
    methods = restore_methods(manifest.methods, "a")
    check_size(manifest, methods, get_state(model))
    huge = restore_methods([{"lora": {"rank": 1 << 22}}], "a")
    with pytest.raises(MismatchError, match="does not fit this model"):
        check_size(manifest, huge, get_state(model))


def test_a_head_gets_the_saved_number_of_outputs(attached):
    _, adapter, manifest = attached
    tensors = dict(manifest.tensors)
    tensors["head.classifier.weight"] = TensorInfo("F32", (2, 32))
    tensors["head.classifier.bias"] = TensorInfo("F32", (2,))
    fit_head(replace(manifest, labels=("x", "y"), tensors=tensors), adapter)
    assert adapter.labels == ("x", "y")
    assert adapter.head.own["classifier"].out_features == 2
    with pytest.raises(MismatchError, match="does not fit this model"):
        fit_head(replace(manifest, labels=("x", "y")), adapter)  # without outputs for them


@pytest.mark.parametrize("name", ["acme/bert", "/home/me/bert", ""])
def test_the_recorded_name_of_a_backbone_is_compared(name):
    """A local name by its fingerprint, an id of the Hub if the model has a name; no folder."""
    model = tiny_models.model("bert")
    model.config._name_or_path = name
    imported = ImportedAdapter(format="peft", name="a", methods=(), tensors={})
    own = local_name("model", lambda: backbone_fingerprint(model))
    assert check_backbone_name(replace(imported, backbone=own), model) == []
    (note,) = check_backbone_name(replace(imported, backbone="/home/someone/bert"), model)
    assert "not checked" in note
    for other in ["model--" + "0" * 12, *(["acme/other"] if name else [])]:
        with pytest.raises(MismatchError, match="different backbone"):
            check_backbone_name(replace(imported, backbone=other), model)
