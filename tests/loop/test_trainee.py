"""An adapter as a trainee: parameter groups, training mode, and stages such as unfreezing."""

import itertools
import math
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import ConfigError
from adapterhub.loop import checkpoint, trainee
from adapterhub.loop.engine import Engine, LazyBatches, batch_order
from adapterhub.loop.trainee import HEAD_LEARNING_RATE, AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import RunOptions, TrainOptions
from tests.kit import runs, tiny_models
from tests.kit.selection import cases_of

EXAMPLES, BATCH, EPOCHS = 8, 2, 5
STEPS = EXAMPLES // BATCH
RATE, DECAY = 1e-3, 2.6
LAYERS = ("encoder.2.", "encoder.1.", "encoder.0.", "backbone.embeddings")
OPTIONS: dict[str, Any] = {
    "epochs": EPOCHS, "batch_size": BATCH, "learning_rate": RATE, "schedule": "slanted",
    "tensorboard": False,
}  # fmt: skip


def attached(method: str = "unfreeze") -> Adapter:
    torch.manual_seed(0)
    model = tiny_models.model("bert", num_hidden_layers=3, **tiny_models.NO_DROPOUT)
    return ah.attach(model, method)


def batches(epoch: int, event: Callable[[], None] = lambda: None) -> LazyBatches:
    inputs = tiny_models.batch(EXAMPLES, 6)
    labels = inputs["input_ids"][:, 0] % 3

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        event()
        return {name: value[rows] for name, value in inputs.items()} | {"labels": labels[rows]}

    return LazyBatches(batch_order([6] * EXAMPLES, BATCH, epoch, 0, True), collate)


def fit(
    output: Path,
    adapter: Adapter,
    scores: Sequence[float] = (),
    event: Callable[[], None] = lambda: None,
    resume: bool = False,
    **options: Any,
) -> None:
    """Train; as in a real run, the score of an evaluation depends on the progress."""
    values = scores or [0.1 * n for n in range(1, 100)]

    def evaluate() -> dict[str, float]:
        event()
        last = checkpoint.folder_of(output, "last")
        known = checkpoint.exists(last) and checkpoint.load_checkpoint(last).progress["history"]
        return {"accuracy": values[len(known or [])]}

    runs.fit(
        output, RunOptions(**OPTIONS | options), trainee=AdapterTrainee(adapter),
        data=partial(batches, event=event), evaluate=evaluate, resume=resume, metric="accuracy",
    )  # fmt: skip


def depth(name: str) -> int:
    """How many layers are above a tensor of the three-layer BERT."""
    below = [n for n, prefix in enumerate(LAYERS) if name.startswith(prefix)]
    return below[0] if below else 0


class Watch:
    """For each step: the learning rate that each tensor had, and the tensors that moved."""

    def __init__(self, adapter: Adapter, patch: pytest.MonkeyPatch) -> None:
        self.rates: list[dict[str, float]] = []
        self.moved: list[set[str]] = []
        original_step = Engine.step

        def step(engine: Engine, *args: Any) -> Generator[Any, None, Any]:
            before = {name: t.detach().clone() for name, t in adapter.tensors().items()}
            names = {id(t): name for name, t in adapter.tensors().items()}
            self.rates.append(
                {names[id(p)]: g["lr"] for g in engine.optimizer.param_groups for p in g["params"]}
            )
            examples = yield from original_step(engine, *args)
            now = adapter.tensors()
            self.moved.append({name for name in now if not torch.equal(now[name], before[name])})
            return examples

        patch.setattr(Engine, "step", step)


def equation_3(t: int, total: int, cut_frac: float = 0.1, ratio: int = 32) -> float:
    """eta_t / eta_max as the paper prints it."""
    cut = math.floor(total * cut_frac)
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / cut_frac - 1))
    return (1 + p * (ratio - 1)) / ratio


