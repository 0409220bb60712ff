"""`ah.push`: one commit with our files, peft's files and a card that describes how to load both."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download

import adapterhub as ah
from adapterhub.adapters import export as exporting
from adapterhub.errors import BackboneError, ConfigError
from adapterhub.files.native import PEFT_FILES, Saved
from adapterhub.interchange.peft import exporter
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.publish import PublicationInfo
from tests.kit import fake_hub, registries, tiny_models

peft = pytest.importorskip("peft")
pushing = importlib.import_module("adapterhub.registry.publish")  # also a function's name
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LABELS = ["no", "maybe", "yes"]


def save_adapter(backbone, folder, spec, **options):
    """Save an adapter with random parameters, and return its logits."""
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=LABELS)
    adapter = ah.attach(model, spec, name="polite")
    tiny_models.scramble(adapter)
    adapter.save(folder, **options)
    with torch.no_grad():
        return model(**tiny_models.batch()).logits


def files_of(hub, name="me/polite"):
    return hub.repositories[name].commits[-1][1]


def push(hub, folder, **options):
    notes = []
    entry = ah.push(folder, f"{hub.address}/me/polite", note=notes.append, **options)
    return entry, " ".join(notes)


@pytest.mark.parametrize(
    ("spec", "way"),
    [("dora", "save"), (["lora", "norms"], "publish"), ("lora", "a second push")],
)
def test_plain_peft_loads_what_is_pushed(hub, backbone, tmp_path, monkeypatch, spec, way):
    folder = tmp_path / "out"
    expected = save_adapter(backbone, folder, spec, peft=way == "save")
    if way == "a second push":
        _, note = push(hub, folder)
        assert note.endswith(f"push {folder} {hub.address}/me/polite --peft adds them")
        assert files_of(hub).keys().isdisjoint(PEFT_FILES)
    if way == "publish":
        registry = tmp_path / "registry"
        for made in (None, True):  # a version that is already there gets them, too
            published = ah.publish(folder, registry=registry, peft=made, backbone=str(backbone))
        folder = LocalRegistry(registry).get(published)
    if way in ("save", "publish"):
        monkeypatch.setattr(pushing, "peft_files", None)  # it would compute
        entry, note = push(hub, folder)
    else:
        entry, note = push(hub, folder, backbone=str(backbone))
    assert entry.version == "v1"
    assert "plain peft can load it" in note
    commits = 3 if way == "a second push" else 2  # the empty one, and all files
    assert len(hub.repositories["me/polite"].commits) == commits
    folder = snapshot_download("me/polite", endpoint=hub.address)
    bare, _ = ah.load_backbone(str(backbone), task="classification", labels=LABELS)
    theirs = peft.PeftModel.from_pretrained(bare, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(**tiny_models.batch()).logits, expected)
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=LABELS)
    ah.load(model, entry.reference)
    with torch.no_grad():
        assert torch.equal(model(**tiny_models.batch()).logits, expected)


def test_the_card_describes_the_adapter_and_a_pull_has_our_files(hub, backbone, tmp_path):
    save_adapter(backbone, tmp_path / "out", "lora")
    info = PublicationInfo("Tells who is polite.", "cc-by-4.0", ("en", "de"), ("manners",))
    entry, _ = push(hub, tmp_path / "out", backbone=str(backbone), listing=info, tags=("best",))
    text = files_of(hub)["README.md"].decode()
    for words in (
        "ah.load_backbone('path/to/tiny-bert', task='classification', labels=['no', 'maybe'",
        f"ah.load(model, '{hub.address}/me/polite')",
        "PeftModel.from_pretrained(backbone, folder)",
        "AutoModelForSequenceClassification.from_pretrained('path/to/tiny-bert', num_labels=3)",
        *("Tells who is polite.", "| licence | cc-by-4.0 |", "no, maybe, yes", "en, de"),
    ):
        assert words in text
    data = fake_hub.card_data(files_of(hub))
    assert (data["license"], data["language"]) == ("cc-by-4.0", ["en", "de"])
    assert {"adapterhub", "peft", "lora", "classification", "manners"} <= set(data["tags"])
    assert (entry.license, entry.topics, entry.tags) == ("cc-by-4.0", ("manners",), ("best",))
    for tag in ("manners", "best"):
        assert ah.search(hub=hub.address, tags=(tag,)) == [entry]
    assert ah.search("manners poli", hub=hub.address, task="classification") == [entry]
    assert set(PEFT_FILES) <= files_of(hub).keys()
    for name, data in files_of(hub).items():  # no path of this machine
        assert str(Path(backbone).parent).encode() not in data, name
    hub.requests.clear()
    got = ah.pull(entry.reference, tmp_path / "mine")
    assert {p.name for p in got.iterdir()} == {"adapter.json", "adapter.safetensors", "README.md"}
    assert not any("adapter_model" in request for request in hub.requests)
    manifest = Saved.at(tmp_path / "out").manifest
    assert Saved.at(got).manifest == info.apply(manifest)


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("mam", {}, "Not with peft: scaled-parallel: peft has no such method."),
        ("lora", {"peft": False}, "Not with peft: it was published without"),
    ],
)
def test_without_peft_files_the_card_gives_the_reason(hub, backbone, tmp_path, spec, options, why):
    save_adapter(backbone, tmp_path / "out", spec)
    _, note = push(hub, tmp_path / "out", **({"backbone": str(backbone)} | options))
    assert files_of(hub).keys().isdisjoint(PEFT_FILES)
    text = files_of(hub)["README.md"].decode()
    assert why in text
    assert "PeftModel" not in text
    assert "peft" not in fake_hub.card_data(files_of(hub))["tags"]
    assert ("plain peft cannot load it" in note) == (options != {"peft": False})


def test_files_with_which_peft_computes_otherwise_are_left_out(
    hub, backbone, tmp_path, monkeypatch
):
    save_adapter(backbone, tmp_path / "out", "lora")
    options = exporter.pattern_options
    changed = {"lora_alpha": 1}
    monkeypatch.setattr(exporter, "pattern_options", lambda *given: options(*given) | changed)
    _, note = push(hub, tmp_path / "out", backbone=str(backbone))
    assert "plain peft cannot load it: peft computes another logits" in note
    assert files_of(hub).keys().isdisjoint(PEFT_FILES)


def test_a_push_needs_a_reference_to_a_hub(tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    for reference in ("polite", "./out"):
        with pytest.raises(ConfigError, match="hf:owner/name"):
            ah.push(folder, reference)


def test_the_backbone_of_the_run_is_used_if_it_can_be_reached(hub, backbone, tmp_path, monkeypatch):
    save_adapter(backbone, tmp_path / "run" / "adapter", "lora")
    (tmp_path / "run" / "recipe.yaml").write_text(f"backbone: {backbone}\n", encoding="utf-8")
    _, note = push(hub, tmp_path / "run", peft=True)
    assert "plain peft can load it" in note

    def broken(place, **options):
        raise BackboneError(f"the backbone {place!r} cannot be read")

    monkeypatch.setattr(exporting, "meta_model", broken)
    hub.repositories.clear()
    _, note = push(hub, tmp_path / "run", peft=True)
    assert "the backbone 'tiny-bert--" in note
    text = files_of(hub)["README.md"].decode()
    assert re.search(r"Not with peft: the backbone 'tiny-bert--\w{12}' cannot be read\.", text)
    with pytest.raises(BackboneError):
        push(hub, tmp_path / "run", backbone=str(backbone))
