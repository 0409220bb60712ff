"""A registry on the command line: its commands that are not in a file of their own."""

import json
from types import SimpleNamespace

import pytest

from adapterhub import cli
from adapterhub.cli import delete
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import Saved
from tests.kit import registries


@pytest.fixture
def polite(typed, tmp_path):
    """Publish polite@v1 with a card, a score and the tag best, and polite@v2; return `typed`."""
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    registries.write_sample(tmp_path / "other", 1, accuracy=0.5)
    first = typed("publish run --name polite --tag best")
    assert first.startswith("published polite@v1 for acme/bert-small, sha256 ")
    assert "polite@v2" in typed("publish ./other --name polite")
    return typed


def test_a_version_from_its_publication_to_its_end(polite, tmp_path):
    listed = polite("list")
    assert "polite@v2" in listed
    assert "accuracy 0.500" in listed
    assert "polite@v1" not in listed
    shown = polite("show polite@best")
    assert shown.startswith("polite@v1, published 20")
    for text in ("method      lora", "versions    v2 (20", "v1 (best, 20"):
        assert text in shown
    assert "# Polite" in polite("show polite@best --card")
    assert json.loads(polite("show polite@best --json"))["metrics"] == {"accuracy": 0.75}
    assert "versions" not in polite("show ./run"), "a folder has no versions"

    assert polite("pull polite@best --to mine").strip() == "mine"
    record = json.loads(polite("pull polite@v1 --to mine-2 --json").splitlines()[-1])
    digest = Saved.at(tmp_path / "mine").digest
    assert record == {"folder": "mine-2", "reference": "polite@v1", "digest": digest}
    for file in (tmp_path / "run" / "adapter").iterdir():
        if file.name != "README.md":
            assert (tmp_path / "mine" / file.name).read_bytes() == file.read_bytes()

    assert polite("lock polite@best").startswith("polite = polite@v1 in registry, sha256 ")
    pins = json.loads((tmp_path / "adapterhub.lock").read_text())["adapters"]
    assert (pins["polite"]["reference"], pins["polite"]["registry"]) == ("polite@v1", "registry")
    assert polite("sync") == "adapters: 1 restored, 0 already present\n"
    assert polite("sync") == "adapters: 0 restored, 1 already present\n"
    assert (tmp_path / "adapters" / "polite" / "adapter.json").is_file()

    assert polite("yank polite@v2 --reason wrong") == "yanked polite@v2: wrong\n"
    assert "polite@v1" in polite("list")
    with pytest.warns(UserWarning, match=r"polite@v2 was yanked: wrong"):
        polite("pull polite@v2")
    polite("yank polite@v1 --reason wrong")
    assert "polite@v1" not in polite("list")
    with pytest.raises(RegistryError, match="all versions of 'polite' are yanked"):
        polite("pull polite")
    assert "all versions are intact" in polite("registry verify")
    assert "1 name indexed" in polite("registry index")
    assert "0 leftovers removed" in polite("registry gc")


def test_every_registry_command_prints_json(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75)
    details = "--tag best --license mit --language en --topic manners --description Short."
    lines = {
        f"publish run {details}": ("license", "mit"),
        "list --tag manners": ("topics", ["manners"]),
        "search short": ("tags", ["best"]),
        "show polite": ("description", "Short."),
        "pull polite --to mine": ("folder", "mine"),
        "lock polite --name ours": ("ours", None),
        "sync": ("restored", ["ours"]),
        "registry verify": ("problems", []),
        "registry index": ("names", 1),
        "registry gc": ("removed", []),
        "yank polite@v1 --reason wrong": ("yanked", "wrong"),
    }
    for line, (key, value) in lines.items():
        printed = json.loads(typed(f"{line} --json"))
        assert printed[key] == value if value is not None else printed[key]["digest"], line
    push = cli.group.get_command(None, "push")
    assert "--json" in {name for option in push.params for name in option.opts}