def test_each_epoch_the_next_lower_layer_joins_at_the_rates_of_equations_1_to_3(
    tmp_path, monkeypatch
):
    """And no other byte moves."""
    adapter = attached()
    watch = Watch(adapter, monkeypatch)
    fit(tmp_path, adapter, weight_decay=0.1)
    total = EPOCHS * STEPS
    assert (len(watch.rates), math.floor(total * 0.1)) == (20, 2)
    tensors = adapter.tensors()
    names = [name for name in tensors if not name.startswith("head.")]
    assert {depth(name) for name in names} == {0, 1, 2, 3}
    for step, (rates, moved) in enumerate(zip(watch.rates, watch.moved, strict=True)):
        assert rates.keys() == tensors.keys(), "all are in the optimizer at every step"
        for name in names:
            eta = RATE / DECAY ** depth(name) * equation_3(step, total)
            assert rates[name] == pytest.approx(eta, rel=1e-9), (step, name)
        # What is above the top layer, and the head, trains from the first step.
        stage = min(step // STEPS, 3)
        assert moved == {name for name in tensors if depth(name) <= stage}, step
    assert any(name.startswith("head.") for name in watch.moved[0])
    assert all(t.requires_grad for t in tensors.values())
    trainee.enter_stage(adapter, 0, [])
    assert not adapter.tensors()["encoder.0.attn.q.unfreeze.weight"].requires_grad
    trainee.unfreeze_all(adapter)
    assert all(t.requires_grad for t in adapter.tensors().values())


SCORES = (0.5, math.nan, 0.6, 0.6, 0.1)
SLOPE = (0.5, 0.4, 0.3, 0.2, 0.1, 0.6)


@pytest.mark.parametrize(
    ("method", "scores", "options", "expected"),
    [
        ("unfreeze(every=2, size=2)", (), {}, [1, 1, 2, 2, 3]),
        ("unfreeze(every=plateau)", SCORES, {}, [0, 0, 1, 1, 2]),
        # Two and a half epochs, four stages.
        ("unfreeze(every=equal)", (), {"max_steps": 10}, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]),
        # A plateau in the middle of an epoch counts at once.
        ("unfreeze(every=plateau, patience=2)", SLOPE, {"eval_every": 1, "max_steps": 6},
         [0, 0, 0, 1, 1, 2]),
    ],
)  # fmt: skip
def test_the_schedule_of_stages(tmp_path, monkeypatch, method, scores, options, expected):
    """The lowest layer that moves in each step or epoch; stages of two layers have one rate."""
    adapter = attached(method)
    watch = Watch(adapter, monkeypatch)
    fit(tmp_path, adapter, scores, **options)
    found = [max(map(depth, moved)) for moved in watch.moved]
    assert (found if options else found[::STEPS]) == expected
    if "size=2" in method:
        rates = {depth(name): rate for name, rate in watch.rates[0].items() if "unfreeze" in name}
        top = rates[0]
        assert rates == pytest.approx({0: top, 1: top, 2: top / 2.6, 3: top / 2.6**2})


@pytest.mark.parametrize("method", ["unfreeze(every=plateau)", "staged, lora"])
def test_stopped_anywhere_and_resumed_gives_the_same_bytes(tmp_path, method):
    options: dict[str, Any] = {"eval_every": 2, "save_every": 1, "max_steps": 10}

    def run(name: str, at: int, resume: bool) -> int:
        count = itertools.count()

        def event() -> None:
            if next(count) == at:
                raise KeyboardInterrupt

        fit(tmp_path / name, attached(method), SCORES, event, resume, **options)
        return next(count)

    def final(name: str) -> dict[str, bytes]:
        last = checkpoint.load_checkpoint(tmp_path / name / "checkpoints" / "last")
        return runs.bits(last.tensors)

    total = run("whole", -1, False)
    assert total == 15
    for at in cases_of(range(1, total, 3), 2):
        with pytest.raises(KeyboardInterrupt):
            run(f"at{at}", at, False)
        run(f"at{at}", -1, True)
        assert final(f"at{at}") == final("whole"), f"stopped at event {at}"


def stage_names(adapter: Adapter) -> dict[int, set[str]]:
    names_by_stage: dict[int, set[str]] = {}
    for changed in adapter.changed:
        names_by_stage.setdefault(changed.stage, set()).add(changed.name.replace(".staged", ""))
    return names_by_stage


def test_the_layers_of_an_encoder_decoder_count_through():
    stages = stage_names(ah.attach(tiny_models.model("t5"), "unfreeze"))
    assert [{".".join(n.split(".")[:2]) for n in stages[stage]} for stage in range(5)] == [
        {"decoder.1", "backbone.encoder", "backbone.decoder"},  # with the final norms
        {"decoder.0"}, {"encoder.1"}, {"encoder.0"}, {"backbone.shared"},
    ]  # fmt: skip


def test_staged_trains_the_top_layers_then_norms_then_everything():
    names_by_stage = stage_names(attached("staged"))
    assert sorted(names_by_stage) == [0, 1, 2]
    first, second, third = (names_by_stage[stage] for stage in range(3))
    assert {depth(name) for name in first} == {0, 1}
    assert any(name.startswith("backbone.pooler") for name in first)
    places = ("encoder.0.attn.norm", "encoder.0.ffn.norm", "backbone.embeddings.LayerNorm")
    assert second == {f"{place}.{tensor}" for place in places for tensor in ("weight", "bias")}
    assert {depth(name) for name in third} == {2, 3}
    assert len(first | second | third) == len(attached("full").changed)


