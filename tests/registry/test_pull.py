"""`ah.pull` and `ah.load`: the verified files of a folder, a registry or a hub."""

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import (
    FileError,
    OutputError,
    RegistryError,
    SignatureError,
)
from adapterhub.files.native import Saved, read_signatures
from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.pull import fetch, read_reference
from adapterhub.registry.store import Publication, Reference, parse_reference
from adapterhub.registry.trust import check_copy
from tests.kit import registries, tiny_models
from tests.kit.tiny_models import logits


@pytest.fixture
def registry(tmp_path):
    for seed in (0, 1):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        ah.publish(made, registry=tmp_path / "r")
    return tmp_path / "r"


def test_a_name_is_pulled_from_the_registry(registry, tmp_path):
    stored = ah.pull("polite@v1", registry=registry)
    assert registry in stored.parents
    copy = ah.pull("polite@v1", tmp_path / "mine", registry=registry)
    assert copy == tmp_path / "mine"
    digests = {Saved.at(folder).digest for folder in (copy, stored, tmp_path / "made-0")}
    assert len(digests) == 1
    before = (copy / "adapter.json").stat().st_mtime_ns
    assert ah.pull("polite@v1", copy, registry=registry) == copy  # it has these files already
    assert (copy / "adapter.json").stat().st_mtime_ns == before
    with pytest.raises(OutputError):
        ah.pull("polite@v2", copy, registry=registry)
    (copy / "adapter.safetensors").chmod(0o644)
    (copy / "adapter.safetensors").write_bytes(b"changed")
    with pytest.raises(OutputError):
        ah.pull("polite@v1", copy, registry=registry)
    assert (copy / "adapter.safetensors").read_bytes() == b"changed"
    with pytest.raises(RegistryError, match="no version v3"):
        ah.pull("polite@v3", registry=registry)


def test_a_folder_is_returned_as_it_is(tmp_path):
    folder = registries.write_sample(tmp_path / "run" / "adapter")
    assert ah.pull(folder) == ah.pull(tmp_path / "run") == folder
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "adapter_config.json").write_text("{}")
    assert ah.pull(tmp_path / "foreign") == tmp_path / "foreign"
    with pytest.raises(FileError):
        ah.pull(tmp_path)


# The checks that every adapter passes.


POLITE = parse_reference("polite")


def signed(entry, key):
    return sign_statement(Statement(entry.digest, "polite", "v1"), key)


def test_signatures_are_looked_for_by_rules_and_go_with_the_copies(tmp_path, monkeypatch, key):
    """Here the store keeps them apart, as a hub does."""

    def unreachable(entry):
        raise RegistryError("unreachable")

    store = LocalRegistry(tmp_path / "store")
    store.put(registries.write_sample(tmp_path / "made"), Publication("polite"))
    entry = store.resolve("polite")
    monkeypatch.setattr(store, "signatures", unreachable)
    fetched = fetch(POLITE, store, entry)  # without rules none is looked for
    assert (fetched.digest, fetched.signers) == (entry.digest, ())
    assert fetch(POLITE, store, entry, find_signers=True).signers == ()
    registries.require_key(key)
    with pytest.raises(RegistryError, match="unreachable"):
        fetch(POLITE, store, entry)
    monkeypatch.setattr(store, "signatures", lambda entry: ())
    with pytest.raises(SignatureError):
        fetch(POLITE, store, entry)
    later = (signed(entry, key), sign_statement(Statement("1" * 64, "x"), key))
    monkeypatch.setattr(store, "signatures", lambda entry: later)
    fetched = fetch(POLITE, store, entry, tmp_path / "mine")
    assert (fetched.folder, fetched.signers) == (tmp_path / "mine", (key.public.text,))
    assert read_signatures(tmp_path / "mine") == (signed(entry, key),)
    monkeypatch.setattr(store, "signatures", unreachable)  # they are beside the manifest now
    fetch(POLITE, store, entry)
    subject = fetched.folder, entry.digest
    assert len(check_copy(parse_reference("polite@v1"), *subject, find=True)) == 1
    for other in ("polite@v2", "rude@v1"):
        with pytest.raises(SignatureError):
            check_copy(parse_reference(other), *subject, find=False)


# A reference selects a folder or its store.


