"""transformers' Trainer with `TrainerCallback`: adapters beside checkpoints and at the end."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import memory
from torch import nn
from transformers import Trainer, TrainingArguments

import adapterhub as ah
from adapterhub.errors import AttachError, TrainingError
from adapterhub.files.native import Saved
from adapterhub.training.trainer_callback import TrainerCallback, _unwrapped
from tests.kit import tiny_models
from tests.kit.matrix import example

# What save_pretrained writes, and warns of: tests/adapters/test_model_methods.py.
pytestmark = pytest.mark.filterwarnings("ignore:save_pretrained wrote the backbone without")


@pytest.fixture(autouse=True)
def without_collections(monkeypatch):
    """Leave out the collection of garbage in each `train`: it visits what all tests have left."""
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)


def trainer_of(model, folder, **options):
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 3}
        for i, row in enumerate(tiny_models.batch(8)["input_ids"])
    ]
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        save_steps=2, disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[TrainerCallback()]
    )


def attached(method="lora", name="mine", model=None):
    model = model or tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    torch.manual_seed(0)
    return model, ah.attach(model, example(method), name=name)


def assert_same_files(one: Path, other: Path):
    first, second = Saved.at(one).read()[1], Saved.at(other).read()[1]
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, msg=name)


@pytest.mark.parametrize("method", ["lora", "full", "mam"])
def test_the_adapters_are_beside_each_checkpoint_and_a_resumed_run_is_the_same(method, tmp_path):
    model, _ = attached(method)
    trainer_of(model, tmp_path).train()
    whole = tmp_path / "adapters" / "mine"
    assert_same_files(whole, tmp_path / "checkpoint-4" / "adapters" / "mine")
    expected = tiny_models.logits(model.eval())
    fresh = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    ah.load(fresh, whole)
    torch.testing.assert_close(tiny_models.logits(fresh), expected)
    half = Saved.at(tmp_path / "checkpoint-2" / "adapters" / "mine").read()[1]
    assert any(not torch.equal(t, half[n]) for n, t in Saved.at(whole).read()[1].items())
    whole.rename(tmp_path / "whole")
    model, _ = attached(method)
    trainer_of(model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_files(tmp_path / "whole", tmp_path / "adapters" / "mine")
    torch.testing.assert_close(tiny_models.logits(model.eval()), expected)


def test_the_best_checkpoint_is_what_is_saved_at_the_end(tmp_path):
    """tests/methods/test_adalora.py has another method."""
    model, _ = attached("full")
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = trainer_of(model, tmp_path, **options, metric_for_best_model="loss")
    trainer.args.greater_is_better = True  # the worst: not the last one
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"
    assert_same_files(best / "adapters" / "mine", tmp_path / "adapters" / "mine")


def test_all_adapters_are_saved_under_their_names(tmp_path):
    """Others than those of the checkpoint are refused: Trainer loads with strict=False."""
    model, _ = attached("lora", "a")
    attached("bitfit", "b", model)
    trainer_of(model, tmp_path).train()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert sorted(path.name for path in (folder / "adapters").iterdir()) == ["a", "b"]
    fresh = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    for name in ("a", "b"):
        ah.load(fresh, tmp_path / "adapters" / name)
    torch.testing.assert_close(tiny_models.logits(fresh), tiny_models.logits(model.eval()))
    for method, name in (("lora", "other"), ("pfeiffer", "a")):
        other, _ = attached(method, name)
        with pytest.raises(AttachError, match="of adapters that are not attached"):
            trainer_of(other, tmp_path).train(str(tmp_path / "checkpoint-2"))


def test_models_without_adapters_are_refused_and_other_folders_noted(tmp_path):
    bare = tiny_models.model("bert")
    with pytest.raises(TrainingError, match="no adapter is attached") as error:
        trainer_of(bare, tmp_path).train()
    assert "attach(model" in error.value.hint
    trainer = trainer_of(attached(model=bare)[0], tmp_path)
    trainer.state.global_step = 7
    with pytest.warns(UserWarning, match="checkpoint-7 is not there"):
        TrainerCallback().on_save(trainer.args, trainer.state, trainer.control, model=bare)
    assert not (tmp_path / "checkpoint-7").exists()
    # The model is found inside wrappers.
    assert _unwrapped(nn.DataParallel(torch.compile(bare, backend="eager"))) is bare
