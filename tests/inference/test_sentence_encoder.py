"""Vectors of texts: by several adapters in a batch, and by merged models with a pooling."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import adapterhub as ah
from adapterhub.backbones.pooling import POOLS, trained_pooling
from adapterhub.errors import AdapterhubError, MergeError
from adapterhub.inference.merged_checkpoint import take_pooling
from adapterhub.inference.open import open_adapter
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.server import write_adapter
from tests.kit.session import succeeded
from tests.kit.task_cases import partners


def test_adapters_of_two_domains_in_one_batch(backbone):
    model, tokenizer = ah.load_backbone(str(backbone), task="embedding")
    for seed, name in enumerate(("law", "code")):
        tiny_models.scramble(ah.attach(model, "lora", name=name), seed=seed)
    texts = ["the movie was good", "a plot", "the end", "very bad"]
    names = ["law", "code", None, "law"]
    routed = ah.embed(model, tokenizer, texts, adapters=names, normalize=False)
    for index, name in enumerate(names):
        way = ah.disabled(model) if name is None else ah.route(model, [name])
        with way:
            alone = ah.embed(model, tokenizer, [texts[index]], normalize=False)[0]
        assert np.abs(routed[index] - alone).max() < 1e-5
    assert np.abs(routed[0] - ah.embed(model, tokenizer, texts[:1], normalize=False)[0]).max() > 0.1
    for options, said in (
        ({"pooling": "model"}, "pooling"),
        ({"adapters": ["law", "code"]}, "2 adapters for 1 texts"),
        ({"adapters": ["nothing"]}, "nothing"),
    ):
        with pytest.raises(AdapterhubError, match=said):
            ah.embed(model, tokenizer, ["a"], **options)


# A merged model whose head pools is written as a sentence-transformers model.

TEXTS = ["the movie was good", "the plot was very bad and the end was worse"]


@pytest.mark.parametrize("how", POOLS)
def test_the_folder_has_the_logits_of_the_adapter(adapterhub, backbone, tmp_path, how):
    folder = write_adapter(backbone, tmp_path / "adapter", ["lora", "norms"], pooling=how)
    out = tmp_path / "merged"
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


def test_without_its_pooling_an_adapter_can_be_merged_unless_its_head_has_several_layers():
    roberta = ah.attach(tiny_models.model("roberta"), "lora", pooling="mean")
    with pytest.raises(MergeError, match="one linear layer"):
        take_pooling(roberta)
    assert roberta.pooling is not None
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