def test_staged_takes_any_groups_in_any_order():
    """None of the backbone trains while the head is alone; those that name nothing are listed."""
    groups = "['head', 'embeddings + *.attn.q.*', 'norms', 'top 1']"
    names_by_stage = stage_names(attached(f"staged(groups={groups})"))
    assert sorted(names_by_stage) == [1, 2, 3]
    assert all("embeddings" in name or ".attn.q." in name for name in names_by_stage[1])
    norms = {re.sub(r"\d", "N", name) for name in names_by_stage[2]}
    assert norms == {f"encoder.N.{r}.norm.{t}" for r in ("attn", "ffn") for t in ("weight", "bias")}
    assert {depth(name) for name in names_by_stage[3]} == {0}
    named = set().union(*names_by_stage.values())
    assert "encoder.0.ffn.up.weight" not in named, "what no group names stays frozen"
    with pytest.raises(ConfigError) as error:
        attached("staged(groups=['nroms', 'everything', 'decoder.*'])")
    assert error.value.offenders == ("'nroms'; did you mean 'norms'?", "'decoder.*'")


def test_what_is_frozen_now_is_in_evaluation_mode():
    adapter = attached()
    trainee = AdapterTrainee(adapter)
    for epoch, modes in ((0, [False, False, True]), (1, [False, True, True]), (3, [True] * 3)):
        trainee.enter(epoch, [], 0.0)
        trainee.train_mode(dropout=False)
        names = [f"bert.encoder.layer.{n}.attention.self.query" for n in range(3)]
        assert [adapter.model.get_submodule(name).training for name in names] == modes


@pytest.mark.parametrize(("method", "depths"), [("full", [0, 1, 2, 3]), ("freeze", [0, 1])])
def test_a_decay_gives_each_layer_its_own_rate(method, depths):
    assert [group.rate for group in attached(method).groups()] == [1.0, 1.0]
    adapter = attached(f"{method}(decay=2.0)")
    rates = {g.rate: {depth(n) for n, _ in g.named} for g in adapter.groups() if g.method}
    assert rates == {2.0**-n: {n} for n in depths}
    assert sum(group.method is None for group in adapter.groups()) == 1
    groups = AdapterTrainee(adapter).param_groups(TrainOptions())
    rate = METHODS[method].learning_rate
    group_rates = {group["name"]: group["lr"] for group in groups}
    assert group_rates.pop("head") == 5e-3
    names = {0: method, 1: f"{method} x0.5", 2: f"{method} x0.25", 3: f"{method} x0.125"}
    assert group_rates == {names[n]: rate * 2.0**-n for n in depths}


OF_LORA, OF_NORMS = (METHODS[name].learning_rate for name in ("lora", "norms"))


@pytest.mark.parametrize(
    ("method", "options", "rates"),
    [
        ("lora, norms", {}, {"lora": OF_LORA, "norms": OF_NORMS, "head": HEAD_LEARNING_RATE}),
        ("lora, norms", {"learning_rate": 0.5, "head_learning_rate": 0.25},
         {"lora": 0.5, "norms": 0.5, "head": 0.25}),
        # A head that trains alone has the learning rate.
        ("head", {}, {"head": HEAD_LEARNING_RATE}),
        ("head", {"learning_rate": 0.5}, {"head": 0.5}),
        ("head", {"head_learning_rate": 0.25}, {"head": 0.25}),
        ("head", {"learning_rate": 0.5, "head_learning_rate": 0.25}, {"head": 0.25}),
    ],
)  # fmt: skip
def test_learning_rates_come_from_the_options_or_the_methods(method, options, rates):
    trainee = AdapterTrainee(attached(method))
    groups = trainee.param_groups(TrainOptions(**options))
    assert {g["name"]: g["lr"] for g in groups} == rates
    grouped = [p for g in groups for p in g["params"]]
    assert {id(p) for p in grouped} == {id(t) for t in trainee.tensors().values()}
    assert len(grouped) == len(trainee.tensors())


def test_every_equal_stage_begins_if_there_are_as_many_steps():
    adapter = attached("unfreeze(every=equal)")
    for steps in range(1, 40):
        begun = []
        for step in range(steps):
            trainee.enter_stage(adapter, 0, [], step / steps)
            trained = [name for name, t in adapter.tensors().items() if t.requires_grad]
            begun.append(max(map(depth, trained)))
        lengths = [begun.count(stage) for stage in range(4)]
        assert begun == sorted(begun), steps
        assert steps < 4 or max(lengths) - min(lengths) <= 1, steps
