"""A registry on the command line: `list`, `show`, `diff` and all that has no file of its own."""

import importlib
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import adapterhub as ah
from adapterhub import cli
from adapterhub.cli import _format, delete
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Entry, Publication
from adapterhub.registry.trust import trust_key
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
    stored = next((tmp_path / "registry").rglob("adapter.safetensors"))
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(FileError, match="problems in") as error:
        polite("registry verify")
    assert any("polite" in offender for offender in error.value.offenders)


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


def test_delete_asks_first_and_the_answer_decides(polite, monkeypatch):
    with pytest.raises(ConfigError, match="not running in a terminal") as error:
        polite("delete polite@v1")
    assert "try: --yes" in str(error.value)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(delete, "sys", SimpleNamespace(stdin=terminal))
    asked = []

    def refuse(question, **options):
        asked.append(question)
        raise SystemExit(0)

    monkeypatch.setattr(delete.click, "confirm", refuse)
    polite("delete polite@v1")
    assert "polite@v1" in polite("list --all")
    monkeypatch.setattr(delete.click, "confirm", lambda question, **options: asked.append(question))
    assert polite("delete polite@v1") == "deleted polite@v1\n"
    assert len(asked) == 2
    assert all(text.startswith("Delete polite@v1 from ") for text in asked)
    polite("lock polite@v2")
    with pytest.raises(RegistryError, match="pinned"):
        polite("delete polite@v2 --yes")
    assert json.loads(polite("delete polite@v2 --yes --force --json")) == {"deleted": "polite@v2"}
    assert "no adapter in the registry" in polite("list")


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


def test_the_default_registry_may_be_missing_and_a_lock_file_names_its_own(
    typed, tmp_path, monkeypatch
):
    registries.write_sample(tmp_path / "run" / "adapter")
    (tmp_path / "project").mkdir()
    typed("publish run --name polite --registry project/shared")
    typed("lock polite --registry project/shared --file project/adapterhub.lock")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "none-yet"))
    assert "intact" in typed("registry verify")
    assert "0 names" in typed("registry index")
    assert "0 leftovers" in typed("registry gc")
    assert "no adapter in the registry" in typed("list")
    with pytest.raises(RegistryError, match="has no adapter 'polite'"):
        typed("show polite")
    restored = typed("sync --file project/adapterhub.lock --to project/adapters")
    assert restored == "project/adapters: 1 restored, 0 already present\n"
    assert not (tmp_path / "none-yet").exists()


# `adapterhub list`, also called `search`


def test_list_filters_sorts_and_shows_the_main_metric(typed, tmp_path):
    """An empty result names the filter."""
    assert "no adapter in the registry" in typed("list --task tagging")
    metrics = {"classification": {"a_b": 0.1, "accuracy": 0.2, "loss": 0.3},
               "masked-lm": {"accuracy": 0.1, "loss": 0.25}, "other": {"x": 0.5}}  # fmt: skip
    for task, values in metrics.items():
        registries.write_sample(tmp_path / task, 0, task=task, **values)
        typed(f"publish ./{task} --name {task} --topic films")
    shown = typed("list --tag films")
    for score in ("accuracy 0.200", "loss 0.250", "x 0.500"):
        assert score in shown
    assert "a_b 0.100" in typed("list --sort a_b")
    lines = typed("list --sort accuracy --json").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["classification", "masked-lm"]
    assert "masked-lm@v1" not in typed("search film classification")
    low = json.loads(typed("list masked --json"))
    assert low["published"].startswith("20")
    assert low["published"][:10] in typed("list masked")
    line = "no adapter has task=tagging; tasks here: classification (1), masked-lm (1), other (1)\n"
    assert typed("list --task tagging") == line
    assert typed("list --task tagging --all --json") == ""


@pytest.mark.parametrize("line", ["list", "list zzz", "list --task zzz --method yyy"])
def test_damaged_versions_are_noted_once(typed, tmp_path, line):
    registries.write_sample(tmp_path / "made")
    LocalRegistry().put(tmp_path / "made", Publication("polite"))
    path = LocalRegistry().root / "acme--bert-small" / "polite"
    (path / "v2").mkdir()
    (path / "v2" / "adapter.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be read and are left out") as notes:
        typed(line)
    assert len(notes) == 1


# `adapterhub show`


def test_the_registry_that_was_given_and_who_signed_are_shown(typed, tmp_path):
    key = registries.new_key()
    made = registries.write_sample(tmp_path / "made")
    ah.publish(made, "polite", registry="other", sign=key)
    shown = typed("show polite --registry other")
    assert 'adapterhub predict polite --registry other "a text"' in shown
    assert 'ah.load(model, "polite", registry="other")' in shown
    assert f"signed      key {key.public.id} for polite v1: valid, not trusted" in shown
    trust_key(key.public)
    assert "valid, trusted" in typed("show polite --registry other")


# `adapterhub diff`


def test_two_versions_are_compared(typed, tmp_path):
    registries.write_sample(tmp_path / "a", 1, accuracy=0.5)
    registries.write_sample(tmp_path / "b", 2, accuracy=0.75, method="pfeiffer")
    for folder in "ab":
        typed(f"publish ./{folder} --name polite")
    shown = typed("diff polite@v1 polite@v2")
    assert "metrics.accuracy" in shown
    assert "0.75" in shown
    assert "encoder.0.attn.q.lora.a   2 x 4   1" in shown
    assert "0 of 1 tensors that both have are equal" in shown
    assert typed("diff a polite@v1") == "1 of 1 tensors that both have are equal\n"
    tree = json.loads(typed("diff polite@v1 ./b --json"))
    assert tree["adapters"] == ["polite@v1", "./b"]
    assert tree["fields"]["metrics.accuracy"] == [0.5, 0.75]
    row = {"first": [2, 4], "second": [2, 4], "distance": 1.0}
    assert tree["tensors"] == {"encoder.0.attn.q.lora.a": row}


list_module = importlib.import_module("adapterhub.cli.list")  # `cli.list` is its command


def test_the_table_fits_a_terminal(monkeypatch, capsys):
    """What all adapters have in common is left out before what tells them apart."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(_format, "console", lambda: console)
    entries = [
        Entry(f"name-of-{n}@v1", f"name-of-{n}", "v1", "", backbone, "", ("lora",),
              "classification", {"accuracy": 0.5}, ("best",), 298_000, 74_000,
              published="2026-11-22T10:00:00Z")
        for n, backbone in enumerate(("acme/a-model", "my-bert--0123456789ab"))
    ]  # fmt: skip
    list_module._print_entries(entries, "name")
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "my-bert " in output.getvalue()
    for column in ("score", "size", "date", "backbone"):
        assert column in lines[1]
    assert "not shown: parameters, task, tags (use --json)" in output.getvalue()
    table = list_module.entries_table([replace(entries[0], tags=(), published=None)])
    assert not {"tags", "date"} & {*table.columns}
