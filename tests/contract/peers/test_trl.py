"""trl's trainers run on a model with adapters, without extra arguments (`make trl`).

AsyncGRPOTrainer sends an adapter to a server as a LoRA, after each step. The server is a stand-in,
and attention is torch's: the trainer's own needs a GPU.
"""

import copy
import queue
import re
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import REFUSED, example
from tests.kit.tiny_models import logits

trl = pytest.importorskip("trl", reason="needs its own environment: make trl")
# trl uses names that transformers 5.23 renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]

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


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainers.md"
SYNCHRONIZED = 2


class StandIn:
    """Has the methods of trl's client of a vLLM server, and remembers what it was sent."""

    def __init__(self):
        self.calls, self.folders = [], []

    def wait_for_server_ready(self):
        self.calls.append("ready")

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def load_lora_adapter(self, lora_name, lora_path):
        self.calls.append(lora_name)
        self.folders.append(Path(lora_path))


class Rollouts:
    """Texts with their rewards, as the trainer's worker would write them."""

    def __init__(self, sample):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.versions = []
        for group in range(8):
            self.rollout_buffer.put(sample(group))

    def start(self):
        """Do nothing: the texts are there."""

    stop = start

    def update_model_version(self, model_version):
        self.versions.append(model_version)

    def check_health(self, stale_after_s):
        raise AssertionError("no texts left")


def sample(group):
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    ids = np.arange(6, 16)
    return RolloutSample(
        prompt=[], completion=[], input_ids=ids, completion_mask=(ids > 10).astype(np.int64),
        old_log_probs=np.where(ids > 10, -4.0, 0.0).astype(np.float32), advantage=1.0,
        model_version=1, group_id=group, metrics={},
    )  # fmt: skip


def transfer_of_the_guide():
    """Return the class that the guide shows."""
    (code,) = re.findall(r"```python.*?\n(import adapterhub as ah\n\n\nclass LoRATransfer.*?)```",
                         GUIDE.read_text(encoding="utf-8"), re.S)  # fmt: skip
    names = {}
    exec(code, names)
    return names["LoRATransfer"]


@pytest.mark.parametrize("method", ["lora", "tinylora"])
def test_each_step_sends_what_the_model_computes(method, backbones, tmp_path, monkeypatch):
    trainers = pytest.importorskip("trl.experimental.async_grpo")
    folder = str(backbones("llama"))
    arguments = trainers.AsyncGRPOConfig(
        tmp_path / "run", max_steps=SYNCHRONIZED, per_device_train_batch_size=1, learning_rate=1e-2,
        num_generations=2, gradient_accumulation_steps=1, weight_sync_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, dtype="float32", disable_tqdm=True,
        gradient_checkpointing=False, token_budget=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    server, rollouts = StandIn(), Rollouts(sample)
    transfer = transfer_of_the_guide()(server, tmp_path / "sent")
    trainer = trainers.AsyncGRPOTrainer(
        folder, reward_funcs=lambda **_: [0.0], args=arguments, rollout_worker=rollouts,
        weight_transfer=transfer, train_dataset=Dataset.from_list([{"prompt": "the movie"}]),
    )  # fmt: skip
    trainer.model.set_attn_implementation("sdpa")
    adapter = transfer.adapter = ah.attach(trainer.model, method)
    trainer.train()
    policies = [f"policy-v{n + 1}" for n in range(SYNCHRONIZED + 1)]
    expected = ["ready", *(call for each in policies for call in ("pause", each, "resume"))]
    assert server.calls == expected
    assert rollouts.versions == list(range(1, SYNCHRONIZED + 2))
    assert ah.adapters(trainer.model).keys() == {adapter.name}
    received = []
    for sent in server.folders:
        bare = AutoModelForCausalLM.from_pretrained(folder)
        received.append(logits(peft.PeftModel.from_pretrained(bare, sent).eval()))
    assert torch.equal(received[0], logits(AutoModelForCausalLM.from_pretrained(folder).eval()))
    assert not torch.equal(received[1], received[2])
    torch.testing.assert_close(received[-1], logits(trainer.model.eval()), atol=1e-5, rtol=1e-5)
