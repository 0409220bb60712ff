"""Tasks on pictures and sounds, and recognition of speech: rows, losses, predictions, records."""

import dataclasses
import json
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.whisper.modeling_whisper import shift_tokens_right

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.task_models import label_options
from adapterhub.bench.records import predicted_rows
from adapterhub.data.media import MediaFile
from adapterhub.data.media_formats import open_sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError, MismatchError
from adapterhub.inference.open import Predictor
from adapterhub.pages.row_scores import row_score
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.speech_recognition import letter_ids
from tests.kit import media, stand_ins
from tests.kit.data import write_tsv
from tests.kit.selection import ALL, long_table
from tests.kit.session import succeeded

PICTURES, SOUNDS = parse_task("image-classification"), parse_task("audio-classification")
CLASSES = {PICTURES: ("0", "1", "2"), SOUNDS: ("high", "low", "middle")}
NAMES = {PICTURES: "{}/{}.png", SOUNDS: "{}/{}.wav"}
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 16, "patch_size": 4}  # fmt: skip
# What each reads differs: patches, and convolutions.
CONVOLUTIONS = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 2}
VISION = {"vit": SMALL, "convnext": CONVOLUTIONS}
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


@pytest.mark.parametrize(("task", "key"), [(PICTURES, "image"), (SOUNDS, "audio")])
def test_a_table_has_the_files_of_a_folder(task, key, folders):
    folder = folders[task]
    names = [NAMES[task].format(label, i) for label in CLASSES[task] for i in range(4)]
    table = write_tsv(folder / "some.tsv", [(n, n.split("/")[0]) for n in names], f"{key}\tlabel")
    fitted, choice = task.fitted(str(table), DataOptions(), "train")
    files = task.read(str(folder), DataOptions(), "train")
    assert fitted.read(str(table), choice.options, "train") == files
    assert len(files) == 12


# Sounds alone.


def tone_encoded(tmp_path, kind, *tone):
    (tmp_path / "a.wav").write_bytes(media.encoded_sound(media.tone(*tone), *tone[2:]))
    file = SOUNDS.example([str(tmp_path / "a.wav")], DataOptions())
    return SOUNDS.encode([file], Setting(media.sound_extractor(kind), 128), labelled=False)


def test_another_rate_is_that_of_the_backbone(tmp_path):
    data = tone_encoded(tmp_path, "wav2vec2", 300, 0.5, 44_100)
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


@long_table("kind", HEARING[::2], 2)
def test_a_model_in_bf16_trains_and_predicts(kind, adapterhub, train, backbones, folders, tmp_path):
    run, tones = tmp_path / "run", folders[SOUNDS]
    words = ("--task", SOUNDS.name, "--method", "lora", "dtype=bf16", "train.max_steps=1")
    succeeded(train(*words, folder=backbones(kind), file=tones))
    out = succeeded(adapterhub("predict", run, tones / "low/0.wav"))
    assert out.split()[0] in CLASSES[SOUNDS]


# Recognition of speech

