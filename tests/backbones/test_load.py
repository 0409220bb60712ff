"""Loading a backbone with the head of a task."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.utils import set_seed
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.load import meta_model
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


def test_a_missing_padding_token_is_replaced_by_eos(backbones):
    folder = backbones("gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is not None:
        tokenizer.pad_token = None
    model, loaded = ah.load_backbone(str(folder), task="causal-lm")
    assert loaded.pad_token is not None
    assert model.config.pad_token_id is not None


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_dtype_is_the_requested_one(name, dtype, backbone):
    model, _ = ah.load_backbone(str(backbone), dtype=name)
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
    with pytest.raises(kind, match=problem):
        ah.load_backbone(str(backbone), **options)


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


def test_the_settings_of_transformers_return_even_after_an_error():
    transformers.logging.enable_progress_bar()
    before = transformers.logging.get_verbosity()
    with quiet_loading():
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
        assert not transformers.logging.is_progress_bar_enabled()
    with pytest.raises(RuntimeError), quiet_loading():
        raise RuntimeError
    assert transformers.logging.get_verbosity() == before
    assert transformers.logging.is_progress_bar_enabled()


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
