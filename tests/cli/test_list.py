"""`adapterhub list`, also called `search`."""

from __future__ import annotations

import json
import sys

import sample_adapters


def test_list_filters_and_sorts(typed, tmp_path):
    sample_adapters.write(tmp_path / "low", 0, accuracy=0.5)
    sample_adapters.write(tmp_path / "high", 1, accuracy=0.75)
    typed("publish ./low --name low --topic films")
    typed("publish ./high --name high")
    names = [json.loads(line)["name"] for line in typed("list --sort accuracy --json").splitlines()]
    assert names == ["high", "low"]
    assert "accuracy 0.500" in typed("list --tag films")
    assert "high@v1" not in typed("search film")
    assert "no matching adapter in the registry" in typed("list --task tagging")


def test_search_does_not_import_transformers(typed, tmp_path):
    """Importing models would make `list` slow."""
    import subprocess

    code = "import sys; from adapterhub.registry.search import search; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "transformers" not in out.stdout.split()
