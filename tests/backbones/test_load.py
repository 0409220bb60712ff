"""Loading a backbone with the head of a task, its pooling, and the timing of its kernels."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.utils import set_seed
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones import task_models
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.layer_timing import EAGER, SDPA, Kernels, LayerShape, _Layer
from adapterhub.backbones.load import meta_model
from adapterhub.backbones.pooling import trained_length, trained_pooling
from adapterhub.backbones.task_models import task_model
from adapterhub.errors import BackboneError, ConfigError
from adapterhub.status import quiet_loading
from tests.kit import tiny_models
from tests.kit.selection import long_table


def test_the_model_is_ready_for_inference(backbone):
    model, tokenizer = ah.load_backbone(str(backbone), task="classification", labels=["no", "yes"])
    assert not model.training
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config._name_or_path == str(backbone)
    assert "good" in tokenizer.get_vocab()
    reference = transformers.AutoModel.from_pretrained(backbone).state_dict()
    assert all(torch.equal(value, reference[k]) for k, value in model.bert.state_dict().items()
               if not k.startswith("pooler"))  # fmt: skip
    # A new head, nothing of a complete checkpoint; of other models nothing is known.
    assert Backbone.of(model).fresh == {"classifier.weight", "classifier.bias"}
    for complete in (ah.load_backbone(str(backbone))[0], tiny_models.model("bert")):
        assert Backbone.of(complete).fresh == frozenset()


def test_a_missing_padding_token_is_replaced_by_eos(backbones, tmp_path):
    folder = shutil.copytree(backbones("gpt2"), tmp_path / "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    transformers.GPT2Config.from_pretrained(folder, pad_token_id=None).save_pretrained(folder)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model, loaded = ah.load_backbone(str(folder), task="causal-lm", dtype=name)
        assert loaded.pad_token == loaded.eos_token
        assert model.config.pad_token_id == loaded.eos_token_id
        assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("options", "kind", "problem"),
    [
        ({"task": "clasification"}, ConfigError, r"unknown task .*did you mean 'classification'"),
        ({"dtype": "fp23"}, ConfigError, r"unknown dtype 'fp23'.*did you mean 'fp32'"),
        ({"task": "tagging", "labels": ["a"]}, ConfigError, "two or more different labels"),
        ({"task": "seq2seq"}, BackboneError, "has no model for seq2seq"),
    ],
)
def test_options_that_a_backbone_lacks_are_refused(options, kind, problem, backbone):
    with pytest.raises(kind, match=problem) as error:
        ah.load_backbone(str(backbone), **options)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("config", ["[]", "{", "{}", '{"quantization_config": []}'])
def test_a_broken_configuration_is_refused(config, backbone, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(backbone, folder)
    (folder / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(BackboneError, match="cannot be loaded by AutoModel"):
        ah.load_backbone(str(folder))


def test_a_meta_model_has_the_modules_and_no_memory(backbone):
    options = {"task": "classification", "labels": ["no", "yes"]}
    model = meta_model(str(backbone), **options)
    loaded, _ = ah.load_backbone(str(backbone), **options)
    assert all(p.is_meta for p in model.parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in loaded.named_parameters()
    }
    assert ah.anatomy_of(model).sites == ah.anatomy_of(loaded).sites


KINDS = ("classification", "tagging", "multiple-choice")


@long_table(("architecture", "kind"), list(itertools.product(tiny_models.MATRIX, KINDS)), 4)
def test_a_head_is_drawn_as_loading_draws_it(architecture: str, kind: str, tmp_path: Path) -> None:
    base = tiny_models.model(architecture, "features")
    if not task_model(kind).classes_for(base.config):
        pytest.skip(f"{architecture} has no model for {kind}")
    base.save_pretrained(tmp_path)
    auto = getattr(transformers, task_model(kind).auto)

    def load(seed: int) -> PreTrainedModel:
        set_seed(seed)
        with quiet_loading():
            model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        Backbone.of(model).fresh = frozenset(info["missing_keys"])
        return model  # type: ignore[no-any-return]

    model, expected = load(1), load(2)
    assert Backbone.of(model).fresh, "the kind has no new parameters: the test shows nothing"
    after = torch.get_rng_state()
    set_seed(2)
    Backbone.of(model).initialize_again()
    assert torch.equal(torch.get_rng_state(), after)
    drawn = model.state_dict()
    assert all(torch.equal(tensor, drawn[n]) for n, tensor in expected.state_dict().items())


# Kinds of task model.


READS = {
    "AutoTokenizer": "bert", "AutoImageProcessor": "vit", "AutoFeatureExtractor": "wav2vec2",
    "AutoProcessor": "speech-ctc", task_models.PICTURES_WITH_TEXT: "vlm-llava",
}  # fmt: skip


OTHER_BACKBONES = ("seq2seq", "causal-lm", "text-to-image")


@pytest.mark.parametrize("task", [t for t in task_models.TASK_MODELS if t not in OTHER_BACKBONES])
def test_a_loaded_model_has_the_kind_it_was_loaded_as(task, backbones):
    backbone = backbones(READS[task_models.TASK_MODELS[task].processor])
    labels = ["a", "b"] if task_models.TASK_MODELS[task].classes else []
    model, _ = ah.load_backbone(str(backbone), task=task, labels=labels)
    # Some kinds have one class; the number of outputs decides, or whether there is a pooler.
    assert task_models.task_kind(model) == task
    assert type(model) in task_models.task_model(task).classes_for(model.config)


def test_an_architecture_has_one_of_two_classes(backbones):
    kinds = {
        "speech-ctc": ("AutoModelForCTC", "Wav2Vec2ForCTC"),
        "speech-whisper": ("AutoModelForSpeechSeq2Seq", "WhisperForConditionalGeneration"),
    }
    row = task_models.task_model("speech-recognition")
    for name, (auto, class_name) in kinds.items():
        model, _ = ah.load_backbone(str(backbones(name)), task="speech-recognition")
        assert type(model).__name__ == class_name
        assert row.auto_name(type(model.config)) == auto
        assert task_models.task_kind(model) == "speech-recognition"
        if auto == "AutoModelForCTC":  # a mean without infinities
            assert (model.config.ctc_loss_reduction, model.config.ctc_zero_infinity) == (
                "mean", True)  # fmt: skip
        assert type(ah.load_backbone(str(backbones(name)))[0]).__name__ != class_name
    assert row.autos == ("AutoModelForCTC", "AutoModelForSpeechSeq2Seq")
    assert row.auto_name(type(tiny_models.model("bert").config)) == "AutoModelForCTC"


def test_the_configuration_of_the_text_is_all_of_it_or_a_part(backbones):
    llama = tiny_models.model("llama")
    assert task_models.text_config(llama) is llama.config
    llava, _ = ah.load_backbone(str(backbones("vlm-llava")), task="image-text-to-text")
    assert task_models.text_config(llava) is llava.config.text_config


def test_language_models_have_a_kind_and_a_class_of_no_kind_has_none():
    for architecture, task in (("llama", "causal-lm"), ("t5", "seq2seq")):
        assert task_models.task_kind(tiny_models.language_model(architecture)) == task
    config = tiny_models.model("bert").config
    assert task_models.task_kind(transformers.BertForNextSentencePrediction(config)) is None


def test_embeddings_have_no_pooler(backbone):
    """It is not read, so that nothing of it may train; classes without the option stay."""
    model, _ = ah.load_backbone(str(backbone), task="embedding")
    assert model.pooler is None
    assert ah.load_backbone(str(backbone))[0].pooler is not None
    assert task_models.task_model("embedding").init_options(tiny_models.model("llama").config) == {}


def test_without_labels_a_head_has_those_of_the_checkpoint(backbone):
    """An adapter that is loaded has its own: nobody needs to make labels up for it."""
    model, _ = ah.load_backbone(str(backbone), task="classification")
    assert list(model.config.id2label.values()) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert model.config.problem_type == "single_label_classification"
    assert "num_labels" not in task_models.label_options("tagging", [])


# The pooling and the length that sentence-transformers recorded for a backbone.


MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
FLAGS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "lasttoken": "last",
    "mean_sqrt_len_tokens": None,
    "weightedmean_tokens": None,
}


def write(folder: Path, config: object, path: object = "1_Pooling", kind: str = "Pooling") -> Path:
    """Write the files of sentence-transformers that record a pooling."""
    module = {"idx": 1, "path": path, "type": f"sentence_transformers.models.{kind}"}
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, module]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return folder


def of_older_versions(flag: str) -> dict[str, object]:
    return {f"pooling_mode_{name}": name == flag for name in FLAGS} | {
        "word_embedding_dimension": 384, "include_prompt": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *((of_older_versions(flag), expected) for flag, expected in FLAGS.items()),
        *(({"pooling_mode": mode}, mode) for mode in ("cls", "mean", "max")),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "median"}, None),
        # Several poolings, and broken records.
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": ["mean", "max"]}, None),
        *((broken, None) for broken in ({}, [], "not json", "[" * 100_000)),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_recorded_pooling(config: object, expected: str | None, tmp_path: Path) -> None:
    assert trained_pooling(write(tmp_path, config)) == expected


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "..", "", "a/b", 7, None])
def test_no_record_outside_the_folder_is_read(path: object, tmp_path: Path) -> None:
    inside = write(tmp_path / "inside", {"pooling_mode": "mean"}, path)
    write(tmp_path, {"pooling_mode": "mean"})
    assert trained_pooling(inside) is None


def test_a_folder_without_a_record_has_none(tmp_path: Path) -> None:
    assert trained_pooling(tmp_path) is None
    assert trained_pooling(write(tmp_path, {"pooling_mode": "mean"}, kind="Normalize")) is None


def load(folder: str | Path, **options: str) -> PreTrainedModel:
    """Load a classifier."""
    return ah.load_backbone(str(folder), task="classification", labels=["a", "b"], **options)[0]


def test_the_heads_of_a_sentence_encoder_read_what_it_was_trained_for() -> None:
    """Unless the user chooses; a task without a pooled head has none."""
    model = load(MINILM)
    assert Backbone.of(model).trained_pooling == "mean"
    assert ah.attach(model, "head").pooling.how == "mean"
    assert ah.attach(model, "head", name="b", pooling="max").pooling.how == "max"
    assert ah.attach(model, "head", name="c", pooling="model").pooling is None
    model = load(MINILM, pooling="cls")
    assert Backbone.of(model).pooling == "cls"
    assert ah.attach(model, "head").pooling.how == "cls"
    model, _ = ah.load_backbone(MINILM, task="tagging", labels=["a", "b"])
    assert ah.attach(model, "head").pooling is None


def test_a_pooling_that_the_class_has_anyway_adds_nothing(tmp_path: Path) -> None:
    folder, (packaged, _) = tmp_path / "roberta", find_backbone(MINILM)
    tiny_models.model("roberta").base_model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(packaged / name, folder)
    for mode, pooling in (("cls", None), ("mean", "mean")):
        write(folder, {"pooling_mode": mode})
        found = ah.attach(load(folder), "head").pooling
        assert (found and found.how) == pooling


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"max_seq_length": "9"}', "[" * 9999])
def test_a_length_is_recorded_or_none(text, tmp_path):
    assert trained_length(find_backbone(MINILM)[0]) == 256
    if text is not None:
        (tmp_path / "sentence_bert_config.json").write_text(text)
    assert trained_length(tmp_path) is None


# Timing a step of one layer with each dtype and attention implementation.


SHAPE = LayerShape(rows=2, tokens=8, width=16, inner=32, heads=2)
ALL = [Kernels(d, a) for d, a in itertools.product(("fp32", "bf16"), (SDPA, EAGER))]


def test_the_candidates_compute_the_same() -> None:
    outputs = {kernels: _Layer(SHAPE, kernels)._forward().float() for kernels in ALL}
    exact = outputs[Kernels("fp32", SDPA)]
    for kernels, output in outputs.items():
        tolerance = 1e-5 if kernels.dtype == "fp32" else 2e-2
        torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [64, 384, 1024, 4096, 12288])
@pytest.mark.parametrize("rows", [1, 32, 512])
def test_a_large_layer_is_scaled_down(width: int, rows: int) -> None:
    shape = LayerShape(rows, 128, width, 4 * width, width // 64)
    measured = shape.measured()
    assert measured.width <= 1024 or measured.heads % 2
    assert measured.work <= 7e9
    assert (measured.tokens, measured.width // measured.heads) == (128, 64)
