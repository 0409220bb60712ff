"""transformers' Trainer and pipelines work on a model with adapters."""

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.matrix import example, one_of_each_signature
from tests.kit.selection import long_table

# transformers renamed the option in 5.23.
_NAMES = {f.name for f in dataclasses.fields(TrainingArguments)}
_NEW, _OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = {_NEW if _NEW in _NAMES else _OLD: True}
pytestmark = pytest.mark.usefixtures("settled")


def rows(count=8):
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 3}
        for i, row in enumerate(tiny_models.batch(count)["input_ids"])
    ]


# What save_pretrained writes, and warns of: tests/adapters/test_model_methods.py.
checkpoints = pytest.mark.filterwarnings("ignore:save_pretrained wrote the backbone without")


@checkpoints
@long_table("method", one_of_each_signature(), 4, nightly=2)
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


@checkpoints
@long_table("method", ["lora", "prompt", "head", "norms", "full"], parts=2)
def test_the_stock_trainer_resumes_from_its_checkpoint(method, tmp_path):
    tensors = []
    for resume in (None, tmp_path / "checkpoint-3"):
        model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
        torch.manual_seed(0)
        adapter = ah.attach(model, example(method))
        arguments = TrainingArguments(
            tmp_path, max_steps=5, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
            save_steps=3, disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows())
        trainer.train(resume_from_checkpoint=resume)
        tensors.append(adapter.tensors())
    uninterrupted, resumed = tensors
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(resumed[name], tensor, msg=name)


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
