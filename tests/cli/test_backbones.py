"""`adapterhub backbones`, and what is chosen where none is named."""

import json

import pytest

from adapterhub.backbones import find
from adapterhub.backbones.find import GOOD, default_backbone
from adapterhub.backbones.task_models import TASK_MODELS
from tests.kit import tiny_models

MINILM, SMOLLM = GOOD[0].id, "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub's cache; the function adds a model of one weight file to it."""
    monkeypatch.setattr(find.constants, "HF_HUB_CACHE", str(tmp_path))

    def add(name, architecture, size=100):
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / "model.safetensors").write_bytes(bytes(size))

    return add


def test_a_good_one_that_is_here_is_chosen_else_the_smallest(cache):
    assert {default_backbone(task)[0] for task in TASK_MODELS} <= {each.id for each in GOOD}
    assert default_backbone("causal-lm") == (SMOLLM, "Hub")
    cache("acme/big", "LlamaForCausalLM", 500)
    cache("acme/small", "GPT2LMHeadModel", 100)
    cache("acme/encoder", "BertForMaskedLM", 1)
    assert default_backbone("causal-lm") == ("acme/small", "Hub cache")
    cache(SMOLLM, "LlamaForCausalLM", 900)
    assert default_backbone("causal-lm") == (SMOLLM, "Hub cache")
    assert default_backbone("tagging")[0] == MINILM


@pytest.mark.parametrize("architecture", sorted(tiny_models.MATRIX))
def test_the_kind_of_a_checkpoint_is_found(architecture, cache, backbones):
    model = tiny_models.model(architecture, task="features").config
    assert find._kind({"architectures": [f"{type(model).__name__[:-6]}Model"]}) != ""


def test_what_cannot_be_read_is_not_listed(cache, tmp_path):
    texts = ("", "[]", "{", '{"architectures": 3}', '{"architectures": [[]]}')
    for number, text in enumerate(texts):
        cache(f"acme/m{number}", "x")
        (tmp_path / f"models--acme--m{number}/snapshots/0123/config.json").write_text(text)
    assert [e for e in find.found_backbones() if e.id.startswith("acme")] == []


def test_the_command_lists_what_is_here_and_what_is_good(cache, adapterhub):
    cache("acme/chat", "LlamaForCausalLM", 2048)
    _, shown, _ = adapterhub("backbones")
    assert "acme/chat" in shown
    assert "2.0 kB" in shown
    assert all(each.id in shown for each in GOOD)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    data = json.loads(adapterhub("backbones", "--json")[1])
    found = {"id": "acme/chat", "kind": "language model", "bytes": 2048, "place": "Hub cache"}
    assert found in data["here"]
