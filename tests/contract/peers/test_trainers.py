"""transformers' Trainer and pipelines work on a model with adapters."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_models
import torch
from matrix import example
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

import adapterhub as ah
from adapterhub.methods import METHODS

# transformers renamed the option in 5.23.
_NAMES = {f.name for f in dataclasses.fields(TrainingArguments)}
_NEW, _OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = {_NEW if _NEW in _NAMES else _OLD: True}


def rows(count=8):
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 3}
        for i, row in enumerate(tiny_models.batch(count)["input_ids"])
    ]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_stock_trainer_trains_only_the_adapter(method, tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, example(method))
    before = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        eval_strategy="steps", eval_steps=3, save_steps=3, load_best_model_at_end=True,
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **CHECKPOINTING,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    for name, tensor in adapter.tensors().items():
        moved = not torch.equal(tensor, before[name])
        assert moved == isinstance(tensor, torch.nn.Parameter), name


def test_a_pipeline_uses_the_active_adapter(backbone):
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["no", "yes"])
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    with_adapter = classify("the movie was good")[0]
    assert with_adapter["label"] in ("no", "yes")
    ah.activate(model)
    assert classify("the movie was good")[0] != with_adapter
