"""A folder's format is detected by its files."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.interchange.formats import detect
from tests.kit import tiny_models
from tests.kit.peers import GOLDEN


def test_adapters_is_recognised_by_its_tensors(tmp_path):
    assert detect(GOLDEN / "bert" / "houlsby").name == "adapters"
    assert detect(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert detect(tmp_path).name == "peft"
    (tmp_path / "adapter.safetensors").write_bytes(b"x")
    assert detect(tmp_path).name == "adapters"


def test_a_native_adapter_is_not_another_format(tmp_path):
    adapter = ah.attach(tiny_models.model("bert"), "lora")
    adapter.save(tmp_path / "native")
    adapter.export(tmp_path / "peft")
    assert detect(tmp_path / "native") is None
    assert detect(tmp_path / "peft").name == "peft"
    (tmp_path / "native" / "adapter_config.json").write_text("{}")
    assert detect(tmp_path / "native") is None
