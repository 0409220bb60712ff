"""Recognition of speech: targets, what is refused, losses and texts as of plain transformers."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.whisper.modeling_whisper import shift_tokens_right

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.bench.records import predicted_rows
from adapterhub.data.media import MediaFile
from adapterhub.data.media_formats import open_sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.pages.row_scores import row_score
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.speech_recognition import letter_ids
from tests.kit import media, stand_ins
from tests.kit.data import write_tsv
from tests.kit.selection import long_table
from tests.kit.session import succeeded

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


def encoded(folder, processor, task=TASK):
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
    batch = encoded(speech, processor, ENGLISH if "whisper" in name else TASK).batch([0, 1])
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
    row = encoded(speech, processor, ENGLISH).rows[0]["labels"]
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
    found = TASK.predict(model, encoded(speech, processor), 1)
    assert {each.text for each in found} == {"ebb"}
    adapter = ah.attach(model, "lora")
    assert adapter.head is None
    assert not any("lm_head" in name for name in adapter.tensors())


@pytest.mark.parametrize("name", WRITERS)
def test_predictions_are_those_of_plain_transformers(name, speech, loaded):
    """Alone and in a batch: what is padding is not read. Moonshine normalizes over all frames."""
    model, processor = loaded(name)
    task = ENGLISH if "whisper" in name else dataclasses.replace(TASK, new_tokens=12)
    data = encoded(speech, processor, task)
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


@pytest.mark.parametrize("name", WRITERS)
def test_the_loss_is_the_models(name, speech, loaded):
    model, processor = loaded(name)
    data = encoded(speech, processor, ENGLISH if "whisper" in name else TASK)
    assert data.task.loss(data) is None
    with torch.no_grad():
        loss = model(**data.batch(range(4))).loss
        alone = [model(**data.batch([i])).loss for i in range(4)]
    assert loss.isfinite()
    if name == "speech-ctc":  # the mean over texts of the mean over letters
        torch.testing.assert_close(loss, torch.stack(alone).mean(), rtol=1e-4, atol=1e-4)


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
    """A run on four phrases ends without an error in any word; `predict` writes them."""
    run = tmp_path / "run"
    task = "speech-recognition(language=en)" if "whisper" in name else "asr"
    words = ("--task", task, "--method", "full", "train.max_steps=160", "train.eval_every=80")
    succeeded(train(*words, "train.learning_rate=3e-3", folder=backbones(name), file=speech))
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["metrics"] == {"wer": 0.0, "cer": 0.0}
    out = succeeded(adapterhub("predict", run, speech / "1.wav", speech / "2.wav"))
    assert [line.split("\t")[0] for line in out.splitlines()] == ["ba cab", "dad"]


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