def test_sync_finds_the_registry_of_the_lock_file(typed, tmp_path, monkeypatch):
    registries.write_sample(tmp_path / "run" / "adapter")
    (tmp_path / "project").mkdir()
    typed("publish run --name polite --registry project/shared")
    typed("lock polite --registry project/shared --file project/adapterhub.lock")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "of-another-machine"))
    restored = typed("sync --file project/adapterhub.lock --to project/adapters")
    assert restored == "project/adapters: 1 restored, 0 already present\n"


def test_tags_are_set_moved_listed_and_removed(polite):
    assert polite("tag polite best --remove") == "removed the tag best, which was v1\n"
    assert polite("tag polite") == "no tag\n"
    assert polite("tag polite@v1 best") == "polite@best is v1\n"
    assert polite("tag polite@v2 best") == "polite@best is v2, before v1\n"
    assert polite("tag polite@v2 best") == "polite@best is v2\n"
    assert polite("tag polite").split() == ["best", "v2"]
    tags = {"best": "v2", "good": "v2"}
    assert json.loads(polite("tag polite good --json")) == {"name": "polite", "tags": tags}
    with pytest.raises(ConfigError, match="unknown tag"):
        polite("tag polite none --remove")


def test_delete_asks_first(polite):
    with pytest.raises(ConfigError, match="not running in a terminal") as error:
        polite("delete polite@v1")
    assert "try: --yes" in str(error.value)
    assert polite("delete polite@v1 --yes") == "deleted polite@v1\n"
    assert json.loads(polite("delete polite@v2 --yes --json")) == {"deleted": "polite@v2"}
    assert "no adapter in the registry" in polite("list")


@pytest.mark.parametrize(("answer", "left"), [("y", False), ("", True)])
def test_the_answer_decides(polite, monkeypatch, answer, left):
    asked = []

    def confirm(question, **options):
        asked.append(question)
        if not answer:
            raise SystemExit(0)

    monkeypatch.setattr(delete.click, "confirm", confirm)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(delete, "sys", SimpleNamespace(stdin=terminal))
    polite("delete polite@v1")
    assert asked[0].startswith("Delete polite@v1 from ")
    assert ("polite@v1" in polite("list --all")) == left


def test_a_pinned_version_needs_force(polite):
    polite("lock polite@v1")
    with pytest.raises(RegistryError, match="pinned"):
        polite("delete polite@v1 --yes")
    polite("delete polite@v1 --yes --force")


def test_a_damaged_version_is_found(polite, tmp_path):
    stored = next((tmp_path / "registry").rglob("adapter.safetensors"))
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(FileError, match="problems in") as error:
        polite("registry verify")
    assert any("polite" in offender for offender in error.value.offenders)


def test_a_registry_that_does_not_exist_is_an_error(polite, tmp_path):
    polite("lock polite --registry registry")
    polite("sync --to present")
    lines = ("registry verify", "registry gc", "registry index", "list", "show polite",
             "pull polite", "lock polite", "sync", "sync --to present",
             "yank polite@v1 --reason x")  # fmt: skip
    for line in lines:
        with pytest.raises(RegistryError, match=r"no registry 'regstry'; did you mean 'registry'"):
            polite(f"{line} --registry regstry")
    assert not (tmp_path / "regstry").exists()
    (tmp_path / "regstry").write_text("a file")
    for line in lines:
        with pytest.raises(RegistryError, match="no registry"):
            polite(f"{line} --registry regstry")


def test_the_default_registry_may_be_missing(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "none-yet"))
    assert "intact" in typed("registry verify")
    assert "0 names" in typed("registry index")
    assert "0 leftovers" in typed("registry gc")
    assert "no adapter in the registry" in typed("list")
    with pytest.raises(RegistryError, match="has no adapter 'polite'"):
        typed("show polite")
    assert not (tmp_path / "none-yet").exists()
