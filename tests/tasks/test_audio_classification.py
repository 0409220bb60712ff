"""Classification of sounds: rows, what is heard, losses, predictions, what an adapter records."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.task_models import label_options
from adapterhub.data.media_formats import open_sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError, MismatchError
from adapterhub.inference.open import Predictor
from adapterhub.tasks import Setting, parse_task
from tests.kit import media
from tests.kit.data import write_tsv

TASK = parse_task("audio-classification")
CLASSES = ("high", "low", "middle")
# Raw samples with and without a mask, and the two kinds of spectrograms.
KINDS = ("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer")


def encoded(folder, kind="wav2vec2", labelled=True, task=TASK):
    files = task.read(str(folder), DataOptions(), "train")
    return task.encode(files, Setting(media.sound_extractor(kind), 128, CLASSES), labelled=labelled)


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    return media.write_tones(tmp_path_factory.mktemp("sounds") / "tones", each=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_what_the_feature_extractor_returns(kind, tones):
    data = encoded(tones, kind)
    batch = data.batch([0, 5])
    assert batch.pop("labels").tolist() == [0, 1]
    heard = [open_sound((tones / n).read_bytes()).samples for n in ("high/0.wav", "low/1.wav")]
    options = {"padding": True} if kind in ("wav2vec2", "hubert") else {}
    expected = media.sound_extractor(kind)(
        heard, sampling_rate=media.RATE, return_tensors="pt", **options
    )
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert "labels" not in encoded(tones, kind, labelled=False).batch([0])
    assert TASK.label_counts(data) == {"high": 4, "low": 4, "middle": 4}


def test_rows_of_similar_duration_share_a_batch(tones):
    assert encoded(tones).lengths == [15, 16, 16, 16] * 3
    assert all(not row["file"].data for row in encoded(tones).rows)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_the_logits(kind, tones):
    """They are those of plain transformers."""
    options = label_options("audio-classification", CLASSES)
    torch.manual_seed(0)
    config = media.sound_config(kind, **options)
    model = transformers.AutoModelForAudioClassification.from_config(config).eval()
    data = encoded(tones, kind)
    batch = data.batch(range(12))
    with torch.no_grad():
        output = model(**batch)
    predictions = TASK.predict(model, data, 5)
    assert [p.label for p in predictions] == [CLASSES[i] for i in output.logits.argmax(-1)]
    scores = torch.tensor([[p.scores[name] for name in CLASSES] for p in predictions])
    torch.testing.assert_close(scores, output.logits.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_another_rate_is_that_of_the_backbone(rate, tmp_path):
    (tmp_path / "a.wav").write_bytes(media.encoded_sound(media.tone(300, 0.5, rate), rate))
    file = TASK.example([str(tmp_path / "a.wav")], DataOptions())
    setting = Setting(media.sound_extractor("wav2vec2"), 128)
    data = TASK.encode([file], setting, labelled=False)
    expected = open_sound((tmp_path / "a.wav").read_bytes()).at(media.RATE)
    heard = data.batch([0])["input_values"]
    assert heard.shape == (1, 8000)
    normal = (expected - expected.mean()) / (expected.var() + 1e-7) ** 0.5
    torch.testing.assert_close(heard[0], torch.from_numpy(normal), rtol=1e-4, atol=1e-4)


def test_only_the_beginning_of_long_sounds_is_heard(tones):
    short = dataclasses.replace(TASK, seconds=0.2)
    data = encoded(tones, task=short)
    assert data.batch([0, 1])["input_values"].shape == (2, 3200)
    assert data.lengths == [10] * 12
    (line,) = short.remarks(data)
    assert line == (
        "of 12 of 12 sounds only the first 0.2 seconds are heard (seconds of the task); the "
        "longest has 0.3"
    )
    assert TASK.remarks(encoded(tones)) == ()


def test_a_backbone_may_hear_less(tmp_path):
    (tmp_path / "a.wav").write_bytes(media.encoded_sound(media.tone(300, 1.5)))
    file = TASK.example([str(tmp_path / "a.wav")], DataOptions())
    setting = Setting(media.sound_extractor("whisper"), 128)
    data = TASK.encode([file], setting, labelled=False)
    assert "first 1 seconds are heard (the backbone hears no more)" in TASK.remarks(data)[0]
    assert TASK.remarks(TASK.encode([], setting, labelled=False)) == ()


def test_an_evaluation_says_what_is_not_heard(tones, backbones):
    task = dataclasses.replace(TASK, seconds=0.2)
    folder = str(backbones("wav2vec2"))
    model, processor = load_backbone(folder, task=task.head, labels=CLASSES)
    predictor = Predictor(model, task, Setting(processor, 128, CLASSES))
    with pytest.warns(UserWarning, match="only the first 0.2 seconds are heard"):
        predictor.evaluate(task.read(str(tones), DataOptions(), "train"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_bf16_trains_and_predicts(kind, adapterhub, backbones, tones, tmp_path):
    run = tmp_path / "run"
    code, _, err = adapterhub(
        "train", "--backbone", backbones(kind), "--task", TASK.name, "--train", tones, "--eval",
        tones, "--output", run, "--method", "lora", "dtype=bf16", "train.max_steps=1",
        "train.report=false", "train.tensorboard=false",
    )  # fmt: skip
    assert code == 0, err
    code, out, err = adapterhub("predict", run, tones / "low/0.wav")
    assert code == 0, err
    assert out.split()[0] in CLASSES


def test_the_head_of_whisper_is_the_adapters(backbones):
    """Its classifier has an encoder where other classes have the base model."""
    folder = str(backbones("whisper"))
    model, _ = load_backbone(folder, task="audio-classification", labels=CLASSES)
    adapter = ah.attach(model, "lora")
    assert list(adapter.head.own) == ["projector", "classifier"]
    assert {placed.site.stack for placed in adapter.placed} == {"encoder"}


def test_an_adapter_belongs_to_its_processor(backbones, tmp_path):
    task, folder = "audio-classification", str(backbones("whisper"))
    model, _ = load_backbone(folder, task=task, labels=CLASSES)
    ah.attach(model, "lora", name="tones").save(tmp_path / "a")
    recorded = json.loads((tmp_path / "a/adapter.json").read_text())["processor"]
    assert len(recorded) == 64
    ah.detach(model)
    model.save_pretrained(tmp_path / "changed")
    changed = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=80)
    changed.save_pretrained(tmp_path / "changed")
    other, _ = load_backbone(str(tmp_path / "changed"), task=task, labels=CLASSES)
    with pytest.raises(MismatchError, match="other settings of the processor"):
        ah.load(other, tmp_path / "a", any_backbone=True)


def test_every_broken_file_is_told(tmp_path):
    folder = media.write_tones(tmp_path / "tones", each=2)
    (folder / "low/0.wav").write_bytes(b"no sound")
    (folder / "high/1.wav").write_bytes((folder / "high/1.wav").read_bytes()[:900])
    with pytest.raises(DataError) as error:
        TASK.read(str(folder), DataOptions(), "train")
    assert "'low/0.wav' is not audio" in str(error.value)
    assert "'high/1.wav' is broken" in str(error.value)


def test_a_table_and_a_folder_predict_the_same(adapterhub, backbones, tones, tmp_path):
    """Train on a folder, evaluate on a table, predict on paths, a folder and a table."""
    names = [f"{name}/{i}.wav" for name in CLASSES for i in range(4)]
    table = write_tsv(tones / "some.tsv", [(n, n.split("/")[0]) for n in names], "file\tlabel")
    run = tmp_path / "run"
    code, out, err = adapterhub(
        "train", "--backbone", backbones("wav2vec2"), "--task", "keyword-spotting", "--train",
        table, "--eval", tones, "--output", run, "--method", "lora", "train.epochs=1",
        "train.report=false", "train.tensorboard=false",
    )  # fmt: skip
    assert code == 0, err
    assert f"adapterhub predict {run} AUDIO" in out
    outputs = []
    for words in ([tones / n for n in names], ["--data", tones], ["--data", table]):
        code, out, err = adapterhub("predict", run, *words, "--json")
        assert code == 0, err
        rows = [json.loads(line) for line in out.splitlines()]
        assert all(row["audio"].endswith(n) for row, n in zip(rows, names, strict=True))
        outputs.append([row["scores"] for row in rows])
    assert outputs[0] == outputs[1] == outputs[2]
