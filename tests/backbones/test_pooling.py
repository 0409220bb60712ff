"""The pooling and the length that sentence-transformers recorded for a backbone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.pooling import trained_length, trained_pooling
from tests.kit import tiny_models

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