def test_a_bare_name_is_the_folder_with_an_adapter(here):
    for folder in ("mine/adapter", "plain", "my run"):
        registries.write_sample(here / folder)
    (here / "theirs").mkdir()
    (here / "theirs" / "adapter_config.json").write_text("{}")
    for name in ("mine", "plain", "my run", "theirs"):
        assert read_reference(name) == Reference("folder", f"./{name}")
    assert read_reference("mine/adapter") == Reference("folder", "mine/adapter")
    assert read_reference("mine", signed=True).kind == "local"
    assert read_reference("mine@v1") == Reference("local", "mine", "v1")
    assert read_reference("mine", here.parent / "registry").kind == "local"
    assert read_reference("missing").kind == "local"
    copy = ah.pull("mine", "copy")
    assert Saved.at(copy).digest == Saved.at(here / "mine/adapter").digest
    assert {p.name for p in copy.iterdir()} == {p.name for p in (here / "mine/adapter").iterdir()}


def test_the_registry_has_the_name_too(here):
    registries.write_sample(here / "mine" / "adapter", 1)
    ah.publish(registries.write_sample(here.parent / "made", 2), "mine")
    made = Saved.at(here.parent / "made").digest
    with pytest.warns(UserWarning, match=r"'mine' is the folder \./mine here; write mine@VERSION"):
        assert ah.pull("mine").name == "adapter"
    assert Saved.at(ah.pull("mine@v1")).digest == made
    assert Saved.at(ah.pull("mine", registry=here.parent / "registry")).digest == made
    assert Saved.at(ah.pull("./mine")).digest == Saved.at(here / "mine" / "adapter").digest


def test_a_folder_of_something_else_hides_no_published_adapter(here):
    (here / "mine" / "checkpoints").mkdir(parents=True)
    (here / "mine" / "recipe.yaml").write_text("backbone: x\n")
    with pytest.raises(FileError) as error:
        ah.pull("mine")
    assert str(error.value) == (
        "the folder mine has no adapter\n  - in it: checkpoints/, recipe.yaml\n"
        "  expected: the folder of an adapter, or the output folder of a finished run\n"
        "  try: adapterhub train mine/recipe.yaml --resume, if the run was stopped"
    )
    ah.publish(registries.write_sample(here.parent / "made"), "mine")
    assert read_reference("mine").kind == "local"


def test_an_unknown_name_suggests_folders(here):
    registries.write_sample(here / "runs" / "mine" / "adapter")
    for name, folder in (("mine", "runs/mine"), ("mime", "runs/mine")):
        with pytest.raises(RegistryError) as error:
            ah.pull(name)
        assert f"the folder {folder} has an adapter" in str(error.value)
        assert f"try: {folder} for that folder; adapterhub publish {folder}" in str(error.value)


# `ah.load` attaches an adapter by its reference.


@pytest.fixture
def two_backbones(tmp_path):
    """Publish one name for two backbones that differ in their weights."""
    for seed in (0, 1):
        adapter = ah.attach(tiny_models.model("bert", seed=seed), "lora", name="polite")
        tiny_models.scramble(adapter, seed=seed)
        adapter.save(tmp_path / f"out-{seed}")
        ah.publish(tmp_path / f"out-{seed}", registry=tmp_path / "registry")
    return tmp_path / "registry"


@pytest.mark.parametrize(("seed", "half"), [(0, False), (1, True)])
def test_the_adapter_for_the_models_backbone_is_loaded(two_backbones, tmp_path, seed, half):
    """Also on a copy in FP16, whose weights are rounded."""
    model, expected = tiny_models.model("bert", seed=seed), tiny_models.model("bert", seed=seed)
    if half:
        tiny_models.model("bert", seed=seed).half().save_pretrained(tmp_path / "copy")
        model = type(model).from_pretrained(tmp_path / "copy", dtype=torch.float32)
    adapter = ah.load(model, "polite", name="renamed", registry=two_backbones)
    ah.load(expected, tmp_path / f"out-{seed}")
    assert adapter.name == "renamed"
    torch.testing.assert_close(logits(model), logits(expected), atol=half * 1e-2, rtol=0)


def test_adapters_that_were_trained_without_a_name_have_that_of_the_registry(tmp_path):
    """Else two of them could not be on one model."""
    for name in ("polite", "urgent"):
        ah.attach(tiny_models.model("bert"), "lora").save(tmp_path / name)
        ah.publish(tmp_path / name, name=name, registry=tmp_path / "registry")
    model = tiny_models.model("bert")
    for name in ("polite@v1", "urgent"):
        ah.load(model, name, registry=tmp_path / "registry")
    assert list(ah.adapters(model)) == ["polite", "urgent"]
