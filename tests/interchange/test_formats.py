"""A folder's format is detected by its files."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.interchange.formats import FORMATS, detect
from tests.kit import tiny_models
from tests.kit.peers import GOLDEN, backbone


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


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("form", [f.name for f in FORMATS if f.name != "diffusers"])
def test_every_reader_imports_with_and_without_the_head(tmp_path, form):
    if form == "peft":
        folder, model = tmp_path / "out", tiny_models.model("bert")
        ah.attach(model, "lora").export(folder)
        ah.detach(model)
    else:
        folder = GOLDEN / "bert" / "houlsby"
        model = backbone("bert", "AutoModelForSequenceClassification")
    reader = detect(folder).read
    whole = reader(folder, anatomy_of(model))
    bare = reader(folder, anatomy_of(model), head=False)
    assert (whole.format, whole.head, bare.head) == (form, True, False)
    assert any(name.startswith("head.") for name in whole.tensors)
    assert not any(name.startswith("head.") for name in bare.tensors)
    assert whole.tensors.keys() > bare.tensors.keys() > set()
    assert whole.methods[: len(bare.methods)] == bare.methods
