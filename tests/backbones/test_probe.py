"""The probe: a small batch, a model's outputs on it, and whether they depend on later tokens."""

import math

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import adapterhub as ah
from adapterhub.backbones import probe as probing
from adapterhub.backbones.compare import TOLERANCE, coarsest_dtype, same
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.probe import picture_batch, probe, probe_batch, reads_ahead
from adapterhub.backbones.processor import sound_inputs
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import BackboneError
from adapterhub.loop.engine import model_loss
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks.common.batches import corrected_loss
from adapterhub.training.run import run
from tests.kit import media, tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.selection import long_table


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
def test_the_batch_has_ordinary_tokens_and_eos_at_the_end(architecture):
    model = tiny_models.usual_model(architecture)
    batch = probe_batch(model)
    ids = batch["input_ids"]
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id")}
    assert ids.shape == batch["attention_mask"].shape == (probing.ROWS, probing.TOKENS)
    assert not set(ids[:, :-1].flatten().tolist()) & special
    assert (ids[:, -1] == tiny_models.EOS).all()
    assert ("decoder_input_ids" in batch) == (architecture == "t5")
    assert torch.equal(ids, probe_batch(model)["input_ids"])
    assert not torch.equal(ids, probe_batch(model, seed=2)["input_ids"])
    assert probe_batch(model, rows=2, tokens=5)["input_ids"].shape == (2, 5)


def test_the_modes_of_modules_return_even_after_an_error():
    model = tiny_models.usual_model("bert").train()
    dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()
    outputs = probe(model)
    assert outputs.keys() == {"logits"}
    assert torch.equal(outputs["logits"], probe(model)["logits"]), "computed in evaluation mode"
    assert model.training
    assert not dropout.training
    model.classifier = None
    with pytest.raises(TypeError):
        probe(model)
    assert model.training


