"""What the registry commands share: a whole workflow, and --json."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.testing import CliRunner

from adapterhub import cli
from adapterhub.cli._format import print_published
from adapterhub.cli._options import publication_options
from adapterhub.registry.publish import PublicationInfo
from adapterhub.registry.store import Entry
from tests.kit import registries


def test_publish_list_show_pull_lock_yank_and_verify(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    registries.write_sample(tmp_path / "other", 1, accuracy=0.5)
    assert "polite@v1 for acme/bert-small" in typed("publish run --name polite --tag best")
    assert "polite@v2" in typed("publish ./other --name polite")
    assert "polite@v1" in typed("publish run --name polite")
    listed = typed("list")
    assert "polite@v2" in listed
    assert "accuracy 0.500" in listed
    assert "polite@v1" not in listed
    assert typed("search --sort accuracy --all").index("v1") < 1000
    (line,) = typed("list --json").splitlines()
    assert json.loads(line)["reference"] == "polite@v2"
    shown = typed("show polite@best")
    assert "method      lora" in shown
    assert "v2 (" in shown
    assert json.loads(typed("show polite@best --json"))["metrics"] == {"accuracy": 0.75}
    assert Path(typed("pull polite@best --to mine").strip()) == Path("mine")
    assert (tmp_path / "mine" / "adapter.json").is_file()
    typed("lock polite@best")
    assert "1 restored" in typed("sync")
    assert "1 already present" in typed("sync")
    assert "yanked polite@v2: wrong" in typed("yank polite@v2 --reason wrong")
    assert "polite@v1" in typed("list")
    assert "intact" in typed("registry verify")
    assert "1 name indexed" in typed("registry index")
    assert "0 leftovers removed" in typed("registry gc")


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


def test_an_entry_is_one_line_or_one_json_object(capsys):
    entry = Entry("polite@v1", "polite", "v1", "ab" * 32, "acme/bert-small", "fp", ("lora",), None)
    print_published(entry, "published", as_json=False)
    line = capsys.readouterr().out
    assert line == "published polite@v1 for acme/bert-small, sha256 abababababab\n"
    print_published(entry, "published", as_json=True)
    assert json.loads(capsys.readouterr().out)["digest"] == "ab" * 32


def test_the_description_of_a_publication_comes_from_its_options():
    @click.command()
    @publication_options
    def command(key, allow_findings, **options):
        click.echo(repr(PublicationInfo(**options)))

    words = "--license mit --topic reviews --topic films --language en"
    result = CliRunner().invoke(command, words.split())
    assert result.output.strip() == repr(
        PublicationInfo(license="mit", language=("en",), topics=("reviews", "films"))
    )
