"""Adapters learn in reversible layers, on a frozen backbone, as anywhere else."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import ReformerConfig, ReformerForSequenceClassification

import adapterhub as ah
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import read
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.runs import Notes

METHODS_INSIDE = ("lora", "dora", "pfeiffer", "houlsby", "compacter", "ia3", "bitfit", "norms",
                  "freeze", "unfreeze", "full", "chosen")  # fmt: skip
LABELS = torch.tensor([0, 1, 0])


def reformer(*kinds, **options):
    """Build a tiny Reformer that takes texts of any length in evaluation mode."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 120, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8,
        "feed_forward_size": 24, "axial_pos_embds": False, "local_attn_chunk_length": 3,
        "lsh_attn_chunk_length": 3, "hidden_dropout_prob": options.pop("dropout", 0.0),
        "local_attention_probs_dropout_prob": 0.0, "num_buckets": 4, "hash_seed": 1,
        "pad_token_id": 0, "num_labels": 2,
    }  # fmt: skip
    config = ReformerConfig(attn_layers=list(kinds), **sizes, **options)
    return ReformerForSequenceClassification(config).eval()


def loss_of(model):
    return model(**tiny_models.batch(), labels=LABELS).loss


@pytest.mark.parametrize("method", METHODS_INSIDE)
def test_all_that_is_trained_gets_a_gradient(method):
    model = reformer("local", "lsh")
    adapter = ah.attach(model, METHODS[method].example())
    tiny_models.scramble(adapter, std=0.05)
    adapter.train_mode()
    loss_of(model).backward()
    without = [n for n, p in adapter.tensors().items() if p.grad is None or not p.grad.any()]
    # Positions are looked up for as many tokens as there are; padding has no row that trains.
    assert not without


@pytest.mark.parametrize("method", ["lora", "pfeiffer", "ia3", "norms"])
def test_the_gradient_is_that_of_the_loss(method):
    model = reformer("local", "local").reformer
    adapter = ah.attach(model, METHODS[method].example())
    tiny_models.scramble(adapter)
    adapter.train_mode()
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(3, 9, 32, generator=generator).double()

    def loss():
        return (model(**tiny_models.batch()).last_hidden_state.double() * weights).sum()

    loss().backward()
    for parameter in adapter.parameters():
        direction = torch.randn(parameter.shape, generator=generator).to(parameter)
        expected = (parameter.grad * direction).sum().item()
        values = []
        for step in (3e-4, -3e-4):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                values.append(loss().item())
                parameter.sub_(direction, alpha=step)
        assert (values[0] - values[1]) / 6e-4 == pytest.approx(expected, rel=0.01, abs=0.05)


@pytest.mark.parametrize("method", ["lora(layers=top 1)", "head"])
def test_a_run_trains_every_tensor(method, backbone, data, tmp_path):
    folder = tmp_path / "reformer"
    model = reformer("local", "lsh", max_position_embeddings=64)
    model.reformer.save_pretrained(folder)
    for file in backbone.glob("*token*"):
        shutil.copy(file, folder)
    files = {"train": str(data[0]), "eval": str(data[1])}
    words = [f"method={method}", "train.max_steps=8", "train.frozen_cache=memory"]
    trained = []
    for rate in (1e-6, 1e-2):
        flags = {"backbone": str(folder), "output": str(tmp_path / f"{rate}"), "data": files}
        few = [*words, "train.tensorboard=false", f"train.learning_rate={rate}"]
        outcome = run(read(None, few, flags), notes := Notes())
        assert notes.about("frozen_cache=memory has no effect")
        trained.append(load_file(outcome.folder / "adapter.safetensors"))
    little, much = trained
    assert little
    assert not [name for name in little if torch.allclose(little[name], much[name], atol=1e-6)]


def test_a_copied_model_learns_too_and_detached_it_is_as_before():
    model = reformer("local", "lsh")
    for name, method in (("a", "lora"), ("b", "pfeiffer")):
        ah.attach(model, method, name=name)
    assert len(model.reformer.encoder._forward_pre_hooks) == 1
    other = copy.deepcopy(model)
    ah.detach(model)
    assert not model.reformer.encoder._forward_pre_hooks
    adapter = ah.adapters(other)["b"]
    adapter.train_mode()
    loss_of(other).backward()
    assert all(p.grad is not None for p in adapter.parameters())


def test_a_frozen_backbone_has_no_dropout():
    model = reformer("local", "lsh", dropout=0.5).reformer
    with torch.no_grad():
        expected = model(**tiny_models.batch()).last_hidden_state
    adapter = ah.attach(model, "lora")
    adapter.train_mode()
    states = model(**tiny_models.batch()).last_hidden_state
    assert states.requires_grad
    assert torch.equal(states.detach(), expected)
