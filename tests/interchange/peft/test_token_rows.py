"""Embeddings that peft trained, whole or in rows, on tied and untied models."""

import itertools

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import backbone_fingerprint
from adapterhub.errors import AdapterhubError, MismatchError
from tests.kit import tiny_models
from tests.kit.peers import compare_import, edit, linear_names, lora_config, outputs, trained
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

IDS = [7, 3, 60]  # among the ids of the batch and not; not in order


def task_of(architecture):
    return "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"


def options(architecture, case):
    """Return the options of a configuration, in terms of the model's embedding and output."""
    model = tiny_models.model(architecture, task_of(architecture), tie_word_embeddings=True)
    paths = {id(m): n for n, m in reversed(list(model.named_modules()))}
    embedding = paths[id(model.get_input_embeddings())]
    output = paths[id(model.get_output_embeddings())]
    sites = ah.anatomy_of(model).sites.values()
    layer = next(site.host for site in sites if site.kind == "linear" and not site.part)
    return {
        "embedding": {"target_modules": [layer], "modules_to_save": [embedding]},
        "output": {"target_modules": [layer], "modules_to_save": [output]},
        "both": {"target_modules": [layer], "modules_to_save": [embedding, output]},
        "rows": {"target_modules": [layer], "trainable_token_indices": IDS},
        "rows of both": {
            "target_modules": [layer],
            "trainable_token_indices": {embedding: IDS, output: [5]},
        },
        "rows, output adapted": {
            "target_modules": [layer, output],
            "trainable_token_indices": IDS,
            "init_lora_weights": "pissa",
        },
    }[case]


KINDS = ("embedding", "output", "both", "rows", "rows of both", "rows, output adapted")
CASES = [*(("gpt2", kind) for kind in KINDS), ("gemma3_text", "rows"), ("t5", "rows"),
         ("bart", "both")]  # fmt: skip


@long_table(("architecture", "kind"), CASES, 2)
def test_embeddings(tmp_path, architecture, kind):
    task = task_of(architecture)
    config = lora_config(task, **options(architecture, kind))
    model = {"tie_word_embeddings": True}
    adapter = compare_import(tmp_path, architecture, config, task, atol=3e-4, std=0.05, **model)
    # Untied copies do not change what the backbone is.
    bare = tiny_models.model(architecture, task, **model)
    assert backbone_fingerprint(adapter.model) == backbone_fingerprint(bare)
    adapter.export(tmp_path / "back")
    theirs = peft.PeftModel.from_pretrained(bare, tmp_path / "back")
    expected = outputs(adapter.model, task)
    torch.testing.assert_close(outputs(theirs, task), expected, atol=3e-4, rtol=1e-5)


def test_an_untied_embedding_is_replaced_alone(tmp_path):
    tied = {"tie_word_embeddings": True}
    config = lora_config("causal-lm", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    folder = trained(tmp_path, "llama", config, "causal-lm", **tied)
    model = tiny_models.model("llama", "causal-lm", **tied)
    table = model.get_output_embeddings().weight
    adapter = ah.load(model, folder)
    (chosen,) = (m for m in adapter.methods if m.name == "chosen")
    assert (chosen.names, chosen.untied) == (("backbone.embed_tokens.weight",), True)
    assert model.get_output_embeddings().weight is table
    assert model.get_input_embeddings().weight is not table
    adapter.detach()
    assert model.get_input_embeddings().weight is table


def test_rows_of_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    config = lora_config("causal-lm", target_modules=["q_proj"], trainable_token_indices=[5, 6])
    folder = trained(tmp_path, "llama", config, "causal-lm")
    edit(folder, trainable_token_indices=[5, 64])
    with pytest.raises(MismatchError, match=r"resize_token_embeddings\(65\)"):
        ah.load(tiny_models.model("llama", "causal-lm"), folder)
    edit(folder, trainable_token_indices=[5])
    with pytest.raises(MismatchError, match=r"\(2, 32\) values for 1 tokens"):
        ah.load(tiny_models.model("llama", "causal-lm"), folder)
    edit(folder, trainable_token_indices={"wte": [5, 6]})
    with pytest.raises(MismatchError, match="no tokens of it"):
        ah.load(tiny_models.model("llama", "causal-lm"), folder)


# Checkpoints of models that got new tokens: peft saves the resized tables with them.


NEW = [64, 65, 66]
WAYS = {
    "attention only": lambda embedding: {},
    "rows": lambda embedding: {"trainable_token_indices": NEW},
    "embedding": lambda embedding: {"modules_to_save": [embedding]},
    "both": lambda embedding: {"modules_to_save": [embedding, "lm_head"]},
    "adapted": lambda embedding: {"target_modules": [embedding, "lm_head"]},
}
# After resizing, the stacks of an encoder-decoder have the same embedding module, of which peft
# replaces one place.
ONE_MODULE = {("t5", way) for way in ("embedding", "both", "adapted")}


@pytest.fixture
def resized(architecture, tmp_path):
    """Return the task of an architecture, and a function that loads its checkpoint, resized."""
    task = task_of(architecture)
    backbone = tiny_models.model(architecture, task, tie_word_embeddings=True)
    backbone.save_pretrained(tmp_path / "backbone")

    def load(seed):
        model = type(backbone).from_pretrained(tmp_path / "backbone").eval()
        torch.manual_seed(seed)  # of the new rows
        model.resize_token_embeddings(67, mean_resizing=False)
        return model

    return task, load


def new_logits(model, task):
    inputs = tiny_models.batch()
    inputs["input_ids"][:, 2:4] = torch.tensor(NEW[:2])
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        return model.eval()(**inputs).logits


@long_table(("architecture", "way"), list(itertools.product(("gpt2", "t5"), WAYS)), 2)
def test_new_tokens(architecture, way, resized, tmp_path):
    task, load = resized
    model = load(seed=0)
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    config = lora_config(task, **{"target_modules": linear_names(model)[:1]} | WAYS[way](embedding))
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for _, parameter in sorted(theirs.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    theirs.save_pretrained(tmp_path / "theirs")
    if (architecture, way) in ONE_MODULE:
        with pytest.raises(MismatchError, match="the same module as"):
            ah.load(load(seed=1), tmp_path / "theirs", any_backbone=True)
        return
    expected = new_logits(peft.PeftModel.from_pretrained(load(seed=1), tmp_path / "theirs"), task)
    ours = load(seed=1)
    adapter = ah.load(ours, tmp_path / "theirs", any_backbone=True)
    torch.testing.assert_close(new_logits(ours, task), expected, atol=5e-5, rtol=1e-5)
    adapter.save(tmp_path / "ours")
    again = load(seed=2)
    ah.load(again, tmp_path / "ours")
    assert torch.equal(new_logits(again, task), new_logits(ours, task))


def test_a_model_without_the_new_rows_is_refused(tmp_path):
    config = lora_config("causal-lm", target_modules=["c_attn"], modules_to_save=["wte"])
    model = tiny_models.model("gpt2", "causal-lm")
    model.resize_token_embeddings(67, mean_resizing=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(AdapterhubError, match=r"shape \(67, 32\)"):
        ah.load(tiny_models.model("gpt2", "causal-lm"), tmp_path)
