"""trl's AsyncGRPOTrainer sends an adapter to a server as a LoRA, after each step (`make trl`).

The server is a stand-in, and attention is torch's: the trainer's own needs a GPU.
"""

from __future__ import annotations

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
from tests.kit.tiny_models import logits

pytest.importorskip("trl", reason="needs its own environment: make trl")
pytest.importorskip("trl.experimental.async_grpo")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainers.md"
STEPS = 2


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
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    folder = str(backbones("llama"))
    arguments = AsyncGRPOConfig(
        tmp_path / "run", max_steps=STEPS, per_device_train_batch_size=1, learning_rate=1e-2,
        num_generations=2, gradient_accumulation_steps=1, weight_sync_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, dtype="float32", disable_tqdm=True,
        gradient_checkpointing=False, token_budget=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    server, rollouts = StandIn(), Rollouts(sample)
    transfer = transfer_of_the_guide()(server, tmp_path / "sent")
    trainer = AsyncGRPOTrainer(
        folder, reward_funcs=lambda **_: [0.0], args=arguments, rollout_worker=rollouts,
        weight_transfer=transfer, train_dataset=Dataset.from_list([{"prompt": "the movie"}]),
    )  # fmt: skip
    trainer.model.set_attn_implementation("sdpa")
    adapter = transfer.adapter = ah.attach(trainer.model, method)
    trainer.train()
    policies = [f"policy-v{n + 1}" for n in range(STEPS + 1)]
    expected = ["ready", *(call for each in policies for call in ("pause", each, "resume"))]
    assert server.calls == expected
    assert rollouts.versions == list(range(1, STEPS + 2))
    assert ah.adapters(trainer.model).keys() == {adapter.name}
    received = []
    for sent in server.folders:
        bare = AutoModelForCausalLM.from_pretrained(folder)
        received.append(logits(peft.PeftModel.from_pretrained(bare, sent).eval()))
    assert torch.equal(received[0], logits(AutoModelForCausalLM.from_pretrained(folder).eval()))
    assert not torch.equal(received[1], received[2])
    torch.testing.assert_close(received[-1], logits(trainer.model.eval()), atol=1e-5, rtol=1e-5)