def test_a_model_without_logits_returns_its_other_outputs_in_fp32():
    outputs = probe(tiny_models.model("bert", "features").to(torch.bfloat16))
    assert "last_hidden_state" in outputs
    assert {t.dtype for t in outputs.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper", "audio-spectrogram-transformer"])
def test_a_model_of_sound_gets_noise_as_its_processor_hears_it(kind, backbones):
    folder = str(backbones(kind))
    model, processor = load_backbone(folder, task="audio-classification", labels=["a", "b"])
    batch = probe_batch(model, rows=3)
    assert model.main_input_name in batch
    half = np.random.default_rng(0).normal(0, 0.1, (3, 8000)).astype(np.float32)
    expected = sound_inputs(processor, list(half))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert probe(model)["logits"].shape == (4, 2)


def test_a_model_of_sound_without_a_processor_gets_raw_noise():
    config = media.sound_config("wav2vec2")
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    assert probe_batch(model)["input_values"].shape == (4, 8000)


def test_a_model_of_pictures_gets_pixels_of_its_size():
    model = transformers.ViTForImageClassification(media.vit_config(image_size=8)).eval()
    batch = probe_batch(model, rows=3)
    assert batch.keys() == {"pixel_values"}
    assert batch["pixel_values"].shape == (3, 3, 8, 8)
    assert probe(model)["logits"].shape == (4, 2)


def test_a_model_of_pictures_with_text_is_probed_with_both(backbones):
    model, _ = load_backbone(str(backbones("vlm-qwen2_vl")), task="image-text-to-text")
    batch = picture_batch(model)
    assert len(batch["input_ids"]) == len(batch["image_grid_thw"]) == probing.ROWS
    assert torch.equal(batch["pixel_values"], picture_batch(model)["pixel_values"])
    before = probe(model)["logits"]
    with torch.no_grad():
        model.model.visual.blocks[0].mlp.fc1.weight += 0.1
    assert not torch.equal(probe(model)["logits"], before)
    assert picture_batch(tiny_models.usual_model("bert")) == {}


CONFIGS = {a: tiny_models.usual_model(a).config for a in tiny_models.MATRIX}
CAUSAL = [a for a in CONFIGS if TASK_MODELS["causal-lm"].classes_for(CONFIGS[a])]
DECODERS = (*tiny_models.DECODERS, *tiny_models.ENCODER_DECODERS)
ENCODERS = ["bert", "roberta", "electra", "xlnet"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_decoders_do_not_read_ahead(dtype):
    assert len(CAUSAL) > (25 if tiny_models.FULL_MATRIX else 0)
    for architecture in sorted({*CAUSAL, *ENCODERS}):
        model = tiny_models.model(architecture, "causal-lm").to(dtype).train()
        assert reads_ahead(model) == (architecture not in DECODERS), architecture
        assert all(module.training for module in model.modules()), "the model is left as it was"
    assert not reads_ahead(tiny_models.model("bert", "causal-lm", is_decoder=True).to(dtype))


EVERY = sorted({*tiny_models.DECODERS, "bart", "mbart", "plbart", "pegasus", *ENCODERS} - {"xlnet"})
NOT_SHIFTED = {"bart", "mbart", "plbart", "pegasus"}


@long_table("architecture", EVERY, 4)
def test_the_loss_and_the_logits_of_a_token_depend_on_those_before_it(architecture):
    """On every architecture with a causal head, by hand, with and without an adapter."""
    extra = {"is_decoder": True} if architecture in ENCODERS else {}
    model = tiny_models.model(architecture, "causal-lm", **extra)
    batch = tiny_models.batch()
    labels, changed = batch["input_ids"].clone(), batch["input_ids"].clone()
    labels[:, :2] = -100
    changed[:, 5:] = changed[:, 5:].flip(1)
    assert probing.shifts_labels(model) == (architecture not in NOT_SHIFTED)
    for adapted in (False, True):
        if adapted:
            tiny_models.scramble(ah.attach(model, "lora"))
        loss = corrected_loss(model, "causal-lm") or model_loss
        with torch.no_grad():
            output = model(**batch, labels=labels)
            after = model(**batch | {"input_ids": changed}).logits
        before = output.logits
        wanted = -torch.stack(
            [
                before[row, position - 1].log_softmax(-1)[labels[row, position]]
                for row in range(3)
                for position in range(2, 9)
            ]
        ).mean()
        torch.testing.assert_close(loss(output, {"labels": labels}), wanted)
        torch.testing.assert_close(before[:, :5], after[:, :5])
        assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_decoder_of_an_encoder_decoder_learns_the_next_token(tmp_path):
    """The order of the words is fixed, so a model that learns from it predicts each of them."""
    tiny_models.model("bart", "causal-lm").save_pretrained(tmp_path / "bart")
    word_tokenizer("<s>", "</s>").save_pretrained(tmp_path / "bart")
    text = "the movie was very good\n"
    (tmp_path / "a.txt").write_text(text * 16)
    flags = {
        "backbone": str(tmp_path / "bart"), "method": "lora(rank=16)",
        "task": "causal-lm(data=text)",
        "data": {"train": str(tmp_path / "a.txt"), "eval": str(tmp_path / "a.txt")},
        "train": {"epochs": 40, "learning_rate": 0.03, "report": False},
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    outcome = run(read(flags=flags), Reporter())
    assert outcome.metrics["loss"] < 1.0
    model, tokenizer = ah.load_backbone(str(tmp_path / "bart"), task="causal-lm")
    ah.load(model, outcome.folder)
    prompt = tokenizer("the movie", return_tensors="pt")["input_ids"][:, :-1]
    generated = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(generated[0], skip_special_tokens=True) == text.strip()


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_backbone_that_reads_ahead_is_refused(architecture, tmp_path):
    tiny_models.model(architecture, "causal-lm").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        BackboneError, match="attends to the tokens that it should predict"
    ) as error:
        ah.load_backbone(str(tmp_path), task="causal-lm")
    assert "--task masked-lm" in error.value.hint


# Tensors are the same if they differ by rounding.


INFINITE = float("inf")


def one(*values):
    return {"x": torch.tensor(values)}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_tolerance_is_that_of_the_dtype_relative_to_the_largest_value(dtype):
    tolerance = TOLERANCE[dtype]
    assert same(one(0.0, 100.0), one(99 * tolerance, 100.0), dtype)
    compared = same(one(0.0, 100.0), one(101 * tolerance, 100.0), dtype)
    assert not compared
    (problem,) = compared.problems
    assert problem.startswith("x: max |difference| ")
    assert compared.tolerances["x"] == pytest.approx(100 * tolerance)


EMPTY, LARGE = torch.zeros(0, 3), torch.ones(3)
ZERO, ALMOST = torch.zeros(2), torch.full((2,), 5e-8)


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "is_same"),
    [
        (one(1.0), one(1.4), 0.5, True),
        (one(1.0), one(1.6), 0.5, False),
        (one(1.0), one(1e9), math.inf, True),
        # Not a number, infinite, another shape, none, missing.
        (one(1.0, 2.0), one(1.0, math.nan), torch.bfloat16, False),
        (one(1.0, 2.0), one(1.0, INFINITE), torch.bfloat16, False),
        (one(1.0, 2.0), one(1.0), torch.bfloat16, False),
        (one(1.0, 2.0), {"x": None}, torch.bfloat16, False),
        (one(1.0, 2.0), {}, torch.bfloat16, False),
        # What is not finite in both.
        (one(1.0, -INFINITE), one(1.0, -INFINITE), torch.float32, True),
        (one(1.0, math.nan), one(1.0, math.nan), 0.5, False),
        (one(1.0, math.nan), one(1.0, math.nan), math.inf, False),
        ({"x": None}, {"x": None}, torch.float32, True),
        ({"x": EMPTY}, {"x": EMPTY}, torch.float32, True),
        # A tensor that is almost zero has the rounding errors of the others.
        ({"x": ZERO}, {"x": ALMOST}, torch.float32, False),
        ({"x": ZERO, "y": LARGE}, {"x": ALMOST, "y": LARGE}, torch.float32, True),
    ],
)
def test_outputs_that_are_the_same(expected, found, tolerance, is_same):
    assert bool(same(expected, found, tolerance)) == is_same


def test_the_coarsest_dtype_of_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert coarsest_dtype(model) == torch.bfloat16
    assert coarsest_dtype(model[0]) == torch.float32
    assert coarsest_dtype(nn.ReLU()) == torch.float32
