"""The life of a version: `ah.publish`, `ah.search`, `ah.tag`, `ah.yank` and `ah.delete`."""

import json
from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, OutputError, RegistryError
from adapterhub.files.native import BESIDE, PEFT_FILES, Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, write_lock
from adapterhub.registry.search import why_empty
from adapterhub.registry.store import Query
from tests.kit import registries
from tests.kit.registries import new_key


def test_the_name_is_the_adapters_own_unless_given(tmp_path):
    folder, registry = registries.write_sample(tmp_path / "made"), tmp_path / "registry"
    assert ah.publish(folder, registry=registry).reference == "polite@v1"
    assert ah.publish(folder, "rude", version="v3", registry=registry).reference == "rude@v3"
    for name in ("polite", "rude"):
        assert f"\n# {name}\n" in (ah.pull(name, registry=registry) / "README.md").read_text()
    with pytest.raises(ConfigError, match="invalid adapter name"):
        ah.publish(folder, "a/b", registry=registry)
    with pytest.raises(ConfigError, match="invalid version"):
        ah.publish(folder, "other", version="best", registry=registry)
    with pytest.raises(FileError):
        ah.publish(tmp_path, registry=registry)


def test_a_change_of_metadata_is_a_new_version(tmp_path, monkeypatch):
    folder = registries.write_sample(tmp_path / "made", card="# Mine\n\nMy text.\n")
    registry, copies = tmp_path / "registry", tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def publish(**fields):
        return ah.publish(folder, registry=registry, listing=ah.Listing(**fields))

    assert publish().version == "v1"
    first = publish(license="mit", topics=("manners",))
    assert (first.version, first.license, first.topics) == ("v2", "mit", ("manners",))
    assert publish(license="mit", topics=("manners",)) == first
    assert publish(license="apache-2.0").version == "v3"
    assert publish().version == "v1"
    copy = ah.pull("polite@v2", registry=registry)
    manifest, tensors = Saved.at(copy).read()
    assert (manifest.license, manifest.tags) == ("mit", ("manners",))
    assert all(t.equal(Saved.at(folder).read()[1][name]) for name, t in tensors.items())
    card = (copy / "README.md").read_text(encoding="utf-8")
    assert "My text." in card
    assert "license: mit" in card
    assert ah.search(registry=registry, tags=("manners",), all_versions=True) == [first]
    described = ah.publish(copy, registry=registry, listing=ah.Listing(description="Short."))
    assert (described.license, described.topics) == ("mit", ("manners",))  # of the manifest
    with pytest.raises(OutputError, match="license"):
        publish(license="Apache License 2.0")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not [*copies.iterdir()]


@pytest.mark.parametrize(
    ("way", "published"),
    [
        ("as it is", {*PEFT_FILES}),
        ("--no-peft", set()),
        ("signed before", set()),
        ("--sign", {*BESIDE}),
    ],
)
def test_files_of_peft_in_the_folder_are_published_with_it(tmp_path, way, published):
    folder, registry = registries.write_sample(tmp_path / "made"), tmp_path / "registry"
    (folder / PEFT_FILES[0]).write_text('{"task_type": "SEQ_CLS"}', encoding="utf-8")
    (folder / PEFT_FILES[1]).write_bytes(bytes(8))
    if way == "signed before":
        ah.sign(folder, new_key())
    notes: list[str] = []
    options = {"peft": False} if way == "--no-peft" else {}
    options |= {"sign": new_key()} if way == "--sign" else {}
    entry = ah.publish(folder, registry=registry, note=notes.append, **options)
    version = LocalRegistry(registry).get(entry)
    assert {path.name for path in version.iterdir()} & {*BESIDE} == published
    assert "--sign KEY signs them" in " ".join(notes) or way != "signed before"
    pulled = ah.pull(entry.reference, tmp_path / "pulled", registry=registry)
    assert not {path.name for path in pulled.iterdir()} & {*BESIDE}


# Searches, and why they find nothing.


