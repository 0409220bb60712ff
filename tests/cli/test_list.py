"""`adapterhub list`, also called `search`."""

import importlib
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from adapterhub.cli import _format
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Entry, Publication
from tests.kit import registries

list_module = importlib.import_module("adapterhub.cli.list")


def test_list_filters_and_sorts(typed, tmp_path):
    registries.write_sample(tmp_path / "low", 0, accuracy=0.5)
    registries.write_sample(tmp_path / "high", 1, accuracy=0.75)
    typed("publish ./low --name low --topic films")
    typed("publish ./high --name high")
    names = [json.loads(line)["name"] for line in typed("list --sort accuracy --json").splitlines()]
    assert names == ["high", "low"]
    assert "accuracy 0.500" in typed("list --tag films")
    assert "high@v1" not in typed("search film")
    low = json.loads(typed("list low --json"))
    assert low["published"].startswith("20")
    assert low["published"][:10] in typed("list low")


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


def test_an_empty_result_names_the_filter(typed, tmp_path):
    assert "no adapter in the registry" in typed("list --task tagging")
    registries.write_sample(tmp_path / "a", 0, accuracy=0.5)
    typed("publish ./a --name a")
    line = "no adapter has task=tagging; tasks here: classification (1)\n"
    assert typed("list --task tagging") == line
    assert typed("list --task tagging --all --json") == ""


def test_the_score_is_the_main_metric_of_the_task(typed, tmp_path):
    metrics = {"classification": {"a_b": 0.1, "accuracy": 0.2, "loss": 0.3},
               "masked-lm": {"accuracy": 0.1, "loss": 0.25}, "other": {"x": 0.5}}  # fmt: skip
    for task, values in metrics.items():
        registries.write_sample(tmp_path / task, 0, task=task, **values)
        typed(f"publish ./{task} --name {task}")
    shown = typed("list")
    for score in ("accuracy 0.200", "loss 0.250", "x 0.500"):
        assert score in shown
    assert "a_b 0.100" in typed("list --sort a_b")


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
