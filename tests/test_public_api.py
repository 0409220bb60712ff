"""The functions of `import adapterhub as ah`, used together."""

from __future__ import annotations

import pytest
import tiny_models

import adapterhub as ah
from adapterhub.errors import MismatchError, RegistryError


def test_every_exported_name_is_importable():
    assert len(ah.__all__) > 20
    for name in ah.__all__:
        assert getattr(ah, name) is not None, name
    assert dir(ah) == sorted(ah.__all__)


def test_listing_is_the_description_of_a_publication():
    assert ah.Listing(license="mit", topics=("reviews",)).topics == ("reviews",)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lora'"):
        ah.lora  # noqa: B018


def test_the_python_verbs_take_any_reference(own_registry, tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora", name="polite")
    for parameter in adapter.parameters():
        parameter.data.normal_()
    logits = model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "out")
    entry = ah.publish(tmp_path / "out", tags=("best",))
    adapter.detach()
    for reference in (str(tmp_path / "out"), tmp_path / "out", "polite", "polite@best", "polite@1"):
        loaded = ah.load(model, reference)
        assert model(**tiny_models.batch()).logits.equal(logits)
        loaded.detach()
    assert [found.reference for found in ah.search(method="lora")] == [entry.reference]
    assert ah.pull("polite").is_dir()
    ah.yank("polite@v1", "no")
    with pytest.raises(RegistryError, match="yanked"):
        ah.load(model, "polite")


def test_load_takes_the_adapter_of_the_models_own_backbone(own_registry, tmp_path):
    for number, seed in enumerate((0, 1)):
        model = tiny_models.model("bert", seed=seed)
        adapter = ah.attach(model, "lora", name="polite")
        adapter.save(tmp_path / f"out-{number}")
        ah.publish(tmp_path / f"out-{number}")
    adapter.detach()
    assert ah.load(model, "polite").manifest().backbone.fingerprint
    with pytest.raises(RegistryError, match="has no adapter 'polite' for"):
        ah.load(tiny_models.model("bert", seed=2), "polite")
    with pytest.raises(MismatchError):
        ah.load(tiny_models.model("bert", seed=2), tmp_path / "out-0")


@pytest.fixture
def own_registry(tmp_path, monkeypatch):
    """Use an empty registry and cache."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
