"""trl's trainers run on an attached model, with no argument that tells them of it (`make trl`)."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from datasets import Dataset
from matrix import REFUSED, example

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.methods import METHODS

trl = pytest.importorskip("trl", reason="its own environment: make trl")
# trl uses names that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")

STEPS = 12
OPTIONS = {
    "max_steps": STEPS, "per_device_train_batch_size": 6, "learning_rate": 1e-2, "logging_steps": 1,
    "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    "use_cpu": True, "bf16": False, "dataloader_pin_memory": False,
}  # fmt: skip
# `head` needs a task head.
CAUSAL = [m for m in sorted(METHODS) if m != "head" and (m, "llama") not in REFUSED]
DPO = ("lora", "pfeiffer", "prefix", "prompt", "full")


@pytest.fixture
def loaded(backbones):
    """A tiny Llama from its folder, with its tokenizer, as a user has it."""
    return ah.load_backbone(str(backbones("llama")), task="causal-lm")


def pairs():
    """A prompt, the completion that is wanted, and the one that is not."""
    things = ("movie", "film", "plot", "actor", "scene", "end")
    return [(f"the {thing} was", " very good", " awful") for thing in things]


def logits(model):
    with torch.no_grad():
        return model(**tiny_models.batch()).logits


def frozen_bytes(model, adapter):
    """Every tensor of the model that is not the adapter's."""
    own = {id(t) for t in adapter.tensors().values()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().clone() for name, t in named if id(t) not in own}


def train(trainer, model, adapter):
    """Trains, checks that only the adapter moved, and returns the losses."""
    base = frozen_bytes(model, adapter)
    before = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    trainer.train()
    after = frozen_bytes(model, adapter)
    assert base.keys() == after.keys()
    assert len(base) > 10 or not adapter.placed
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    for name, tensor in adapter.tensors().items():
        moved = not torch.equal(tensor, before[name])
        assert moved == isinstance(tensor, torch.nn.Parameter), name
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS
    assert all(torch.isfinite(torch.tensor(losses)))
    return losses


@pytest.mark.parametrize("method", CAUSAL)
def test_sft(method, loaded, tmp_path):
    model, tokenizer = loaded
    adapter = ah.attach(model, example(method))
    rows = Dataset.from_list([{"prompt": p, "completion": good} for p, good, _ in pairs()])
    arguments = trl.SFTConfig(tmp_path, **OPTIONS)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    losses = train(trainer, model, adapter)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert trainer.model is model
    trained = logits(model)
    adapter.save(tmp_path / "adapter")
    adapter.detach()
    ah.load(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), trained, atol=1e-5, rtol=1e-5)


def preferences(folder, model, tokenizer, **more):
    rows = [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in pairs()]
    arguments = trl.DPOConfig(folder, **OPTIONS)
    return trl.DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("method", DPO)
def test_dpo_prefers_to_the_bare_backbone(method, loaded, tmp_path):
    """trl loads its reference from the backbone's own folder: it is the backbone as it was before
    any adapter, and training does not move it."""
    model, tokenizer = loaded
    bare = logits(model)
    adapter = ah.attach(model, example(method))
    trainer = preferences(tmp_path, model, tokenizer)
    reference = trainer.ref_model
    assert reference is not model
    assert find_state(reference) is None
    assert torch.equal(logits(reference), bare)
    losses = train(trainer, model, adapter)
    if METHODS[method].start == "identity":
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # log 2: policy and reference agree
    assert losses[-1] < losses[0]
    assert torch.equal(logits(reference), bare)
    assert not torch.allclose(logits(model), bare, atol=1e-3)


@pytest.mark.parametrize("method", DPO)
def test_dpo_prefers_to_a_trained_adapter_by_a_copy_of_the_model(method, loaded, tmp_path):
    """Where an adapter was trained before (SFT), the reference is a copy of the model with it."""
    model, tokenizer = loaded
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    start, reference = logits(model), copy.deepcopy(model)
    trainer = preferences(tmp_path, model, tokenizer, ref_model=reference)
    assert torch.equal(logits(reference), start)
    losses = train(trainer, model, adapter)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < losses[0]
    assert torch.equal(logits(reference), start)
    assert not torch.allclose(logits(model), start, atol=1e-3)
