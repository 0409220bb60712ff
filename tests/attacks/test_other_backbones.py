"""A changed backbone is refused, wherever the change is; a copy of the same one is accepted."""

import itertools
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.adapters.compatibility import backbone_differences
from adapterhub.adapters.state import find_state, new_state
from adapterhub.backbones import checkpoint
from adapterhub.backbones.checkpoint import named_tensors
from adapterhub.backbones.fingerprint import function_config
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead
from tests.kit import tiny_models
from tests.kit.selection import long_table

fingerprints = import_module("adapterhub.backbones.fingerprint")  # the package has the function


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    """Sample as little of a tiny model as of one with billions of parameters."""
    monkeypatch.setattr(checkpoint, "RUNS", 2)
    monkeypatch.setattr(checkpoint, "RUN", 2)


@pytest.fixture
def large(monkeypatch):
    """Treat every model as too large to read all its values in memory."""
    monkeypatch.setattr(fingerprints, "SMALL", 0)


def recorded(model) -> Manifest:
    """Return a manifest of an adapter without a head that was trained on a model."""
    identity = new_state(model).identity()
    kind = model.config.model_type
    backbone = BackboneRef("b", None, identity.fingerprint, kind, identity=identity.record())
    return Manifest(name="a", methods=({"lora": {}},), backbone=backbone)


def differences(manifest, model):
    return backbone_differences(manifest, find_state(model) or new_state(model))


def load(folder, dtype=torch.float32, auto="AutoModel"):
    return getattr(transformers, auto).from_pretrained(folder, dtype=dtype)


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def backbone_tensors(model):
    """Yield each tensor of the base model that has more values than the sample."""
    for name, tensor in named_tensors(model).items():
        if tensor.is_floating_point() and tensor.numel() > 4:
            yield name, tensor