TASK = parse_task("speech-recognition")
ENGLISH = parse_task("speech-recognition(language=en, new_tokens=12)")
WRITERS = ("speech-ctc", "speech-whisper", "speech-moonshine")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Four phrases, short enough for the tiny Whisper, which hears a second."""
    return media.write_speech(tmp_path_factory.mktemp("sounds") / "speech", media.PHRASES[:4])


@pytest.fixture
def loaded(backbones):
    return lambda name: load_backbone(str(backbones(name)), task="speech-recognition")


def files_of(source, **options):
    return TASK.read(str(source), DataOptions(**options), "train")


def targets(folder, processor, task=TASK):
    return task.encode(files_of(folder), Setting(processor, 128), labelled=True)


def heard_in(folder, number):
    return open_sound((folder / f"{number}.wav").read_bytes()).samples


def test_a_folder_with_metadata_is_a_table(speech):
    """A column of classes is not the text, and a missing text is told."""
    texts = {"0.wav": "ab", "1.wav": "ba cab", "2.wav": "dad", "3.wav": "bed"}
    assert {f.name: f.label for f in files_of(speech)} == texts
    assert files_of(speech / "metadata.csv") == files_of(speech)
    unlabelled = TASK.read(str(speech), DataOptions(), "eval", labelled=False)
    assert [f.label for f in unlabelled] == [None] * 4
    rows = [("1.wav", "x", "ba cab"), ("2.wav", "y", "dad")]
    table = write_tsv(speech / "both.tsv", rows, "file_name\tlabel\ttranscription")
    assert [f.label for f in files_of(table)] == ["ba cab", "dad"]
    table = write_tsv(speech / "gaps.tsv", [("1.wav", "ba"), ("2.wav", "")], "audio\ttext")
    with pytest.raises(DataError, match=r"line 3: ('text' is empty|the text is missing)"):
        files_of(table)
    assert [f.label for f in files_of(table, skip_empty=True)] == ["ba"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_batch_is_that_of_the_processor(name, speech, loaded):
    _, processor = loaded(name)
    batch = targets(speech, processor, ENGLISH if "whisper" in name else TASK).batch([0, 1])
    labels = batch.pop("labels")
    heard = [heard_in(speech, 0), heard_in(speech, 1)]
    options = {} if "whisper" in name else {"padding": True}
    expected = processor.feature_extractor(
        heard, sampling_rate=media.RATE, return_tensors="pt", **options
    )
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in batch)
    texts = [processor.tokenizer.decode(row[row >= 0], skip_special_tokens=True) for row in labels]
    assert texts == ["ab", "ba cab"] or name == "speech-ctc"  # that one joins equal letters
    assert (labels[0] == -100).sum() == 4


def test_targets_of_whisper_begin_behind_the_start_token(speech, loaded):
    """With the language and the task, as the decoder does when it writes."""
    model, processor = loaded("speech-whisper")
    row = targets(speech, processor, ENGLISH).rows[0]["labels"]
    tokens = processor.tokenizer.convert_ids_to_tokens(row)
    special = ["<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    assert tokens == [*special, "a", "b", "<|endoftext|>"]
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    read = shift_tokens_right(torch.tensor([row]), pad, start)[0].tolist()
    assert read == [start, *row[:-1]]
    assert processor.tokenizer("ab")["input_ids"][1] != row[0], "the processor's own is unchanged"


def test_targets_end(speech, loaded):
    _, processor = loaded("speech-moonshine")
    plain = stand_ins.byte_tokenizer()  # adds no token of its own
    unended = SimpleNamespace(feature_extractor=processor.feature_extractor, tokenizer=plain)
    for setting in (Setting(processor, 128), Setting(unended, 128)):
        rows = TASK.encode(files_of(speech), setting, labelled=True).rows
        end = setting.processor.tokenizer.eos_token_id
        assert [row["labels"][-1] for row in rows] == [end] * 4


def test_letters_are_those_of_the_vocabulary(speech, loaded, tmp_path):
    for letters, expected in (("ABC", "AB|C"), ("Aabc", "ab|c")):
        vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "|", *letters]
        (tmp_path / "vocab.json").write_text(json.dumps({v: i for i, v in enumerate(vocabulary)}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
        (ids,) = letter_ids(["ab, c"], tokenizer)
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == expected
    _, processor = loaded("speech-ctc")
    files = files_of(speech)
    spelled = [files[0].with_label("A bad, bad ace!"), files[1].with_label("  bed\tBED ")]
    rows = TASK.encode(spelled, Setting(processor, 128), labelled=True).rows
    texts = ["".join(processor.tokenizer.convert_ids_to_tokens(r["labels"])) for r in rows]
    assert texts == ["a|bad|bad|ace", "bed|bed"]
    wrong = [files[0].with_label("zebra 2"), files[1].with_label("bez")]
    with pytest.raises(DataError, match="the tokenizer of the backbone lacks") as error:
        TASK.encode(wrong, Setting(processor, 128), labelled=True)
    for text in ("'z': in 2 texts", "its letters: a b c d e"):
        assert text in str(error.value)


def test_blanks_separate_equal_letters_and_the_head_is_the_backbones(speech, loaded):
    model, processor = loaded("speech-ctc")
    frames = processor.tokenizer.convert_tokens_to_ids(["e", "e", "b", "<pad>", "b", "<pad>"])

    def chosen(head, inputs, logits):
        ids = torch.tensor(frames + frames[-1:] * (logits.shape[1] - len(frames)))
        return torch.nn.functional.one_hot(ids, logits.shape[-1]).to(logits).expand_as(logits)

    model.lm_head.register_forward_hook(chosen)
    found = TASK.predict(model, targets(speech, processor), 1)
    assert {each.text for each in found} == {"ebb"}
    adapter = ah.attach(model, "lora")
    assert adapter.head is None
    assert not any("lm_head" in name for name in adapter.tensors())


@pytest.mark.parametrize("name", WRITERS)
def test_texts_are_those_of_plain_transformers(name, speech, loaded):
    """Alone and in a batch: what is padding is not read. Moonshine normalizes over all frames."""
    model, processor = loaded(name)
    task = ENGLISH if "whisper" in name else dataclasses.replace(TASK, new_tokens=12)
    data = targets(speech, processor, task)
    expected = []
    for i in range(4):
        heard = [heard_in(speech, i)]
        inputs = processor.feature_extractor(heard, sampling_rate=media.RATE, return_tensors="pt")
        with torch.no_grad():
            if name == "speech-ctc":
                ids = model(**inputs).logits.argmax(-1)
            elif name == "speech-whisper":
                ids = model.generate(**inputs, language="en", task="transcribe", max_new_tokens=12)
            else:
                ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        expected.append(processor.tokenizer.batch_decode(ids, skip_special_tokens=True)[0].strip())
    for size in (1,) if name == "speech-moonshine" else (1, 4):
        assert [p.text for p in task.predict(model, data, size)] == expected
    assert len(set(expected)) > 1 or name == "speech-whisper"  # random: it hears no difference


def test_long_sounds_are_refused(speech, loaded):
    _, whisper = loaded("speech-whisper")
    files = files_of(speech)
    long = dataclasses.replace(files[1], seconds=1.2)
    with pytest.raises(DataError, match=r"1 of 2 recordings .* 1 seconds \(the backbone"):
        ENGLISH.encode([files[0], long], Setting(whisper, 128), labelled=False)
    _, ctc = loaded("speech-ctc")
    short = dataclasses.replace(TASK, seconds=0.5)
    with pytest.raises(DataError, match=r"longer than 0\.5 seconds") as error:
        short.encode(files, Setting(ctc, 128), labelled=True)
    assert "1.wav: 0.8 seconds" in str(error.value)
    assert "speech-recognition(seconds=1)" in str(error.value)


def test_the_language_is_named_and_there_is_a_tokenizer(loaded):
    whisper, processor = loaded("speech-whisper")
    with pytest.raises(ConfigError, match="writes several languages") as error:
        TASK.for_model(whisper)
    assert "speech-recognition(language=en)" in str(error.value)
    assert ENGLISH.for_model(whisper) is ENGLISH
    assert TASK.for_model(loaded("speech-ctc")[0]) is TASK
    _, moonshine = loaded("speech-moonshine")
    file = [MediaFile("0" * 64, "ab", "a.wav", "a.wav", seconds=0.3)]
    unknown = dataclasses.replace(TASK, language="xx")
    with pytest.raises(ConfigError, match="none of the backbone's"):
        unknown.encode(file, Setting(processor, 128), labelled=True)
    with pytest.raises(ConfigError, match="no languages to choose"):
        ENGLISH.encode(file, Setting(moonshine, 128), labelled=True)
    with pytest.raises(ConfigError, match="has not learned to generate text"):
        TASK.encode(file, Setting(media.sound_extractor("wav2vec2"), 128), labelled=False)


@long_table("name", ["speech-whisper", "speech-moonshine"], 2)
def test_a_decoder_learns_to_write(name, adapterhub, train, backbones, speech, tmp_path):
    """A run on four phrases ends without an error in any word, if it is long enough."""
    run = tmp_path / "run"
    task = "speech-recognition(language=en)" if "whisper" in name else "asr"
    words = ("--task", task, "--method", "full", f"train.max_steps={160 if ALL else 2}")
    succeeded(train(*words, "train.learning_rate=3e-3", folder=backbones(name), file=speech))
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["metrics"] == {"wer": 0.0, "cer": 0.0} or not ALL
    out = succeeded(adapterhub("predict", run, speech / "1.wav", speech / "2.wav"))
    assert [line.split("\t")[0] for line in out.splitlines()] == ["ba cab", "dad"] or not ALL


@pytest.mark.parametrize("exact", [False, True])
def test_rows_that_are_compared_have_the_error_rate_of_all(exact):
    """Also without their texts, as the records of a study keep them."""
    task = parse_task(f"speech-recognition(exact={str(exact).lower()})")
    texts = {"Good day, Ann.": "good day an", "well": "Well, well"}
    examples = [SimpleNamespace(name="a.wav", label=label) for label in texts]
    predictions = [Generated(text) for text in texts.values()]
    outcomes = [task.outcome(e, p) for e, p in zip(examples, predictions, strict=True)]
    kept = predicted_rows("texts", outcomes).columns
    assert not {"label", "prediction", "texts"} & kept.keys()
    rows = [dict(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)]
    score = row_score("texts", "wer")
    found = score.summarize(score.columns(rows).sum(0))
    assert found == pytest.approx(task.metrics(examples, predictions)["wer"])
    assert found == pytest.approx(4 / 4 if exact else 2 / 4)
