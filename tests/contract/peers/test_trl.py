"""trl's trainers run on a model with adapters, without extra arguments (`make trl`)."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import REFUSED, example
from tests.kit.tiny_models import logits

trl = pytest.importorskip("trl", reason="needs its own environment: make trl")
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
    """Load a tiny Llama and its tokenizer from a folder."""
    return ah.load_backbone(str(backbones("llama")), task="causal-lm")


def pairs():
    """Return prompts, each with a chosen and a rejected completion."""
    things = ("movie", "film", "plot", "actor", "scene", "end")
    return [(f"the {thing} was", " very good", " awful") for thing in things]


def frozen_bytes(model, adapter):
    """Copy every tensor of the model that does not belong to the adapter."""
    of_adapter = {id(t) for t in adapter.tensors().values()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().clone() for name, t in named if id(t) not in of_adapter}


def train(trainer, model, adapter):
    """Train, check that only the adapter changed, and return the losses."""
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
def test_sft_trains_only_the_adapter(method, loaded, tmp_path):
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


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("method", DPO)
def test_dpo_leaves_its_reference_as_it_was(method, copied, loaded, tmp_path):
    """It is the bare backbone, which trl loads from its folder; after SFT, a copy with the adapter.

    With a loss of log 2, policy and reference agree.
    """
    model, tokenizer = loaded
    bare = logits(model)
    adapter = ah.attach(model, example(method))
    reference = None
    if copied:
        tiny_models.scramble(adapter)
        reference = copy.deepcopy(model)
    start = logits(model) if copied else bare
    rows = [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in pairs()]
    trainer = trl.DPOTrainer(
        model, args=trl.DPOConfig(tmp_path, **OPTIONS), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, ref_model=reference,
    )  # fmt: skip
    reference = trainer.ref_model
    assert reference is not model
    assert (find_state(reference) is not None) == copied
    assert torch.equal(logits(reference), start)
    losses = train(trainer, model, adapter)
    if copied or METHODS[method].start == "identity":
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < losses[0]
    assert torch.equal(logits(reference), start)
    assert not torch.allclose(logits(model), start, atol=1e-3)
