"""What a module or a command must not import: what is said first must not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

# They take from 0.2 to 3 seconds each.
SLOW = frozenset(
    {"torch", "transformers", "datasets", "pandas", "sklearn", "scipy", "accelerate", "peft"}
)
LIGHT_MODULES = (
    "adapterhub",
    "adapterhub.data.docstrings",
    "adapterhub.data.examples",
    "adapterhub.tasks",
    "adapterhub.training.options",
    "adapterhub.training.recipe",
    "adapterhub.training.run_data",
    "adapterhub.files.native",
    "adapterhub.inference.record",
    "adapterhub.methods._described",
    "adapterhub.registry.hub",
    "adapterhub.registry.search",
    "adapterhub.registry.tokens",
)
_REPORT = "import sys, {module}; print(*sorted({slow!r} & sys.modules.keys()))"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_module_is_light(module: str) -> None:
    """A module that is read before torch is needed imports none of the slow libraries."""
    code = _REPORT.format(module=module, slow=set(SLOW))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
