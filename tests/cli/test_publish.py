"""`adapterhub publish`."""

from __future__ import annotations

import pytest

from tests.kit import registries


def test_the_same_bytes_are_the_same_version(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0)
    registries.write_sample(tmp_path / "other", 1)
    assert typed("publish run --name polite").startswith("published polite@v1 for acme/bert-small")
    assert "polite@v2" in typed("publish ./other --name polite")
    assert "polite@v1" in typed("publish run --name polite")
    assert "polite@v3" in typed("publish run --name polite --license mit")


@pytest.mark.parametrize(
    ("task", "typed_input"), [("classification", '"a text"'), ("image-to-text", '"a text"')]
)
def test_the_next_step_is_printed(adapterhub, tmp_path, task, typed_input):
    registries.write_sample(tmp_path / "made", task=task)
    folder = str(tmp_path / "made")
    code, out, err = adapterhub("publish", folder, "--registry", str(tmp_path / "a place"))
    assert (code, out.count("\n")) == (0, 1)
    option = f"--registry '{tmp_path / 'a place'}'"
    assert err == f"next: adapterhub predict polite@v1 {option} {typed_input}\n"
    code, out, err = adapterhub("publish", folder, "--json")
    assert (code, err) == (0, "")
