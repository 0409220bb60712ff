"""A format is detected by its files, read strictly, and translated to methods and a head."""

import pytest
import torch
from safetensors.torch import save_file

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import FileError, MismatchError
from adapterhub.files import schema
from adapterhub.interchange import checkpoint_files
from adapterhub.interchange.checkpoint_files import ConfigField, read_json_object, read_tensor_file
from adapterhub.interchange.formats import FORMATS, detect
from adapterhub.interchange.translation import Translation
from tests.kit import tiny_models
from tests.kit.peers import GOLDEN, backbone


def test_adapters_is_recognised_by_its_tensors_and_an_own_folder_is_not_another(tmp_path):
    assert detect(GOLDEN / "bert" / "houlsby").name == "adapters"
    assert detect(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert detect(tmp_path).name == "peft"
    (tmp_path / "adapter.safetensors").write_bytes(b"x")
    assert detect(tmp_path).name == "adapters"
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


# Configurations and tensors of other libraries are read strictly.

WORD = schema.text("[a-z]+", "a word")
NUMBER_OR_WORD = checkpoint_files.either("a number or a word", schema.number, WORD)
FIELDS = {
    "kind": ConfigField(WORD, required=True),
    "size": ConfigField(checkpoint_files.optional(NUMBER_OR_WORD)),
    "fixed": checkpoint_files.only(False, None),
    "seed": checkpoint_files.TRAINING_ONLY,
}
CASES = [
    ({}, None),
    ({"size": None, "fixed": None, "seed": ["anything"]}, None),
    ({"size": 2.5}, None),
    ({"later": []}, None),
    ({"later": 1}, "at.later: unknown, and not neutral: 1"),
    ({"size": []}, "at.size: a list is not a number or a word"),
    ({"kind": 1}, "at.kind: 1 is not a word"),
    ({"fixed": True}, "at.fixed: True changes what is computed, only False is supported"),
]


@pytest.mark.parametrize(("change", "problem"), CASES, ids=str)
def test_options_are_checked_by_name(change, problem):
    found = checkpoint_files.config_problems({"kind": "a"} | change, FIELDS, "at")
    assert found == ([problem] if problem else [])
    assert checkpoint_files.config_problems({}, FIELDS) == ["kind: missing"]


def test_a_pickle_must_be_allowed_and_safetensors_are_preferred(tmp_path):
    with pytest.raises(FileError, match="missing"):
        read_tensor_file(tmp_path, *NAMES)
    torch.save(TENSORS, tmp_path / NAMES[1])
    with pytest.raises(FileError, match=r"a\.bin, a pickle"):
        read_tensor_file(tmp_path, *NAMES)
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]
    torch.save([TENSORS], tmp_path / NAMES[1])
    with pytest.raises(FileError, match="not a mapping of names to tensors"):
        read_tensor_file(tmp_path, *NAMES, allow_pickle=True)
    (tmp_path / NAMES[0]).write_bytes(b"x" * 100)
    with pytest.raises(FileError, match="cannot be read"):
        read_tensor_file(tmp_path, *NAMES)
    save_file(TENSORS, tmp_path / NAMES[0])  # the other is not opened
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]


def test_a_file_must_be_a_json_object(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileError, match="missing") as caught:
        read_json_object(path, 99, expected="a checkpoint")
    assert caught.value.expected == "a checkpoint"
    path.write_text('{"a": 1}')
    assert read_json_object(path, 99, expected="") == {"a": 1}
    for content in ("[]", '{"a": 1, "a": 2}', '{"a": NaN}'):
        path.write_text(content)
        with pytest.raises(FileError, match="cannot be read"):
            read_json_object(path, 99, expected="")
    path.write_text('{"a": 1}' + " " * 100)
    with pytest.raises(FileError, match="more than 99"):
        read_json_object(path, 99, expected="")


# Tensors are read from safetensors, and from a pickle only if allowed.


NAMES = ("a.safetensors", "a.bin")
TENSORS = {"x": torch.arange(3.0)}
INFINITE = "'x': 1 of 2 values are NaN or infinite in fp32"
UNUSABLE = [
    ({}, "no tensors"),
    ({"x": torch.ones(2, dtype=torch.int64)}, "'x': torch.int64 is not a floating-point dtype"),
    ({"x": torch.ones(0, 3)}, "'x': empty, shape (0, 3)"),
    ({"x": torch.tensor([1.0, float("inf")])}, INFINITE),
    ({"x": torch.tensor([1.0, 1e300], dtype=torch.float64)}, INFINITE),
]


@pytest.mark.parametrize(("tensors", "problem"), UNUSABLE)
def test_unusable_tensors_are_listed(tmp_path, tensors, problem):
    save_file(tensors, tmp_path / NAMES[0])
    with pytest.raises(FileError) as caught:
        read_tensor_file(tmp_path, *NAMES)
    assert caught.value.offenders == (problem,)


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
