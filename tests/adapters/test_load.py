"""Loading a folder: all of it or nothing, each check, and a start from what is in it."""

import os
from dataclasses import replace

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters import compatibility
from adapterhub.adapters.state import backbone_fingerprint, get_state
from adapterhub.adapters.warm_start import start_from
from adapterhub.anatomy.backbone import local_name
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import TensorInfo
from adapterhub.files.native import Saved
from adapterhub.interchange.translation import ImportedAdapter
from adapterhub.methods.common.base import restore_methods
from tests.kit import matrix, tiny_models
from tests.kit.selection import ALL, long_table
from tests.kit.tiny_adapters import outputs

# Each check of a saved adapter, by itself.


def test_methods_far_larger_than_their_file_are_refused_unbuilt():
    """And labels without outputs for them."""
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(rank=2)")
    tensors = {n: TensorInfo("F32", tuple(t.shape)) for n, t in adapter.tensors().items()}
    manifest = replace(adapter.manifest(), tensors=tensors)
    methods = restore_methods(manifest.methods, "a")
    compatibility.check_size(manifest, methods, get_state(model))
    huge = restore_methods([{"lora": {"rank": 1 << 22}}], "a")
    with pytest.raises(MismatchError, match="does not fit this model"):
        compatibility.check_size(manifest, huge, get_state(model))
    with pytest.raises(MismatchError, match="does not fit this model"):
        compatibility.fit_head(replace(manifest, labels=("x", "y")), adapter)


@pytest.mark.parametrize("name", ["acme/bert", "/home/me/bert", ""])
def test_the_recorded_name_of_a_backbone_is_compared(name):
    """A local name by its fingerprint, an id of the Hub if the model has a name; no folder."""
    model = tiny_models.model("bert")
    model.config._name_or_path = name
    imported = ImportedAdapter(format="peft", name="a", methods=(), tensors={})
    own = local_name("model", lambda: backbone_fingerprint(model))
    assert compatibility.check_backbone_name(replace(imported, backbone=own), model) == []
    elsewhere = replace(imported, backbone="/home/someone/bert")
    (note,) = compatibility.check_backbone_name(elsewhere, model)
    assert "not checked" in note
    for other in ["model--" + "0" * 12, *(["acme/other"] if name else [])]:
        with pytest.raises(MismatchError, match="different backbone"):
            compatibility.check_backbone_name(replace(imported, backbone=other), model)


# A new adapter starts from the tensors of a saved one, and from its head if labels match.

FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"


def saved(folder, method, architecture="bert"):
    """Save an adapter with arbitrary values, and return its outputs."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, method, name="first")
    tiny_models.scramble(adapter)
    adapter.save(folder)
    return outputs(model)


CELLS = [cell for cell in matrix.CELLS if FULL or cell[1] == "bert"]
TRIED = [c for c in CELLS if ALL or FULL or c[0] in matrix.representatives().values()]
assert {method for method, _ in TRIED} >= {*matrix.representatives().values()}


@long_table(("method", "architecture"), TRIED, 4, nightly=2)
def test_every_method_starts_where_the_other_ended(method, architecture, tmp_path):
    expected = saved(tmp_path / "first", matrix.example(method), architecture)
    model = tiny_models.model(architecture)
    torch.manual_seed(7)
    methods = restore_methods(Saved.at(tmp_path / "first").manifest.methods, "it")
    adapter = ah.attach(model, list(methods), name="second")
    found = start_from(adapter, tmp_path / "first")
    assert found.taken == (adapter.head is not None)
    torch.testing.assert_close(outputs(model), expected, atol=1e-5, rtol=1e-5)
    assert any(parameter.requires_grad for parameter in adapter.parameters())


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("lora(rank=2, dropout=0.3)", ""),  # an option of training alone
        ("lora(rank=4)", "shape|here"),
        ("lora(rank=2, sites=[attn.q])", "only its files have"),
        ("lora(rank=2, alpha=32)", "alpha: 16.0 in its files, here 32.0"),
        ("ia3", "its files lack"),
        ("pfeiffer", "its files lack"),
    ],
)
def test_another_method_or_size_is_refused_and_nothing_changes(spec, text, tmp_path):
    saved(tmp_path / "first", "lora(rank=2)")
    model = tiny_models.model("bert")
    adapter = ah.attach(model, spec, name="second")
    before = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    if not text:
        assert start_from(adapter, tmp_path / "first").taken
        return
    with pytest.raises(MismatchError, match=text) as error:
        start_from(adapter, tmp_path / "first")
    assert "combine" in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in adapter.tensors().items())
    other = ah.attach(tiny_models.model("bert", seed=1), "lora(rank=2)", name="second")
    with pytest.raises(MismatchError, match="different backbone"):
        start_from(other, tmp_path / "first")


def test_with_other_labels_the_head_is_new(tmp_path):
    saved(tmp_path / "first", "lora(rank=2)")
    model = tiny_models.model("bert", num_labels=5)
    adapter = ah.attach(model, "lora(rank=2)", name="second")
    head = {n: t.clone() for n, t in adapter.tensors().items() if n.startswith("head.")}
    found = start_from(adapter, tmp_path / "first")
    assert (found.taken, found.reason) == (False, "the labels are others")
    assert all(torch.equal(adapter.tensors()[n], t) for n, t in head.items())
    first = tiny_models.model("bert")
    other = ah.load(first, tmp_path / "first")
    for name, tensor in other.tensors().items():
        if not name.startswith("head."):
            assert torch.equal(adapter.tensors()[name], tensor)


def test_a_new_language_model_head_stays_behind(backbones, tmp_path):
    """The checkpoint has no head for masked tokens: the first adapter trained one."""
    folder = str(backbones("bert"))
    model, _ = ah.load_backbone(folder, task="masked-lm")
    adapter = ah.attach(model, "lora(rank=2)", name="first")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "first")
    trained = adapter.tensors()
    assert any(".fresh." in name for name in trained)
    classifier, _ = ah.load_backbone(folder, task="classification", labels=["no", "yes"])
    second = ah.attach(classifier, "lora(rank=2)", name="second")
    assert not start_from(second, tmp_path / "first").taken
    for name, tensor in second.tensors().items():
        assert name.startswith("head.") or torch.equal(tensor, trained[name])
    again, _ = ah.load_backbone(folder, task="masked-lm")
    third = ah.attach(again, "lora(rank=2)", name="third")
    start_from(third, tmp_path / "first")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in third.tensors().items())
