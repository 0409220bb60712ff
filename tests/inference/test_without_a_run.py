"""Adapters that were attached in Python and saved without a run: commands know their model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forge import forge

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.probe import probe
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import ConfigError
from adapterhub.inference.open import open_adapter
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import CASES

OF_KIND = {parse_task(case.task).head: case for case in reversed(CASES.values())}
OF_KIND["features"] = OF_KIND["embedding"]
KINDS = sorted(TASK_MODELS.keys() - {"text-to-image"})  # see test_text_to_image.py
HEADLESS = [kind for kind in KINDS if not TASK_MODELS[kind].has_head]


@pytest.fixture
def saved(backbones: Any, tmp_path: Path) -> Any:
    """Return a function that saves an adapter of a kind of model, in a loop of the user's own."""

    def save(kind: str, *, records_task: bool = True) -> tuple[Any, Path, Path]:
        place = backbones(OF_KIND[kind].backbone)
        labels = ["neg", "pos"] if TASK_MODELS[kind].classes else ()
        model, _ = ah.load_backbone(str(place), task=kind, labels=labels, dtype="fp32")
        adapter = ah.attach(model, "lora", name="mine")
        tiny_models.scramble(adapter)
        adapter.save(tmp_path / "mine")
        if not records_task:
            forge(tmp_path / "mine", lambda tree: tree.update(task=None))
        return model, tmp_path / "mine", place

    return save


def loaded(out: Path, kind: str, model: Any) -> Any:
    """Load a merged model with transformers alone; check that it computes the same as the model."""
    expected = probe(model)
    auto = getattr(transformers, TASK_MODELS[kind].auto_name(type(model.config)))
    merged = auto.from_pretrained(out).eval()
    assert type(merged) is type(model)
    if (processor := Backbone.of(model).processor) is not None:
        Backbone.of(merged).processor = processor
    if kind == "embedding":  # the pooler that nothing reads is not in the checkpoint
        merged.pooler = None
        expected.pop("pooler_output", None)
    for name, value in probe(merged).items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-4)
    return merged


@long_table("kind", KINDS, 3)
def test_merge_writes_a_model_of_the_same_class_and_predict_needs_no_flag(
    kind, saved, adapterhub, tmp_path
):
    model, folder, place = saved(kind)
    case, out = OF_KIND[kind], tmp_path / "merged"
    asked = case.asked(case.data(tmp_path))
    assert succeeded(adapterhub("predict", folder, *asked, "--backbone", place)).strip()
    succeeded(adapterhub("merge", folder, "--output", out, "--backbone", place))
    loaded(out, kind, model)


@pytest.mark.parametrize("kind", HEADLESS)
def test_a_file_without_a_task_asks_for_it(kind, saved, adapterhub, tmp_path):
    """Files of older versions: heads tell their kind, models without a head do not."""
    model, folder, place = saved(kind, records_task=False)
    case = OF_KIND[kind]
    data = case.data(tmp_path)
    asked = case.asked(data)
    commands = {
        "merge": ("merge", folder, "--output", tmp_path / "merged"),
        "predict": ("predict", folder, *asked),
        "eval": ("eval", folder, "--data", data),
        "export": ("export", folder, "--output", tmp_path / "exported"),
    }
    for words in commands.values():
        refused(adapterhub(*words, "--backbone", place), "--task")
        assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigError, match="does not record"):
        open_adapter(folder, str(place))
    task = {"features": "embedding"}.get(kind, kind)
    for name in ("merge", "predict"):
        succeeded(adapterhub(*commands[name], "--backbone", place, "--task", task))
    if kind not in ("features", "embedding"):
        auto = getattr(transformers, TASK_MODELS[kind].auto_name(type(model.config)))
        assert type(auto.from_pretrained(tmp_path / "merged")) is type(model)


def test_another_kind_than_the_recorded_one_is_refused(saved, adapterhub, tmp_path):
    _, folder, place = saved("causal-lm")
    other, out = ("--backbone", place, "--task", "classification"), ("--output", tmp_path / "out")
    for command, words in (("merge", out), ("predict", ("text",)), ("export", out)):
        says = "was trained on a model for causal-lm, not for classification"
        refused(adapterhub(command, folder, *words, *other), says)
        assert not (tmp_path / "out").exists()


NEW = ("<a>", "<b>")
OF_TEXT = ("causal-lm", "masked-lm", "seq2seq", "embedding")
# A method, options of the backbone, and the kinds of models.
CHANGES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "tokens in spare rows": ("lora", {"new_tokens": NEW}, OF_TEXT),
    "tokens beyond": ("lora", {"new_tokens": (*(f"<n{i}>" for i in range(60)), *NEW)}, OF_TEXT),
    "every weight": ("full", {}, tuple(KINDS)),
    "the embedding": ("staged(groups=[embeddings])", {}, ("causal-lm", "seq2seq")),
    "biases": ("bitfit", {}, ("classification", "embedding", "masked-lm", "tagging")),
    "a prompt": ("prompt", {}, ("causal-lm", "classification", "embedding")),
    "mean": ("lora", {"pooling": "mean"}, ("classification", "regression", "multi-label")),
}
CELLS = [(name, kind) for name, (*_, kinds) in CHANGES.items() for kind in kinds]


@long_table(("name", "kind"), CELLS, parts=5, nightly=2)
def test_what_changes_more_than_a_weight_is_merged_or_refused(
    name, kind, backbones, adapterhub, tmp_path
):
    place, (method, options, _) = backbones(OF_KIND[kind].backbone), CHANGES[name]
    labels = ["neg", "pos"] if TASK_MODELS[kind].classes else ()
    model, tokenizer = ah.load_backbone(str(place), task=kind, labels=labels, **options)
    adapter = ah.attach(model, method, tokenizer=tokenizer if "tokens" in name else None)
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "mine")
    out = tmp_path / "merged"
    code, text, err = adapterhub("merge", tmp_path / "mine", "--output", out, "--backbone", place)
    if name == "a prompt":
        assert code == 2
        assert "not a change of weights" in err
        assert not out.exists()
        return
    assert code == 0, err
    if "SentenceTransformer(" in text:
        return  # compared by test_sentence_encoder.py
    merged = loaded(out, kind, model)
    if "tokens" in name:
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert len(tokenizer.tokenize("<a> <b>")) == 2
        ids = tokenizer("the <a> movie <b>", return_tensors="pt")["input_ids"]
        of_decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            found, right = (m(input_ids=ids, **of_decoder)[0] for m in (merged, model.eval()))
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
