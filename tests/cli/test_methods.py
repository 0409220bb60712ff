"""`adapterhub methods`."""

from __future__ import annotations

import json

from adapterhub.methods import METHODS
from tests.kit.session import succeeded


def test_methods_lists_the_registry(adapterhub):
    out = succeeded(adapterhub("methods"))
    assert all(f" {name} " in out for name in METHODS)
    assert "2106.09685" in out
    code, out, _ = adapterhub("methods", "lora")
    assert "rank" in out
    code, out, _ = adapterhub("methods", "--json")
    assert json.loads(out).keys() == METHODS.keys()
