"""The peer of `chats.py`: trl's SFTTrainer with peft. Its job is an argument, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def chats(file: str) -> list[dict[str, Any]]:
    """Return chats as prompts and completions, so that the answers alone are learned."""
    rows = map(json.loads, Path(file).read_text(encoding="utf-8").splitlines())
    return [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in rows]


def main() -> None:
    """Train, evaluate and save."""
    job = json.loads(sys.argv[1])
    dtype = torch.bfloat16 if job["dtype"] == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(chats(job["train"])),
        eval_dataset=Dataset.from_list(chats(job["test"])),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        args=SFTConfig(
            output_dir=job["output"], num_train_epochs=1, per_device_train_batch_size=job["batch"],
            learning_rate=job["rate"], lr_scheduler_type="linear", warmup_steps=0.06,
            max_length=job["length"], seed=job["seed"], report_to=[], save_strategy="no",
            logging_steps=10, use_cpu=True, bf16=job["dtype"] == "bf16",
            gradient_checkpointing=False, dataloader_pin_memory=False, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_model(job["output"])


if __name__ == "__main__":
    main()
