"""The peer of `objectives.py`: trl's trainers with peft. Its job is an argument, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer


def trainer_of(job: dict[str, Any], rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Return the trainer of an objective."""
    import trl

    model, teacher = (
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32) for _ in range(2)
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    lora = LoraConfig(
        r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    if job["objective"] != "distillation":  # chats, too: the template of the model writes them
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}],
                 **{half: [{"role": "assistant", "content": row[half]}]
                    for half in ("chosen", "rejected")}} for row in rows]  # fmt: skip
    common = {"model": model, "processing_class": tokenizer, "peft_config": lora}
    if job["objective"] == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        settings |= {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}
        return CPOTrainer(args=CPOConfig(**settings), train_dataset=Dataset.from_list(rows),
                          **common)  # fmt: skip
    if job["objective"] == "kto":
        halves = (("chosen", True), ("rejected", False))
        rated = [{"prompt": r["prompt"], "completion": r[half], "label": liked}
                 for r in rows for half, liked in halves]  # fmt: skip
        return trl.KTOTrainer(args=trl.KTOConfig(beta=0.1, **settings),
                              train_dataset=Dataset.from_list(rated), **common)  # fmt: skip
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    return GKDTrainer(args=GKDConfig(lmbda=0.0, beta=0.0, temperature=1.0, **settings),
                      teacher_model=teacher, train_dataset=Dataset.from_list(rows),
                      **common)  # fmt: skip


def main() -> None:
    """Train, and write the losses of the steps."""
    job = json.loads(sys.argv[1])
    lines = Path(job["train"]).read_text(encoding="utf-8").splitlines()
    settings = {
        "output_dir": job["output"], "max_steps": job["steps"], "learning_rate": job["rate"],
        "per_device_train_batch_size": job["batch"], "max_length": job["length"],
        "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip
    trainer = trainer_of(job, [json.loads(line) for line in lines], settings)
    trainer.train()
    trainer.save_model(job["output"])
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (Path(job["output"]) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()
