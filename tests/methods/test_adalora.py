"""AdaLoRA: the allocation of its budget, in our loop, in transformers' Trainer, and in peft's."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import adapterhub as ah
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop.engine import Engine, LazyBatches, batch_order
from adapterhub.loop.loop import TrainingResult, TrainingSession, train
from adapterhub.loop.report import Reporter
from adapterhub.loop.trainee import AdapterTrainee, check_whole, penalty, stepped
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models

SPEC = "adalora(rank=3, target=1, warmup=0.2, final=0.4)"
STEPS, SITES = 10, 4
OPTIONS = RunOptions(
    max_steps=STEPS, batch_size=4, eval_every=1, learning_rate=0.02, schedule="constant",
    warmup=0, tensorboard=False,
)  # fmt: skip


def attached(method: Any = SPEC) -> Any:
    torch.manual_seed(0)
    return ah.attach(tiny_models.model("bert", **tiny_models.NO_DROPOUT), method)


def components(adapter: Any) -> int:
    """The number of components that are not zero."""
    return sum(int(placed.module.E.count_nonzero()) for placed in adapter.placed)


def fit(
    output: Path,
    adapter: Any,
    options: RunOptions = OPTIONS,
    *,
    score: Callable[[int], float] = float,
    resume: bool = False,
) -> TrainingResult:
    """Train; the score of an evaluation is a function of the steps that are done."""
    inputs = tiny_models.batch(8, 6)
    labels = inputs["input_ids"][:, 0] % 3
    steps = 0

    def evaluate() -> Mapping[str, float]:
        nonlocal steps
        steps = session.progress.step
        return {"accuracy": score(steps), "components": components(adapter)}

    def collate(rows: list[int]) -> dict[str, Tensor]:
        return {name: value[rows] for name, value in inputs.items()} | {"labels": labels[rows]}

    session = TrainingSession(
        Engine(AdapterTrainee(adapter), options),
        lambda epoch: LazyBatches(batch_order([6] * 8, 4, epoch, 0, True), collate),
        evaluate, output=output, seed=0, main_metric="accuracy", resume=resume, run={},
        reporter=Reporter(),
    )  # fmt: skip
    return train(session)


def test_the_budget_falls_to_the_target_and_the_best_evaluation_has_it(tmp_path: Path) -> None:
    """The score falls all the time: the first one of the final phase is the best."""
    adapter = attached()
    result = fit(tmp_path, adapter, replace(OPTIONS, patience=3), score=lambda step: -step)
    counts = [int(record["components"]) for record in result.history]
    # 12 components at the first two steps, then 4 + 8 (1 - k / 4)^3, and 4 in the last four.
    # Evaluations of more than that do not use up the patience.
    assert counts == [12, 12, 7, 5, 4, 4, 4, 4, 4]
    assert result.best_step == 6
    assert components(adapter) == SITES


def test_another_length_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, attached(), replace(OPTIONS, max_steps=4))
    with pytest.raises(ConfigError, match="adalora divides the length"):
        fit(tmp_path, attached(), resume=True)


def test_files_have_neither_importance_nor_a_budget(tmp_path: Path) -> None:
    adapter = attached()
    fit(tmp_path / "run", adapter)
    with torch.no_grad():
        expected = adapter.model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert {name.rpartition(".")[2] for name in saved if "adalora" in name} == {"A", "E", "B"}
    again = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    loaded = ah.load(again, tmp_path / "adapter")
    assert loaded.methods[0].target is None
    with torch.no_grad():
        assert torch.equal(again(**tiny_models.batch()).logits, expected)
    fit(tmp_path / "again", loaded, replace(OPTIONS, max_steps=2))
    assert components(loaded) == 3 * SITES, "it trains on, without a budget"


def off_identity(adapter: Any) -> list[float]:
    """How far A and B of each site are from orthogonal."""
    products = [
        product.detach() - torch.eye(3)
        for p in adapter.placed
        for product in (p.module.A @ p.module.A.T, p.module.B.T @ p.module.B)
    ]
    return [float(product.norm()) for product in products]


def test_the_penalty_is_part_of_the_loss_and_of_the_gradients(tmp_path: Path) -> None:
    adapters = {w: attached(f"adalora(rank=3, target=1, orthogonality={w})") for w in (0, 2)}
    first = off_identity(adapters[2])
    expected = 2 * sum(first) / len(first)
    engine = Engine(AdapterTrainee(adapters[2]), OPTIONS)
    assert float(engine._add_penalty()) == pytest.approx(expected, rel=1e-5)
    assert all(p.module.A.grad.abs().sum() > 0 for p in adapters[2].placed)
    assert all(p.module.E.grad is None for p in adapters[2].placed)
    for parameter in adapters[2].parameters():
        parameter.grad = None
    for weight, adapter in adapters.items():
        fit(tmp_path / str(weight), adapter)
    assert sum(off_identity(adapters[2])) < 0.9 * sum(off_identity(adapters[0]))


def test_a_sharded_model_is_refused() -> None:
    with pytest.raises(TrainingError, match="adalora reads whole parameters"):
        check_whole(AdapterTrainee(attached()).by_share)
    check_whole(AdapterTrainee(attached("lora")).by_share)


@pytest.mark.filterwarnings("ignore:save_pretrained wrote the backbone without")
def test_the_trainer_allocates_and_its_best_checkpoint_has_the_final_ranks(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    adapter = attached()
    inputs = tiny_models.batch(8, 6)["input_ids"]
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 3}
        for row in inputs
    ]
    counts: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        counts.append(components(adapter))
        return {"falling": -float(len(counts))}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.02,
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="falling", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(
        adapter.model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics,
        callbacks=[ah.TrainerCallback()],
    )  # fmt: skip
    trainer.train()
    assert counts == [12, 12, 7, 5, 4, 4, 4, 4, 4, 4]
    assert trainer.state.best_global_step == 6
    assert components(adapter) == SITES


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_allocation_is_that_of_peft() -> None:
    peft = pytest.importorskip("peft")
    adapter = attached()
    base = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    config = peft.AdaLoraConfig(
        init_r=3, target_r=1, tinit=2, tfinal=4, total_step=STEPS, lora_alpha=16,
        target_modules=["query", "value"], task_type="SEQ_CLS",  # else without the penalty
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    layers = [m for _, m in sorted(theirs.named_modules()) if hasattr(m, "ranknum")]
    ours = sorted(adapter.placed, key=lambda placed: placed.site.host)
    assert len(layers) == len(ours) == SITES
    with torch.no_grad():
        for layer, placed in zip(layers, ours, strict=True):
            layer.lora_A["default"].copy_(placed.module.A)
            layer.lora_B["default"].copy_(placed.module.B)
    trained = [p for placed in ours for p in (placed.module.A, placed.module.E, placed.module.B)]
    of_peft = [
        p for layer in layers
        for p in (layer.lora_A["default"], layer.lora_E["default"], layer.lora_B["default"])
    ]  # fmt: skip
    optimizers = [torch.optim.Adam(parameters, lr=0.02) for parameters in (trained, of_peft)]
    batch = tiny_models.labelled_batch(adapter.model)
    for step in range(1, STEPS + 1):
        loss = adapter.model(**batch).loss + penalty(adapter)
        expected = theirs(**batch).loss
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        stepped(adapter, step / STEPS)
        theirs.base_model.update_and_allocate(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for layer, placed in zip(layers, ours, strict=True):
            kept = placed.module.E != 0
            assert torch.equal(kept, layer.lora_E["default"].flatten() != 0), step
    assert components(adapter) == SITES
