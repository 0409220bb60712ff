"""A format is detected by its files, and translated to methods and a head."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import MismatchError
from adapterhub.interchange.formats import FORMATS, detect
from adapterhub.interchange.translation import Translation, size_options
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


# New parameter values become a task head and methods; problems are collected.


@pytest.fixture
def translation():
    return Translation(anatomy_of(tiny_models.model("bert")))


def test_head_values_become_the_task_head(translation):
    parameters = translation.anatomy.model.named_parameters()
    values = {path: p.detach() + 1 for path, p in parameters if path == "classifier.weight"}
    translation.values |= values
    translation.finalize()
    translation.raise_problems("the checkpoint")  # there are none
    assert translation.head
    assert translation.tensors.keys() == {"head.classifier.weight", "head.classifier.bias"}
    assert translation.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    translation.note_dropout(0.0)
    translation.note_dropout(0.1)
    assert translation.notes == ["classifier.bias: part of the task head, missing from the files",
                                 "dropout 0.1 of training is not carried over"]  # fmt: skip
    assert [name for spec in translation.methods for name in spec] == ["head"]


def test_one_error_lists_all_problems(translation):
    translation.values |= {
        "bert.no_such.weight": torch.ones(1),
        "classifier.scale": torch.ones(1),
        "bert.encoder.layer.0.output.dense.bias": torch.ones(3),
    }
    translation.finalize()
    with pytest.raises(MismatchError, match="the checkpoint cannot be imported on this bert") as e:
        translation.raise_problems("the checkpoint")
    assert e.value.offenders == (
        "bert.encoder.layer.0.output.dense.bias: shape (3,), the backbone needs (32,)",
        "bert.no_such.weight: this model has no such parameter",
        "classifier.scale: the head has no such tensor",
    )


def test_the_most_common_size_is_the_default():
    assert size_options("rank", {"a": 8, "b": 4, "c": 8}) == {"rank": 8, "ranks": {"b": 4}}
    assert size_options("size", {"a": 3}) == {"size": 3, "sizes": {}}
