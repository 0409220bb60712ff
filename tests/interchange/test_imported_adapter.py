"""Every importer returns an adapter with or without its task head."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.interchange.formats import FORMATS, detect
from tests.kit import tiny_models
from tests.kit.peers import GOLDEN, backbone

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
