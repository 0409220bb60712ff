"""`adapterhub pull`."""

from __future__ import annotations

import json

from adapterhub.files.native import Saved
from tests.kit import registries


def test_pull_copies_the_verified_files(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert typed("pull polite@best --to mine").strip() == "mine"
    digest = Saved.at(tmp_path / "mine").digest
    record = json.loads(typed("pull polite --to other --json").splitlines()[-1])
    assert record == {"folder": "other", "reference": "polite@v1", "digest": digest}
    for file in (tmp_path / "run" / "adapter").iterdir():
        if file.name != "README.md":
            assert (tmp_path / "mine" / file.name).read_bytes() == file.read_bytes()
