"""`adapterhub lock`."""

from __future__ import annotations

import json

from tests.kit import registries


def test_a_tag_is_pinned_to_its_version(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert typed("lock polite@best").startswith("polite = polite@v1 in registry, sha256 ")
    pins = json.loads((tmp_path / "adapterhub.lock").read_text())["adapters"]
    assert pins["polite"]["reference"] == "polite@v1"
    assert pins["polite"]["registry"] == "registry"