@long_table("architecture", tiny_models.MATRIX, nightly=2)
def test_other_values_or_exchanged_tensors_are_another_backbone(architecture):
    """In any tensor: experts, positions, poolers, norms, queries for keys, the row of a token."""
    model = tiny_models.model(architecture, "features")
    manifest = recorded(model)
    assert differences(manifest, model) == []
    accepted, count, exchanged, by_shape = [], 0, 0, {}
    for name, tensor in backbone_tensors(model):
        for place in (tensor.numel() // 2, -2):  # all values count, also those of no sample
            value = tensor.flatten()[place].item()
            with torch.no_grad():
                tensor.view(-1)[place] += 0.5
                accepted += [name] if not differences(manifest, model) else []
                tensor.view(-1)[place] = value
        count += 1
        first = by_shape.setdefault(tuple(tensor.shape), tensor)
        if tensor.data_ptr() != first.data_ptr() and not torch.equal(first, tensor):
            first.data, tensor.data = tensor.data, first.data
            accepted += [f"{name} exchanged"] if not differences(manifest, model) else []
            first.data, tensor.data = tensor.data, first.data
            exchanged += 1
    assert accepted == []
    assert count > 10
    assert exchanged > 3
    assert differences(manifest, model) == []


def other_value(value):
    """Return another value of a field of a configuration."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    if isinstance(value, dict):
        return {key: other_value(item) for key, item in value.items()}
    return [*value, "more"] if isinstance(value, list) else f"other {value}"


@long_table("architecture", tiny_models.ARCHITECTURES, nightly=2)
def test_another_configuration_is_another_backbone(architecture):
    """The number of heads, the activation, rope, the epsilon of norms, ..."""
    model = tiny_models.model(architecture, "features")
    manifest = recorded(model)
    identity = manifest.backbone.identity
    fields = function_config(model.config).keys() - {"model_type"}
    sizes = {"num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
             "attention_heads"}  # fmt: skip
    shapes = {"hidden_act", "hidden_activation", "activation_function", "feed_forward_proj",
              "activation", "afn", "ff_activation"}  # fmt: skip
    assert fields & (sizes | {"d_head"})
    assert fields & shapes or architecture in ("bloom", "mpt")  # which have one activation
    for name in fields:
        config = {**identity["config"], name: other_value(identity["config"][name])}
        backbone = replace(manifest.backbone, identity={**identity, "config": config})
        if identity["config"][name] is not None:
            problems = differences(replace(manifest, backbone=backbone), model)
            assert problems, name
            assert problems[0].startswith(name)


@long_table("architecture", tiny_models.MATRIX, nightly=2)
def test_files_with_another_value_are_another_backbone(architecture, tmp_path, large):
    """Of a large backbone: only samples of the loaded values are compared with the files."""
    original = saved(tiny_models.model(architecture, "features"), tmp_path / "a")
    manifest = recorded(load(original))
    assert manifest.backbone.identity["strength"] == "all"
    tensors = load_file(original / "model.safetensors")
    for name in list(tensors)[::7]:
        changed = tensors[name].clone()
        if changed.numel() <= 4:
            continue
        changed.view(-1)[-2] += 0.5
        folder = shutil.copytree(original, tmp_path / name)
        save_file({**tensors, name: changed}, folder / "model.safetensors", {"format": "pt"})
        assert differences(manifest, load(folder)), name
    assert differences(manifest, load(original)) == []


COPIES = {
    "fp16": lambda model: model.half(),
    "bf16": lambda model: model.bfloat16(),
    "fp64": lambda model: model.double(),
    "fp16 and back": lambda model: model.half().float(),
    "padded": lambda model: padded(model),
}


def padded(model, rows=tiny_models.VOCAB + 8):
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@long_table(("architecture", "copy"), itertools.product(tiny_models.MATRIX, COPIES), 16, 4)
def test_a_copy_is_the_same_backbone(architecture, copy, tmp_path):
    """In memory and in files, whose originals are not on this machine; and the other way round."""
    model = tiny_models.model(architecture, "features")
    manifest = recorded(model)
    changed = COPIES[copy](tiny_models.model(architecture, "features"))
    assert differences(manifest, changed) == []
    folder = saved(changed, tmp_path / "copy")
    for dtype in (torch.float32, torch.float16, changed.dtype):
        assert differences(manifest, load(folder, dtype)) == [], dtype
    if copy != "padded":
        assert differences(recorded(load(folder)), model) == []
    other = COPIES[copy](tiny_models.model(architecture, "features", seed=1))
    assert differences(manifest, other)


def test_a_padded_vocabulary_on_either_side():
    """The tokenizer shows which rows count, so that the smaller backbone is accepted too."""
    model = tiny_models.model("bert", "features", vocab_size=60)
    identity = fingerprints.identity_of_model(
        padded(model, 64), named_tensors(model), vocabulary=fingerprints.Vocabulary(64, 60)
    )
    small = tiny_models.model("bert", "features", vocab_size=60)
    found = new_state(small).identities(identity).identity(complete=True)
    assert (found.rows, found.tokens) == (60, 60)
    assert found.same_sample(identity)
    assert found.different_parts(identity) == []
    problems = differences(recorded(tiny_models.model("bert", "features")), small)
    assert "token embedding: 60 rows, trained with 64" in problems
    assert all(each.startswith(("token embedding", "weights: ")) for each in problems)


@long_table("architecture", tiny_models.MATRIX, parts=8, nightly=2)
def test_every_form_of_a_checkpoint_is_the_same_backbone(architecture, tmp_path, large):
    """Shards, torch files, with and without the head and its prefix."""
    model = tiny_models.usual_model(architecture)
    whole = saved(model, tmp_path / "whole")
    base = load(whole)
    saved(base, tmp_path / "base")
    saved(model, tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shutil.copytree(whole, tmp_path / "torch").joinpath("model.safetensors").unlink()
    torch.save(load_file(whole / "model.safetensors"), tmp_path / "torch" / "pytorch_model.bin")
    manifests = {name: recorded(load(tmp_path / name)) for name in ("whole", "base", "shards")}
    for name, manifest in manifests.items():
        assert manifest.backbone.identity["strength"] == "all"
        for form in ("whole", "base", "shards", "torch"):
            assert differences(manifest, load(tmp_path / form)) == [], (name, form)
            assert ah.fingerprint(tmp_path / form) == manifest.backbone.fingerprint, form


def test_another_language_model_head_is_another_backbone(tmp_path):
    """Unless the adapter has a head of its own."""
    model = tiny_models.model("llama", "causal-lm")
    folder = saved(model, tmp_path / "a")
    manifest = recorded(load(folder, auto="AutoModelForCausalLM"))
    with torch.no_grad():
        model.lm_head.weight[7] += 1
    other = load(saved(model, tmp_path / "b"), auto="AutoModelForCausalLM")
    assert differences(manifest, other) == ["head.lm_head: other values"]
    assert differences(manifest, load(folder)) == [], "a class without the head"
    assert differences(replace(manifest, head=TaskHead("classification")), other) == []


def test_the_error_says_what_differs(tmp_path):
    model = tiny_models.model("bert")
    ah.attach(model, "lora").save(tmp_path / "a")
    other = tiny_models.model("bert", num_attention_heads=2, hidden_act="relu")
    with pytest.raises(MismatchError) as error:
        ah.load(other, str(tmp_path / "a"))
    assert "num_attention_heads: 2, trained with 4" in error.value.offenders
    assert "hidden_act: 'relu', trained with 'gelu'" in error.value.offenders
    same = tiny_models.model("bert", attention_probs_dropout_prob=0.9)
    assert ah.load(same, str(tmp_path / "a")).name == "default"


def test_a_manifest_says_how_much_was_compared(tmp_path, monkeypatch):
    model = tiny_models.model("bert")
    for strength, small in (("sample", 0), ("all", 1 << 28)):
        monkeypatch.setattr(fingerprints, "SMALL", small)
        manifest = ah.attach(model, "lora").save(tmp_path / strength)
        assert manifest.backbone.identity["strength"] == strength
        ah.detach(model)
