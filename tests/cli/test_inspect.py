"""`adapterhub inspect`."""

from __future__ import annotations

import json

from adapterhub.backbones import fingerprint
from adapterhub.methods import METHODS


def test_inspect_shows_the_anatomy(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone)
    assert code == 0
    assert "encoder.attn.q" in out
    assert "2 (encoder)" in out
    code, out, _ = adapterhub("inspect", backbone, "--json")
    facts = json.loads(out)
    assert facts["type"] == "bert"
    assert facts["methods"].keys() == METHODS.keys()


def test_inspect_names_the_fingerprint(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone, "--json")
    assert code == 0
    assert json.loads(out)["fingerprint"] == fingerprint(backbone)