def test_an_empty_result_is_explained(tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    assert why_empty(Query(task="tagging"), registry) == []
    rows = (("a", "lora", "classification", {"accuracy": 0.5}),
            ("b", "mam", "classification", {"f1": 0.5}),
            ("c", "lora", "regression", {}))  # fmt: skip
    for name, method, task, metrics in rows:
        folder = registries.write_sample(tmp_path / name, 0, method=method, task=task, **metrics)
        ah.publish(folder, name, registry=registry, tags=("good",))
    for query, line in (
        (Query(task="tagging"), "no adapter has task=tagging; tasks here: classification (2),"
         " regression (1)"),
        (Query(tags=("bad",)), "no adapter has tag=bad; tags here: good (3)"),
        (Query(method="x"), "no adapter has method=x; methods here: lora (2), mam (1)"),
        (Query(sort="bleu"), "no adapter has the metric bleu to sort by; metrics here:"
         " accuracy (1), f1 (1)"),
        (Query("zebra"), "no adapter has the words 'zebra'"),
        (Query(backbone="x/y"), "no adapter has backbone=x/y; backbones here: acme/bert-small (3)"),
    ):  # fmt: skip
        assert why_empty(query, registry) == [line]
    assert why_empty(Query(task="regression", method="mam"), registry) == [
        "no adapter has all of task=regression, method=mam",
        "without task=regression: 1",
        "without method=mam: 1",
    ]
    assert why_empty(Query(task="x", method="y"), registry) == [
        "no adapter has task=x; tasks here: classification (2), regression (1)",
        "no adapter has method=y; methods here: lora (2), mam (1)",
    ]


# Tags, yanks and deletions.


@pytest.fixture
def published(here, tmp_path):
    """A registry with polite@v1 (best), v2 and v3."""
    for seed in range(3):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        ah.publish(made, tags=("best",) if seed == 0 else ())
    return tmp_path / "registry" / "acme--bert-small" / "polite"


def listed():
    return [entry.reference for entry in ah.search(all_versions=True)]


def test_a_deleted_version_is_gone_and_its_number_is_not_used_again(published, tmp_path):
    assert listed() == ["polite@v1", "polite@v2", "polite@v3"]
    assert ah.delete("polite@3") == "polite@v3"
    assert listed() == ["polite@v1", "polite@v2"]
    for act in (ah.pull, ah.delete):
        with pytest.raises(RegistryError, match="has no version v3"):
            act("polite@v3")
    assert ah.publish(registries.write_sample(tmp_path / "new", 9)).version == "v4"
    assert [p.name for p in published.iterdir() if p.name.startswith(".adapterhub")] == []


def test_tags_and_yanks_go_with_a_version_and_its_name_is_known_as_deleted(published, tmp_path):
    ah.yank("polite@v1", "wrong")
    ah.yank("polite@v2", "too")
    ah.delete("polite@v1")
    tree = json.loads((published / "names.json").read_bytes())
    assert tree == {"highest": 3, "tags": {}, "yanked": {"v2": "too"}}
    with pytest.raises(RegistryError, match="no version best"):
        ah.pull("polite@best")
    for version in ("v2", "v3"):
        ah.delete(f"polite@{version}")
    assert listed() == []
    with pytest.raises(RegistryError, match="no adapter 'polite': all its versions were deleted"):
        ah.pull("polite")
    with pytest.raises(RegistryError, match="all its versions were deleted"):
        ah.delete("polite@v1")
    assert ah.publish(tmp_path / "made-0").version == "v4"


def test_a_version_that_a_lock_file_here_pins_is_kept(published):
    write_lock(Path("adapterhub.lock"), dict([pin("polite@v2", name="theirs")]))
    with pytest.raises(RegistryError, match=r"polite@v2 is pinned as 'theirs' by adapterhub.lock"):
        ah.delete("polite@v2")
    other = published.parents[2] / "other"
    ah.publish(published.parents[2] / "made-0", registry=other)
    ah.publish(published.parents[2] / "made-1", registry=other)
    ah.delete("polite@v2", registry=other)  # another registry's
    ah.delete("polite@v1")
    ah.delete("polite@v2", force=True)
    Path("adapterhub.lock").write_text("x")
    with pytest.raises(FileError, match="not a lock file"):
        ah.delete("polite@v3")


def test_a_damaged_version_can_be_deleted(published):
    (published / "v3" / "adapter.json").write_text("x")
    with pytest.raises(FileError):
        ah.pull("polite")
    ah.delete("polite@v3")
    assert ah.pull("polite").name == "v2"


KEPT = [
    ("polite", "one version by its number"),
    ("polite@best", "one version by its number"),
    ("./polite", "is a folder"),
    ("hf:acme/polite@v1", "is on the Hub, where adapterhub deletes nothing"),
]


@pytest.mark.parametrize(("reference", "problem"), KEPT)
def test_only_a_version_of_a_local_registry_is_deleted(reference, problem):
    with pytest.raises(ConfigError, match=problem):
        ah.delete(reference)


def test_a_name_of_several_backbones(published, tmp_path):
    fingerprint = f"bf16-{'1' * 64}"
    other = {"backbone": "other/gpt", "fingerprint": fingerprint}
    ah.publish(registries.write_sample(tmp_path / "other", 5, **other))
    with pytest.raises(RegistryError, match="exists for several backbones"):
        ah.delete("polite@v1")
    ah.delete("polite@v1", backbone=fingerprint)
    ah.delete("polite@v2", backbone="acme/bert-small")
    with pytest.raises(RegistryError, match="has no adapter 'polit'; did you mean 'polite'"):
        ah.delete("polit@v1")
    with pytest.raises(RegistryError, match="has no adapter 'polite' for third/model"):
        ah.delete("polite@v1", backbone="third/model")
    assert listed() == ["polite@v1", "polite@v3"]


def test_removing_what_is_not_there(published):
    with pytest.raises(ConfigError, match="is a folder"):
        ah.tag("./polite", "good")
    with pytest.raises(ConfigError, match="invalid tags"):
        ah.tag("polite", "a b")
    with pytest.raises(ConfigError, match="unknown tag of polite 'bset'; did you mean 'best'"):
        ah.tag("polite", "bset", remove=True)
    with pytest.raises(ConfigError, match="polite@best is v1, not v2"):
        ah.tag("polite@v2", "best", remove=True)
    assert ah.tag("polite@v1", "best", remove=True) == {}


def test_a_version_that_was_deleted_meanwhile_gets_no_tag(published):
    registry = LocalRegistry()
    entry = registry.resolve("polite", "v1")
    ah.delete("polite@v1")
    with pytest.raises(RegistryError, match="polite@v1 was deleted"):
        registry.tag(entry, "best")
    assert ah.tag("polite") == {}


def test_a_yank_needs_an_existing_version_and_one_printable_line(published):
    with pytest.raises(ConfigError, match="polite@v1"):
        ah.yank("polite", "no")
    with pytest.raises(RegistryError, match="has no version v4"):
        ah.yank("polite@v4", "no")
    for reason in ("", "a\nb", "\x1b[2J", "\ud800", "x" * 1001):
        with pytest.raises(ConfigError, match="invalid reason"):
            ah.yank("polite@v1", reason)
