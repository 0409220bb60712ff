"""Folders with an adapter near the working directory."""

from __future__ import annotations

from pathlib import Path

from adapterhub.registry.store import holds_adapter, nearby_adapters
from tests.kit import registries


def test_folders_here_and_one_below_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("sst2", "runs/sst2/adapter", "runs/deep/sst2", ".hidden/sst2"):
        registries.write_sample(tmp_path / folder)
    (tmp_path / "out" / "sst2").mkdir(parents=True)
    assert nearby_adapters("sst2") == ["./sst2", "runs/sst2"]
    assert nearby_adapters("ssst2") == ["./sst2", "runs/sst2"]
    assert nearby_adapters("polite") == []


def test_what_holds_an_adapter(tmp_path):
    assert not holds_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert holds_adapter(tmp_path)
    assert not holds_adapter(Path("no/such/folder"))


def test_a_folder_of_peft_is_to_be_imported(tmp_path, monkeypatch, adapterhub):
    """`predict ipl` after an import of `pl` that failed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pl").mkdir()
    (tmp_path / "pl" / "adapter_config.json").write_text("{}")
    code, _, err = adapterhub("predict", "ipl", "a good movie")
    assert code == 2
    assert "adapterhub import ./pl --output ipl" in err
    assert "publish ./pl" not in err
    registries.write_sample(tmp_path / "ips")
    assert "adapterhub publish ./ips" in adapterhub("predict", "ipss", "a good movie")[2]
