"""Classification of pictures: data, rows, losses, predictions, and what an adapter records."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from PIL import Image

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.task_models import label_options
from adapterhub.data.media import MediaFile
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError, MismatchError
from adapterhub.tasks import Setting, parse_task
from tests.kit import media
from tests.kit.data import write_tsv

TASK = parse_task("image-classification")
CLASSES = ("0", "1", "2")
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 16, "patch_size": 4}  # fmt: skip
# What each reads differs: patches, windows, convolutions.
MODELS = {
    "vit": SMALL,
    "beit": SMALL | {"use_relative_position_bias": False},
    "dinov2": SMALL,
    "swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
             "num_heads": [1, 2], "window_size": 2},
    "convnext": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 2},
}  # fmt: skip


def encoded(folder, labelled=True, **options):
    files = TASK.read(str(folder), DataOptions(), "train")
    setting = Setting(media.image_processor(**options), 128, CLASSES)
    return TASK.encode(files, setting, labelled=labelled)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return media.write_digits(tmp_path_factory.mktemp("media") / "digits", classes=3, each=4)


def test_a_batch_is_what_the_image_processor_returns(digits):
    data = encoded(digits)
    batch = data.batch([0, 5])
    assert batch["labels"].tolist() == [0, 1]
    images = [Image.open(digits / name).convert("RGB") for name in ("0/0.png", "1/1.png")]
    expected = media.image_processor()(images=images, return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)
    assert "labels" not in encoded(digits, labelled=False).batch([0])
    assert data.lengths == [1] * 12
    assert TASK.label_counts(data) == {"0": 4, "1": 4, "2": 4}


def test_rows_hold_no_pixels(digits):
    for row in encoded(digits).rows:
        assert isinstance(row["file"], MediaFile)
        assert not row["file"].data


def test_labels_are_named_and_checked(digits):
    options = DataOptions(labels="0=zero,1=one,2=two")
    files = TASK.read(str(digits), options, "train")
    assert TASK.labels(files) == ("one", "two", "zero")
    with pytest.raises(DataError, match="the training data lacks"):
        TASK.check(["one", "two"], files)


@pytest.mark.parametrize("kind", MODELS)
def test_predictions_are_those_of_the_logits(kind, digits):
    options = label_options("image-classification", CLASSES)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind], **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageClassification.from_config(config).eval()
    batch = encoded(digits).batch(range(12))
    with torch.no_grad():
        output = model(**batch)
    predictions = TASK.predict(model, encoded(digits), 5)
    assert [p.label for p in predictions] == [CLASSES[i] for i in output.logits.argmax(-1)]


def test_classes_have_weights(digits):
    task = dataclasses.replace(TASK, class_weights={"2": 0.0})
    loss = task.loss(encoded(digits))
    output = transformers.modeling_outputs.ImageClassifierOutput(logits=torch.eye(3))
    first = loss(output, {"labels": torch.tensor([0, 1, 2])})
    output.logits[2] *= -9
    assert loss(output, {"labels": torch.tensor([0, 1, 2])}) == first


def test_an_adapter_belongs_to_its_processor(backbones, tmp_path):
    task, folder = "image-classification", str(backbones("vit"))
    model, processor = load_backbone(folder, task=task, labels=CLASSES)
    ah.attach(model, "lora", name="digits").save(tmp_path / "a")
    recorded = json.loads((tmp_path / "a/adapter.json").read_text())["processor"]
    assert len(recorded) == 64
    other, _ = load_backbone(folder, task=task, labels=CLASSES)
    ah.load(other, tmp_path / "a")
    ah.detach(other)
    ah.detach(model)
    changed = tmp_path / "changed"
    model.save_pretrained(changed)
    processor.image_mean = [0.1, 0.1, 0.1]
    processor.save_pretrained(changed)
    other, _ = load_backbone(str(changed), task=task, labels=CLASSES)
    with pytest.raises(MismatchError, match="other settings of the processor") as error:
        ah.load(other, tmp_path / "a", any_backbone=True)
    assert recorded in str(error.value)
    ah.load(other, tmp_path / "a", any_backbone=True, any_tokenizer=True)


def test_a_table_and_a_folder_predict_the_same(adapterhub, backbones, digits, tmp_path):
    """Train on a folder, evaluate on a table, predict on paths, a folder and a table."""
    names = [f"{digit}/{i}.png" for digit in range(3) for i in range(4)]
    table = write_tsv(digits / "some.tsv", [(n, n[0]) for n in names], "image\tlabel")
    run = tmp_path / "run"
    code, out, err = adapterhub(
        "train", "--backbone", backbones("vit"), "--task", "image-classification", "--train", table,
        "--eval", digits, "--output", run, "--method", "lora", "train.epochs=1",
        "train.report=false", "train.tensorboard=false",
    )  # fmt: skip
    assert code == 0, err
    assert f"adapterhub predict {run} IMAGE" in out
    outputs = []
    for words in ([digits / n for n in names], ["--data", digits], ["--data", table]):
        code, out, err = adapterhub("predict", run, *words, "--json")
        assert code == 0, err
        rows = [json.loads(line) for line in out.splitlines()]
        assert all(row["image"].endswith(n) for row, n in zip(rows, names, strict=True))
        outputs.append([row["scores"] for row in rows])
    assert outputs[0] == outputs[1] == outputs[2]
    code, _, err = adapterhub("predict", run, "missing.png")
    assert code != 0
    assert "no such file" in err
