"""Tasks on pictures and sounds: rows, losses, predictions, and what an adapter records."""

from __future__ import annotations

import dataclasses
import json
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.task_models import label_options
from adapterhub.data.media import MediaFile
from adapterhub.data.media_formats import open_sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError, MismatchError
from adapterhub.inference.open import Predictor
from adapterhub.tasks import Setting, parse_task
from tests.kit import media
from tests.kit.data import json_lines, write_tsv
from tests.kit.session import refused, succeeded

PICTURES, SOUNDS = parse_task("image-classification"), parse_task("audio-classification")
CLASSES = {PICTURES: ("0", "1", "2"), SOUNDS: ("high", "low", "middle")}
NAMES = {PICTURES: "{}/{}.png", SOUNDS: "{}/{}.wav"}
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 16, "patch_size": 4}  # fmt: skip
# What each reads differs: patches, windows, convolutions.
VISION = {
    "vit": SMALL,
    "beit": SMALL | {"use_relative_position_bias": False},
    "dinov2": SMALL,
    "swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
             "num_heads": [1, 2], "window_size": 2},
    "convnext": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 2},
}  # fmt: skip
# Raw samples with and without a mask, and the two kinds of spectrograms.
HEARING = ("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer")
KINDS = [(PICTURES, "vit"), *((SOUNDS, kind) for kind in HEARING)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    digits = media.write_digits(folder / "digits", classes=3, each=4)
    return {PICTURES: digits, SOUNDS: media.write_tones(folder / "tones", each=4)}


def encoded(task, kind, folders, labelled=True, **options):
    files = task.read(str(folders[task]), DataOptions(), "train")
    made = media.image_processor() if task is PICTURES else media.sound_extractor(kind)
    setting = Setting(made, 128, CLASSES[task])
    return dataclasses.replace(task, **options).encode(files, setting, labelled=labelled)


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_batch_is_what_the_processor_returns(task, kind, folders):
    data = encoded(task, kind, folders)
    batch = data.batch([0, 5])
    assert batch.pop("labels").tolist() == [0, 1]
    names = [NAMES[task].format(CLASSES[task][i], i) for i in (0, 1)]
    contents = [(folders[task] / name).read_bytes() for name in names]
    if task is PICTURES:
        images = [Image.open(folders[task] / name).convert("RGB") for name in names]
        expected = media.image_processor()(images=images, return_tensors="pt")
    else:
        heard = [open_sound(content).samples for content in contents]
        options = {"padding": True} if kind in ("wav2vec2", "hubert") else {}
        expected = media.sound_extractor(kind)(
            heard, sampling_rate=media.RATE, return_tensors="pt", **options
        )
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert "labels" not in encoded(task, kind, folders, labelled=False).batch([0])
    assert task.label_counts(data) == dict.fromkeys(CLASSES[task], 4)
    # Rows hold no content; those of sounds of similar duration share a batch.
    assert all(isinstance(r["file"], MediaFile) and not r["file"].data for r in data.rows)
    assert data.lengths == ([1] * 12 if task is PICTURES else [15, 16, 16, 16] * 3)


@pytest.mark.parametrize(("task", "kind"), [*((PICTURES, kind) for kind in VISION), *KINDS[1:]])
def test_predictions_are_those_of_plain_transformers(task, kind, folders):
    options = label_options(task.name, CLASSES[task])
    torch.manual_seed(0)
    if task is PICTURES:
        config = transformers.AutoConfig.for_model(kind, **VISION[kind], **options)
    else:
        config = media.sound_config(kind, **options)
    of = "Image" if task is PICTURES else "Audio"
    made = getattr(transformers, f"AutoModelFor{of}Classification").from_config(config)
    data = encoded(task, kind, folders)
    with torch.no_grad():
        logits = made.eval()(**data.batch(range(12))).logits
    predictions = task.predict(made, data, 5)
    assert [p.label for p in predictions] == [CLASSES[task][i] for i in logits.argmax(-1)]
    scores = torch.tensor([[p.scores[name] for name in CLASSES[task]] for p in predictions])
    torch.testing.assert_close(scores, logits.softmax(-1), rtol=1e-4, atol=1e-5)


def test_labels_are_named_checked_and_weighted(folders):
    options = DataOptions(labels="0=zero,1=one,2=two")
    files = PICTURES.read(str(folders[PICTURES]), options, "train")
    assert PICTURES.labels(files) == ("one", "two", "zero")
    with pytest.raises(DataError, match="the training data lacks"):
        PICTURES.check(["one", "two"], files)
    data = encoded(PICTURES, "vit", folders, class_weights={"2": 0.0})
    loss, labels = data.task.loss(data), {"labels": torch.tensor([0, 1, 2])}
    logits = torch.eye(3), torch.eye(3) * torch.tensor([[1.0], [1.0], [-9.0]])
    one, other = (loss(SimpleNamespace(logits=each), labels) for each in logits)
    assert one == other


@pytest.mark.parametrize(
    ("name", "kind", "setting", "value"),
    [
        ("image-classification", "vit", "image_mean", [0.1, 0.1, 0.1]),
        ("audio-classification", "whisper", "hop_length", 80),
        ("image-text-to-text", "vlm-llava", "image_processor.image_mean", [0.0, 0.0, 0.0]),
    ],
)
def test_an_adapter_belongs_to_its_processor(name, kind, setting, value, backbones, tmp_path):
    options = {"task": name, "labels": () if "text" in name else ("a", "b", "c")}
    model, processor = load_backbone(str(backbones(kind)), **options)
    adapter = ah.attach(model, "lora", name="one")
    if kind == "whisper":  # its classifier has an encoder where others have the base model
        assert list(adapter.head.own) == ["projector", "classifier"]
        assert {placed.site.stack for placed in adapter.placed} == {"encoder"}
    adapter.save(tmp_path / "a")
    recorded = json.loads((tmp_path / "a/adapter.json").read_text())["processor"]
    assert len(recorded) == 64
    ah.load(load_backbone(str(backbones(kind)), **options)[0], tmp_path / "a")
    ah.detach(model)
    model.save_pretrained(tmp_path / "changed")
    *parts, last = setting.split(".")
    setattr(attrgetter(*parts)(processor) if parts else processor, last, value)
    processor.save_pretrained(tmp_path / "changed")
    other, _ = load_backbone(str(tmp_path / "changed"), **options)
    with pytest.raises(MismatchError, match="other settings of the processor") as error:
        ah.load(other, tmp_path / "a", any_backbone=True)
    assert recorded in str(error.value)
    ah.load(other, tmp_path / "a", any_backbone=True, any_tokenizer=True)


@pytest.mark.parametrize(
    ("task", "alias", "kind", "key"),
    [
        (PICTURES, "image-classification", "vit", "image"),
        (SOUNDS, "keyword-spotting", "wav2vec2", "audio"),
    ],
)
def test_a_table_and_a_folder_predict_the_same(
    task, alias, kind, key, adapterhub, train, backbones, folders, tmp_path
):
    """Train on a table, evaluate on a folder, predict on paths, a folder and a table."""
    folder, run = folders[task], tmp_path / "run"
    names = [NAMES[task].format(label, i) for label in CLASSES[task] for i in range(4)]
    table = write_tsv(folder / "some.tsv", [(n, n.split("/")[0]) for n in names], f"{key}\tlabel")
    words = ("--task", alias, "--eval", folder, "--method", "lora", "train.epochs=1")
    out = succeeded(train(*words, folder=backbones(kind), file=table))
    assert f"adapterhub predict {run} {key.upper()}" in out
    outputs = []
    for words in ([folder / n for n in names], ["--data", folder], ["--data", table]):
        rows = json_lines(succeeded(adapterhub("predict", run, *words, "--json")))
        assert all(row[key].endswith(n) for row, n in zip(rows, names, strict=True))
        outputs.append([row["scores"] for row in rows])
    assert outputs[0] == outputs[1] == outputs[2]
    refused(adapterhub("predict", run, "missing.png"), "no such file")


# Sounds alone.


def tone_encoded(tmp_path, kind, *tone):
    (tmp_path / "a.wav").write_bytes(media.encoded_sound(media.tone(*tone), *tone[2:]))
    file = SOUNDS.example([str(tmp_path / "a.wav")], DataOptions())
    return SOUNDS.encode([file], Setting(media.sound_extractor(kind), 128), labelled=False)


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_another_rate_is_that_of_the_backbone(rate, tmp_path):
    data = tone_encoded(tmp_path, "wav2vec2", 300, 0.5, rate)
    expected = open_sound((tmp_path / "a.wav").read_bytes()).at(media.RATE)
    heard = data.batch([0])["input_values"]
    assert heard.shape == (1, 8000)
    normal = (expected - expected.mean()) / (expected.var() + 1e-7) ** 0.5
    torch.testing.assert_close(heard[0], torch.from_numpy(normal), rtol=1e-4, atol=1e-4)


def test_only_the_beginning_of_long_sounds_is_heard(folders, backbones, tmp_path):
    data = encoded(SOUNDS, "wav2vec2", folders, seconds=0.2)
    assert data.batch([0, 1])["input_values"].shape == (2, 3200)
    assert data.lengths == [10] * 12
    assert data.task.remarks(data) == (
        "of 12 of 12 recordings only the first 0.2 seconds are read (seconds of the task); the "
        "longest has 0.3",
    )
    whole = encoded(SOUNDS, "wav2vec2", folders)
    assert SOUNDS.remarks(whole) == SOUNDS.remarks(dataclasses.replace(whole, rows=[])) == ()
    data = tone_encoded(tmp_path, "whisper", 300, 1.5)
    assert "first 1 seconds are read (the backbone hears no more)" in SOUNDS.remarks(data)[0]
    labels, task = CLASSES[SOUNDS], dataclasses.replace(SOUNDS, seconds=0.2)
    model, processor = load_backbone(str(backbones("wav2vec2")), task=task.head, labels=labels)
    predictor = Predictor(model, task, Setting(processor, 128, labels))
    with pytest.warns(UserWarning, match="only the first 0.2 seconds are read"):
        predictor.evaluate(task.read(str(folders[SOUNDS]), DataOptions(), "train"))


@pytest.mark.parametrize("kind", HEARING[::2])
def test_a_model_in_bf16_trains_and_predicts(kind, adapterhub, train, backbones, folders, tmp_path):
    run, tones = tmp_path / "run", folders[SOUNDS]
    words = ("--task", SOUNDS.name, "--method", "lora", "dtype=bf16", "train.max_steps=1")
    succeeded(train(*words, folder=backbones(kind), file=tones))
    out = succeeded(adapterhub("predict", run, tones / "low/0.wav"))
    assert out.split()[0] in CLASSES[SOUNDS]
