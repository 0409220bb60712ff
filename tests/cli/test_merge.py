"""`adapterhub merge`: a plain checkpoint out of a run."""

import json

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import adapterhub as ah
from adapterhub.errors import OutputError
from adapterhub.inference.merged_checkpoint import write_checkpoint
from adapterhub.inference.open import open_adapter
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.server import write_adapter
from tests.kit.session import refused, succeeded

TEXTS = ["the movie was good", "the plot was very bad"]


@pytest.fixture
def saved(backbone, tmp_path):
    """Makes the folder of an adapter of the tiny backbone."""
    return lambda method=("lora", "norms"): write_adapter(
        backbone, tmp_path / "adapter", [*method] if isinstance(method, tuple) else method
    )


def test_merge_writes_a_checkpoint_that_needs_no_adapterhub(saved, adapterhub, backbone, tmp_path):
    out, folder = tmp_path / "new" / "merged", saved()
    text = succeeded(adapterhub("merge", folder, "--output", out, "--backbone", backbone))
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["merged", "reloaded"]
    assert text.count("max |difference|") == 2
    assert "AutoModelForSequenceClassification" in text
    live = open_adapter(folder, str(backbone))
    rows = live.setting.tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = live.model(**rows).logits
    model = AutoModelForSequenceClassification.from_pretrained(out)
    rows = AutoTokenizer.from_pretrained(out)(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(model(**rows).logits, expected, atol=1e-4, rtol=1e-4)
    assert not [name for name in model.state_dict() if "adapterhub" in name]
    assert "adapterhub" not in (out / "config.json").read_text(encoding="utf-8")
    assert model.config.use_cache
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["merged"]


def test_the_base_in_another_precision(saved, adapterhub, backbone, tmp_path):
    out = tmp_path / "merged"
    where = ("--output", out, "--backbone", backbone)
    text = succeeded(adapterhub("merge", saved(), *where, "--base-dtype", "fp16", "--json"))
    facts = json.loads(text)
    assert 0 < facts["merged"]["logits"] <= facts["tolerance"]["logits"]
    assert facts["loaded again"] == facts["merged"]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.dtype == torch.float16
    assert AutoTokenizer.from_pretrained(out)(TEXTS[0])["input_ids"]


def test_a_failed_merge_leaves_no_files(saved, adapterhub, backbone, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    where = ("--output", place / "out", "--backbone", backbone)
    arguments = ("merge", saved(), *where, "--base-dtype", "bf16")
    refused(adapterhub(*arguments, "--tolerance", "1e-9"), "max |difference|")
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise SafetensorError("No space left on device")

        patch.setattr(PreTrainedModel, "save_pretrained", full)
        refused(adapterhub(*arguments), "No space left")
    with monkeypatch.context() as patch:
        patch.setattr(
            "adapterhub.inference.merged_checkpoint._reloaded",
            lambda model, folder: AutoModelForSequenceClassification.from_config(model.config),
        )
        code, text, err = adapterhub(*arguments)
        assert code == 2
        assert "does not compute" in err
        assert "max |difference|" in text, "the difference is printed before anything is written"
    assert not list(place.iterdir())
    (place / "out").mkdir()
    (place / "out" / "mine.txt").write_text("mine")
    result = adapterhub(*arguments)
    refused(result, "already exists")
    assert "overwrite" not in result[2]
    assert [path.name for path in (place / "out").iterdir()] == ["mine.txt"]


def test_methods_that_cannot_be_merged_are_listed(saved, adapterhub, backbone, tmp_path):
    where = ("--output", tmp_path / "out", "--backbone", backbone)
    words = ("merge", saved("mam"), *where)
    refused(adapterhub(*words), "prefix at encoder.attn.kv", "scaled-parallel at encoder.ffn")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def merged():
    model = tiny_models.model("bert").eval()
    tiny_models.scramble(ah.attach(model, "lora"))
    return model, ah.merge(model).expected


@pytest.mark.parametrize("limit", [20, 500, 2000, 20_000, "the tokenizer"])
def test_a_full_disk_leaves_nothing(merged, tmp_path, limit, monkeypatch):
    """The system refuses bytes beyond a limit: of the model, or of the tokenizer alone."""
    resource = pytest.importorskip("resource")
    (model, expected), tokenizer = merged, word_tokenizer()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = model.save_pretrained

    def save_then_fill(folder):
        save(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))

    if limit == "the tokenizer":
        monkeypatch.setattr(model, "save_pretrained", save_then_fill)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_checkpoint(model, tokenizer, tmp_path / "out", expected)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
