"""A merged model whose head pools is written as a sentence-transformers model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import adapterhub as ah
from adapterhub.backbones.pooling import POOLS, trained_pooling
from adapterhub.errors import MergeError
from adapterhub.inference.merged_checkpoint import take_pooling
from adapterhub.inference.open import open_adapter
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.server import write_adapter
from tests.kit.session import succeeded
from tests.kit.task_cases import partners

TEXTS = ["the movie was good", "the plot was very bad and the end was worse"]


@pytest.fixture
def saved(backbone: Path, tmp_path: Path):
    """Make the folder of an adapter of the tiny backbone whose head pools."""
    methods = ["lora", "norms"]
    return lambda how: write_adapter(backbone, tmp_path / "adapter", methods, pooling=how)


@pytest.mark.parametrize("how", POOLS)
def test_the_folder_has_the_logits_of_the_adapter(saved, adapterhub, backbone, tmp_path, how):
    folder, out = saved(how), tmp_path / "merged"
    succeeded(
        adapterhub("merge", folder, "--output", out, "--backbone", backbone),
        f"SentenceTransformer({str(out)!r})",
        "logits: neg, pos",
    )
    live = open_adapter(folder, str(backbone))
    rows = live.setting.tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = live.model(**rows).logits
        rows = AutoTokenizer.from_pretrained(out)(TEXTS, return_tensors="pt", padding=True)
        states = AutoModel.from_pretrained(out)(**rows).last_hidden_state
    dense = load_file(out / "2_Dense" / "model.safetensors")
    vectors = POOLS[how](states, rows["attention_mask"].bool())
    logits = vectors @ dense["linear.weight"].T + dense["linear.bias"]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert trained_pooling(out) == how
    modules = json.loads((out / "modules.json").read_text(encoding="utf-8"))
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Dense"]
    if how == "mean":
        library = pytest.importorskip("sentence_transformers")
        encoded = library.SentenceTransformer(str(out), device="cpu").encode(TEXTS)
        torch.testing.assert_close(torch.tensor(encoded), expected, atol=1e-5, rtol=1e-5)


def test_a_head_of_several_layers_is_refused() -> None:
    model = tiny_models.model("roberta")
    adapter = ah.attach(model, "lora", pooling="mean")
    with pytest.raises(MergeError, match="one linear layer") as error:
        take_pooling(adapter)
    assert "RobertaClassificationHead" in str(error.value)
    assert adapter.pooling is not None


def test_without_its_pooling_an_adapter_can_be_merged() -> None:
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora", pooling="mean")
    tiny_models.scramble(adapter)
    with pytest.raises(MergeError, match="does not pool"):
        ah.merge(model)
    assert take_pooling(adapter).how == "mean"
    assert adapter.active
    assert "adapterhub" not in model._modules
    ah.merge(model)


@pytest.mark.parametrize("task", [
    "embedding", "embedding(pooling=max, normalize=false)",
    "embedding(pooling=cls, query_prefix='query: ')",
])  # fmt: skip
def test_vectors_of_a_merged_run_are_those_of_embed(task, adapterhub, backbone, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    run, out = tmp_path / "run", tmp_path / "merged"
    backbone = Path(shutil.copytree(backbone, tmp_path / "sentences"))
    trained = {"max_seq_length": 6}  # shorter than a text
    (backbone / "sentence_bert_config.json").write_text(json.dumps(trained), encoding="utf-8")
    data = partners(tmp_path)
    code, _, err = adapterhub(
        "train", "--backbone", backbone, "--task", task, "--train", data, "--output", run,
        "--method", "lora", "train.max_steps=4", "train.learning_rate=1e-2", "train.report=false",
        "train.tensorboard=false", "--quiet",
    )  # fmt: skip
    assert code == 0, err
    text = succeeded(adapterhub("merge", run, "--output", out))
    assert text.endswith("# vectors\n")
    spec = parse_task(task)
    model, tokenizer = ah.load_backbone(str(backbone), task="embedding")
    ah.load(model, run / "adapter")
    expected = torch.from_numpy(
        ah.embed(model, tokenizer, TEXTS, pooling=spec.pooling, normalize=spec.normalize,
                 prefix=spec.query_prefix)
    )  # fmt: skip
    merged = library.SentenceTransformer(str(out), device="cpu")
    how = {"prompt_name": "query"} if spec.query_prefix else {}
    found = torch.tensor(merged.encode(TEXTS, **how))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    states = AutoModel.from_pretrained(out)
    assert type(states) is type(model)
