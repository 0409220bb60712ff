"""`ah.yank` withdraws one version."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, RegistryError
from tests.kit import registries


def test_a_yank_needs_an_existing_version(tmp_path):
    registry = tmp_path / "registry"
    ah.publish(registries.write_sample(tmp_path / "made"), registry=registry)
    with pytest.raises(ConfigError, match="polite@v1"):
        ah.yank("polite", "no", registry=registry)
    with pytest.raises(RegistryError, match="has no version v2"):
        ah.yank("polite@v2", "no", registry=registry)


def test_a_yanked_version_on_a_hub_is_not_found(hub, tmp_path):
    reference = f"{hub.address}/acme/polite"
    for seed in (0, 1):
        ah.push(registries.write_sample(tmp_path / f"made-{seed}", seed), reference, peft=False)
    assert ah.yank(f"{reference}@v2", "wrong").version == "v2"
    assert [entry.version for entry in ah.search(hub=hub.address)] == ["v1"]
    with pytest.warns(UserWarning, match="was yanked: wrong"):
        ah.pull(f"{reference}@v2")


@pytest.mark.parametrize("reason", ["", "a\nb", "\x1b[2J", "\ud800", "x" * 1001])
def test_a_reason_is_one_printable_line(reason, tmp_path):
    with pytest.raises(ConfigError, match="invalid reason"):
        ah.yank("polite@v1", reason, registry=tmp_path)
