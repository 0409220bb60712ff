"""publish, list, show, pull, yank, lock, sync and registry, as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sample_adapters
import tiny_models
from click.testing import CliRunner

import adapterhub as ah
from adapterhub import cli
from adapterhub.errors import AdapterhubError, MismatchError, RegistryError


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run a command; its output, or the error that a user would see."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def typed(line):
        result = CliRunner().invoke(cli.group, line.split())
        if isinstance(result.exception, AdapterhubError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return typed


def test_an_adapters_way(typed, tmp_path):
    sample_adapters.write(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    sample_adapters.write(tmp_path / "other", 1, accuracy=0.5)
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
    assert "# Polite" in shown
    assert "polite@v2" in shown
    assert json.loads(typed("show polite@best --json"))["metrics"] == {"accuracy": 0.75}
    assert Path(typed("pull polite@best --to mine").strip()) == Path("mine")
    assert (tmp_path / "mine" / "adapter.json").is_file()
    typed("lock polite@best")
    assert "1 restored" in typed("sync")
    assert "1 were there" in typed("sync")
    assert "yanked" in typed("yank polite@v2 --reason wrong")
    assert "polite@v1" in typed("list")
    assert "sound" in typed("registry verify")
    assert "1 name in" in typed("registry reindex")
    assert "0 leftovers" in typed("registry gc")


def test_the_python_verbs_take_any_reference(typed, tmp_path):
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


def test_load_takes_the_adapter_of_the_models_own_backbone(typed, tmp_path):
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


def test_each_command_speaks_to_programs(typed, tmp_path):
    sample_adapters.write(tmp_path / "run" / "adapter", 0, accuracy=0.75)
    said = "--tag best --license mit --language en --topic manners --description Short."
    lines = {
        f"publish run {said}": ("license", "mit"),
        "list --tag manners": ("topics", ["manners"]),
        "search short": ("tags", ["best"]),
        "show polite": ("description", "Short."),
        "pull polite --to mine": ("folder", "mine"),
        "lock polite --name ours": ("ours", None),
        "sync": ("restored", ["ours"]),
        "registry verify": ("problems", []),
        "registry reindex": ("names", 1),
        "registry gc": ("removed", []),
        "yank polite@v1 --reason wrong": ("yanked", "wrong"),
    }
    for line, (key, value) in lines.items():
        found = json.loads(typed(f"{line} --json"))
        assert found[key] == value if value is not None else found[key]["digest"], line
    push = cli.group.get_command(None, "push")
    assert "--json" in {name for option in push.params for name in option.opts}


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("pull some/polite", "hf:some/polite"),
        ("pull polite", "adapterhub list"),
        ("publish nothing", "no adapter in nothing"),
        ("push nothing polite", "hf:owner/name"),
        ("yank polite --reason x", "polite@v1"),
        ("sync", "adapterhub lock"),
        ("list --registry nowhere", "no folder 'nowhere'"),
    ],
)
def test_errors_say_what_to_type(typed, line, remedy):
    with pytest.raises(AdapterhubError) as caught:
        typed(line)
    assert remedy in str(caught.value)


def test_listing_needs_no_transformers(typed, tmp_path):
    """`list` is the newcomer's first look: it must not take the time to import models."""
    import subprocess

    code = "import sys; from adapterhub.registry.search import search; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "transformers" not in out.stdout.split()
