"""Loading an adapter gives what was saved, or one error."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import adapterhub as ah
from adapterhub.anatomy import families
from adapterhub.errors import AttachError, MismatchError, OutputError
from adapterhub.files.native import read_adapter, read_manifest, write_adapter


def logits(model):
    with torch.no_grad():
        return model(**tiny_models.batch()).logits


def test_every_offender_is_in_one_error(tmp_path):
    """Any missing, unexpected or wrong-shape tensor raises one error listing every offender."""
    ah.attach(tiny_models.model("bert"), "lora(rank=2)").save(tmp_path / "a")
    manifest, tensors = read_adapter(tmp_path / "a")
    a, b = "encoder.0.attn.q.lora.A", "encoder.1.attn.v.lora.B"
    tensors["encoder.9.attn.q.lora.A"] = tensors.pop(a)
    tensors[b] = tensors[b][:, :1].clone()
    write_adapter(tmp_path / "b", manifest, tensors)
    model = tiny_models.model("bert")
    before = logits(model)
    with pytest.raises(MismatchError) as error:
        ah.load(model, tmp_path / "b")
    assert len(error.value.offenders) == 3
    for part in (f"missing: {a}", "unexpected: encoder.9.attn.q.lora.A", f"{b}: shape (32, 1)"):
        assert part in str(error.value)
    assert torch.equal(logits(model), before)
    assert not any("adapterhub" in name for name in model.state_dict())


@pytest.mark.parametrize("name", ["mlp", "lora", "encoder", "default"])
def test_a_saved_file_holds_all_that_trains(name, tmp_path):
    """Tensor count, shapes and non-zero sizes match the live trainable parameters (also when an
    adapter is named "mlp")."""
    adapter = ah.attach(tiny_models.model("bert"), "mam", name=name)
    adapter.save(tmp_path / "a")
    held = load_file(tmp_path / "a" / "adapter.safetensors")
    live = {n: t for n, t in adapter.tensors().items() if isinstance(t, nn.Parameter)}
    assert len(live) == len(adapter.parameters()) > 10
    assert {n: t.shape for n, t in held.items()} == {n: t.shape for n, t in live.items()}
    assert all(t.numel() for t in held.values())


def test_parameters_without_values_are_not_saved(tmp_path):
    """What ZeRO-3 leaves on a rank is an empty tensor: an error, not an empty file."""
    adapter = ah.attach(tiny_models.model("bert"), "lora")
    for parameter in adapter.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(OutputError, match="empty"):
        adapter.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


class Zebra(nn.Module):
    """A task head of a name that nobody guesses."""

    def __init__(self):
        super().__init__()
        self.stripes = nn.Linear(32, 3)

    def forward(self, x):
        return self.stripes(x)


def with_a_zebra(seed):
    model = tiny_models.model(
        "bert", id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2}
    )
    torch.manual_seed(seed)
    del model.classifier
    model.zebra = Zebra()
    object.__setattr__(model, "classifier", lambda x: model.zebra(x))
    return model


def test_a_head_of_any_name_travels(tmp_path):
    """A head of arbitrary name: logits are identical and the labels are restored."""
    model = with_a_zebra(0)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.save(tmp_path / "a")
    assert any(n.startswith("head.zebra.stripes") for n in read_manifest(tmp_path / "a").tensors)
    again = with_a_zebra(1)
    again.config.id2label = {0: "x", 1: "y", 2: "z"}
    assert ah.load(again, tmp_path / "a").labels == ("a", "b", "c")
    assert torch.equal(logits(again), expected)
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"}


def rename(model):
    """What a refactor of transformers does: other module names, the same computation."""
    for layer in model.bert.encoder.layer:
        for parent, name in ((layer.attention.self, "query"), (layer.intermediate, "dense")):
            module = parent._modules.pop(name)
            parent.add_module(f"{name}_projection", module)
            object.__setattr__(parent, name, module)
    return model


def test_a_renamed_module_changes_nothing(tmp_path, monkeypatch):
    """An adapter saved under one transformers version loads, with equal logits, under another that
    renamed the modules."""
    model = tiny_models.model("bert")
    adapter = ah.attach(model, {"lora": {"sites": ["attn.q", "ffn.up"]}})
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.save(tmp_path / "a")
    other = rename(tiny_models.model("bert"))
    assert "bert.encoder.layer.0.attention.self.query_projection.weight" in other.state_dict()
    row = families.FAMILIES["bert"]
    (stack,) = row.stacks
    sites = {
        role: path.replace("query", "query_projection").replace(
            "intermediate.dense", "intermediate.dense_projection"
        )
        for role, path in stack.sites.items()
    }
    stacks = (dataclasses.replace(stack, sites=types.MappingProxyType(sites)),)
    monkeypatch.setitem(families.FAMILIES, "bert", dataclasses.replace(row, stacks=stacks))
    ah.load(other, tmp_path / "a")
    assert torch.equal(logits(other), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = tiny_models.model("gpt2")
    folder = tmp_path_factory.mktemp("names")
    adapter = ah.attach(model, "lora(rank=1)")
    tiny_models.scramble(adapter)
    adapter.save(folder / "first")
    adapter.detach()
    return model, folder


@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1, max_size=30) | st.from_regex(r"[a-z]{1,8}[./][a-z.]{1,8}"))
def test_any_name_makes_the_whole_way(saved, name):
    """Any registry id maps to a safe internal slug: a full save/load round trip."""
    model, folder = saved
    try:
        adapter = ah.load(model, folder / "first", name=name)
    except AttachError:
        assert not name.isalnum()
        return
    try:
        expected = logits(model)
        adapter.save(folder / "again", overwrite=True)
    finally:
        adapter.detach()
    again = ah.load(model, folder / "again")
    assert again.name == name
    assert torch.equal(logits(model), expected)
    again.detach()
    assert not any("adapterhub" in key for key in model.state_dict())


def test_an_unknown_name_is_refused_and_names_the_others():
    """An unknown name raises; it is never served by the base model without a word."""
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="polite"):
        ah.activate(model, "polit")


def test_the_revision_of_the_base_is_kept(tmp_path):
    """The manifest always holds the resolved base commit SHA and a weight fingerprint."""
    model = tiny_models.model("bert")
    model.config._name_or_path, model.config._commit_hash = "acme/bert", "ab" * 20
    ah.attach(model, "lora").save(tmp_path / "a")
    ref = read_manifest(tmp_path / "a").backbone
    assert (ref.id, ref.revision, ref.dtype, ref.quantization) == (
        "acme/bert", "ab" * 20, "fp32", None,
    )  # fmt: skip
    drifted = tiny_models.model("bert", seed=5)
    drifted.config._name_or_path, drifted.config._commit_hash = "acme/bert", "cd" * 20
    with pytest.raises(MismatchError) as error:
        ah.load(drifted, tmp_path / "a")
    assert "ab" * 20 in str(error.value)
    assert "any_backbone=True" in error.value.hint
    same = copy.deepcopy(model)
    ah.detach(same)
    same.config._commit_hash = "ef" * 20  # a commit that only edits the card
    ah.load(same, tmp_path / "a")


def test_loading_does_not_decompose_weights_again(tmp_path, monkeypatch):
    """PiSSA starts from a decomposition of each weight; its file has what that gave."""
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "pissa")
    tiny_models.scramble(adapter)
    expected = adapter.saved_tensors()
    adapter.save(tmp_path / "a")
    adapter.detach()
    monkeypatch.setattr(torch, "svd_lowrank", None)
    before = torch.random.get_rng_state()
    loaded = ah.load(model, tmp_path / "a").saved_tensors()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    with pytest.raises(TypeError):
        ah.attach(tiny_models.model("bert"), "pissa")
