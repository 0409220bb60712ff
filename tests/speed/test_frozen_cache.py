"""Frozen layers are computed once in a run, with equal results, and found in any batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.loop.speedups import NotUsed
from adapterhub.recipe.recipe import read
from adapterhub.speed import frozen_cache
from adapterhub.speed.frozen_cache import LayerCall, StackReplay, StackRows, StateRecorder
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.runs import Notes, adapter_bytes, changed
from tests.kit.selection import long_table
from tests.kit.task_cases import CASES
from tests.kit.tiny_models import EOS, MATRIX, NO_DROPOUT

LAYERS = ("frozen layer", "frozen_cache")


@pytest.fixture
def recipe(recipe_with):
    """Three epochs of a head, on 64 rows."""
    words = ["method=head", "train.epochs=3", "train.batch_size=8", "train.eval_every=epoch"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false", "train.log_every=1")


def calls_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of each layer that is computed."""
    computed: list[int] = []
    forward = StackReplay.forward

    def counted(self: Any, number: int, compute: Any, *args: Any, **kwargs: Any) -> Any:
        def compute_it(*args: Any, **kwargs: Any) -> Any:
            computed.append(number)
            return compute(*args, **kwargs)

        return forward(self, number, compute_it, *args, **kwargs)

    monkeypatch.setattr(StackReplay, "forward", counted)
    return computed


@pytest.mark.parametrize("method", ["head", "lora(layers=top 1)"])
def test_the_results_are_those_without_a_cache(recipe, method, monkeypatch):
    computed = calls_of_layers(monkeypatch)
    off, on = changed(recipe, "off", method, frozen_cache="off"), changed(recipe, "on", method)
    plain, cached = Notes(), Notes()
    expected = run(off, plain).result
    assert not computed  # without a cache nothing enters the forward pass
    assert not plain.about(*LAYERS)
    result = run(on, cached).result
    (note,) = cached.about(*LAYERS)
    assert "computed once for 86 rows, and kept in bf16" in note
    assert "in memory; train.frozen_cache=off" in note
    assert torch.allclose(torch.tensor(cached.losses), torch.tensor(plain.losses), atol=0.02)
    assert [r["step"] for r in result.history] == [r["step"] for r in expected.history]
    # Rows of one length share a pass: far fewer than the 24 steps and three evaluations.
    assert 0 < computed.count(0) < 20


@long_table(("method", "stop_after"), [("unfreeze", 11), ("head", 3), ("freeze(top=1)", 17)], 3)
def test_a_killed_run_resumes_to_the_same_bytes(recipe, method, stop_after):
    whole = changed(recipe, "whole", method, save_every=stop_after)
    cut = changed(recipe, "cut", method, save_every=stop_after)
    notes = Notes()
    run(whole, notes)
    assert notes.about(*LAYERS)
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(stop_after))
    run(cut, Notes(), resume=True)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_a_stage_that_reaches_lower_layers_uses_what_was_recorded(recipe):
    notes = Notes()
    run(changed(recipe, "run", "unfreeze", epochs=4), notes)
    assert len(notes.about(*LAYERS)) == 1  # the second stage needs layer 0, which is recorded


def test_what_is_too_large_is_computed_at_each_step(recipe):
    off, small = changed(recipe, "off", frozen_cache="off"), changed(recipe, "small")
    small = replace(small, train=replace(small.train, frozen_cache_gb=1e-6))
    notes = Notes()
    run(off, Notes())
    run(small, notes)
    (note,) = notes.about(*LAYERS)
    assert "their outputs take" in note
    assert "train.frozen_cache_gb" in note
    assert adapter_bytes(off.output) == adapter_bytes(small.output)


SAID = {  # by a method and options: what is said by default, and where a cache is asked for
    ("head", "dropout", True): ("", "dropout"),
    ("head", "gradient_checkpointing", True): ("", "computes layers again"),
    ("lora", "max_steps", 3): ("", ""),
    # These steps do not reach every row, but the evaluation does.
    ("head", "max_steps", 3): ("for 22 rows", "for 22 rows"),
}


@pytest.mark.parametrize("case", SAID, ids=str)
def test_what_is_said_of_options(recipe, case):
    method, name, value = case
    options = {"epochs": None, "max_steps": 3} | {name: value}
    for cache, said in zip((None, "memory"), SAID[case], strict=True):
        notes = Notes()
        run(changed(recipe, f"{cache}", method, frozen_cache=cache, **options), notes)
        assert [said in note for note in notes.about(*LAYERS)] == [True] * bool(said)


# Of a task, what is said; the loss of transformers for spans reads padding.
TASKS = {
    "causal-lm": "computed once",
    "multiple-choice": "computed once",
    "question-answering": "outputs change",
    "masked-lm": "change with each epoch",
    "image-classification": "are decoded for each batch",
}


@long_table("name", TASKS, 2)
def test_every_task_has_the_results_without_a_cache(name, backbones, tmp_path):
    case = CASES[name]
    source = str(case.data(tmp_path))
    words = ["method=houlsby(layers=top 1)", "train.max_steps=8", "train.batch_size=8"]
    words += ["train.tensorboard=false", "train.report=false", "train.log_every=1", *case.words]
    data = {"data": {"train": source, "eval": source}, "task": case.task}
    losses: list[list[float]] = []
    for where in ("off", "memory"):
        flags = {"backbone": str(backbones(case.backbone)), "output": str(tmp_path / where)}
        notes = Notes()
        run(read(None, [*words, f"train.frozen_cache={where}"], flags | data), notes)
        losses.append(notes.losses)
    assert TASKS[name] in notes.about(*LAYERS)[0]
    assert (losses[0] == losses[1]) == (TASKS[name] != "computed once")
    assert torch.allclose(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.02, atol=0.02)


LENGTHS = {b"a": 3, b"b": 1, b"c": 4}


def states(key: bytes, layer: int) -> torch.Tensor:
    """Return the states of a row: (tokens, 2), unlike those of any other row and layer."""
    count = LENGTHS[key]
    return (torch.arange(count * 2).view(count, 2) + 1 + 10 * key[0] + 1000 * layer).bfloat16()


def batch(keys: list[bytes], side: str, layer: int = 0) -> tuple[StackRows, torch.Tensor]:
    """Return padded rows and the states of a layer, -1 at padding."""
    width = max(LENGTHS[key] for key in keys) + 1
    mask, values = (
        torch.zeros(len(keys), width, dtype=torch.bool),
        torch.full((len(keys), width, 2), -1.0),
    )
    for n, key in enumerate(keys):
        count = LENGTHS[key]
        where = slice(0, count) if side == "right" else slice(width - count, width)
        mask[n, where], values[n, where] = True, states(key, layer).float()
    return StackRows(keys, mask, {}), values


def recorded(layers: tuple[int, ...], *batches: list[bytes]) -> Any:
    """Record batches of two layers that are padded on the right."""
    replay: Any = SimpleNamespace(states=lambda call: call.hidden)
    recorder = StateRecorder(replay, layers, 50)
    for keys in batches:
        rows = batch(keys, "right")[0]
        calls = [LayerCall(n, None, batch(keys, "right", n)[1]) for n in (0, 1)]
        recorder.add(calls, rows)
    return recorder.recorded()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keys", [[b"c", b"a"], [b"b"], [b"a", b"a", b"b", b"c"]])
def test_a_batch_is_assembled_from_rows_by_its_own_mask(side, keys):
    store = recorded((0, 1), [b"a", b"b"], [b"c"])
    for layer in (0, 1):
        rows, values = batch(keys, side, layer)
        found = store.read(rows, (layer,))[layer]
        assert torch.equal(found[rows.mask].float(), values[rows.mask])
        assert not found[~rows.mask].any()


def test_a_row_is_recorded_once_and_what_is_not_recorded_is_not_returned():
    assert recorded((0,), [b"a", b"a"], [b"a", b"b"]).states.shape == (4, 1, 2)
    store = recorded((1,), [b"a"])
    assert store.read(batch([b"a", b"b"], "right")[0], (1,)) is None
    assert store.read(batch([b"a"], "right")[0], (0,)) is None
    assert set(store.read(batch([b"a"], "right")[0], (1,))) == {1}


def test_the_latest_outputs_that_fit_are_kept():
    assert 0 < frozen_cache.memory_limit() < 1 << 50
    kept = frozen_cache.KeptActivations(limit=30)

    def keep(key: str, tokens: int) -> None:
        outputs = torch.zeros(tokens, 1, 1, dtype=torch.bfloat16)
        kept.keep(key, [], frozen_cache.RecordedStates((0,), outputs, {}))

    for key in "abc":
        keep(key, 5)
    assert kept.get("c") is not None
    keep("d", 10)
    assert [key for key in "abcd" if kept.get(key)] == ["c", "d"]
    keep("e", 16)
    assert not kept.states


# Outputs with replayed layers are the computed ones, or nothing is replayed.


METHODS = ("head", "freeze(top=1)", "houlsby(layers=top 1)", "scalar-mix", "ia3")
SIDES = [*((method, "right") for method in METHODS), ("head", "left"), ("scalar-mix", None)]
REFUSED = {("scalar-mix", "albert")} | {("head", a) for a in tiny_models.WITHOUT_CLASSIFIER}
CELLS = [(m, a, s) for m, s in SIDES for a in MATRIX if (m, a) not in REFUSED]
# Their token positions are counted from the left end of the batch: there, padding moves a text.
COUNTED_FROM_THE_LEFT = {
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "deberta",
    "deberta-v2", "mpnet", "modernbert", "openai-gpt", "gpt2", "gpt_neo", "xglm", "bart", "plbart",
    "mbart", "pegasus",
}  # fmt: skip
# `freeze` trains their table of relative positions, which all layers read.
SHARED_POSITIONS = {"deberta", "deberta-v2", "mpnet"}
# In T5 the first layer hands its relative positions on: it alone would be replayed in two layers.
HANDED_ON = {"t5", "mt5"}


def attached(architecture: str, method: str, **config: Any) -> Adapter:
    """Attach an adapter with an effect to a tiny model in training mode."""
    model = tiny_models.usual_model(architecture, **NO_DROPOUT, **config)
    adapter = ah.attach(model, method, name="mine")
    tiny_models.scramble(adapter)
    adapter.train_mode()
    return adapter


def padded(model: Any, side: str | None) -> dict[str, torch.Tensor]:
    """Make a padded batch in which each text ends with EOS."""
    batch = tiny_models.padded_batch(side)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    for row in range(len(mask)):
        batch["input_ids"][row, mask[row].nonzero().max()] = EOS
    return batch | tiny_models.decoder_inputs(model, batch)


def one_row(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """Return one row of a batch without padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row].bool()
    return {k: v[row : row + 1][:, mask] if v.shape[1] == len(mask) else v[row : row + 1]
            for k, v in batch.items()}  # fmt: skip


def runs(model: Any, batch: dict[str, torch.Tensor]) -> list[Callable[[], Any]]:
    """Return runs of a model on each row alone."""
    return [partial(model, **one_row(batch, n)) for n in range(len(batch["input_ids"]))]


def expected_plan(method: str, architecture: str, side: str | None) -> int | str:
    """Return how many of two layers are replayed, or why none is."""
    if method == "ia3" or (method.startswith("freeze") and architecture in SHARED_POSITIONS):
        return "nothing is frozen"
    left, right = architecture in COUNTED_FROM_THE_LEFT, architecture == "xlnet"
    handed_on = architecture in HANDED_ON and method.startswith("houlsby")
    if handed_on or (side == "left" and left) or (side == "right" and right):
        return "outputs differ"
    decoder_trains = method.startswith("freeze") and architecture in tiny_models.ENCODER_DECODERS
    return 2 if method in ("head", "scalar-mix") or decoder_trains else 1


@long_table(("method", "architecture", "side"), CELLS, parts=5)
def test_outputs_with_replay_are_the_computed_ones(method, architecture, side):
    adapter = attached(architecture, method)
    model, anatomy = adapter.model, adapter.anatomy
    batch = padded(model, side)
    run, singles = partial(model, **batch), runs(model, batch)
    modes = [module.training for module in model.modules()]
    forwards = [vars(m).get("forward") for m in model.modules()]
    with frozen_cache.replayable(anatomy, next(iter(anatomy.stacks))) as replay:
        try:
            plan = frozen_cache.find_plan(model, replay, run, singles)
        except NotUsed:
            assert expected_plan(method, architecture, side) == "outputs differ"
            return
        if plan is None:
            assert expected_plan(method, architecture, side) == "nothing is frozen"
            return
        assert plan.below == expected_plan(method, architecture, side)
        with evaluation_mode(model), torch.no_grad():
            computed = run()
            recorded = frozen_cache.record_runs(
                StateRecorder(replay, plan.layers, 27), singles, plan
            )
            assert recorded is not None
            replay.plan, replay.recorded = plan, [recorded]
            replayed = run()
        assert recorded.states.dtype == torch.bfloat16
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for name in ("logits", "loss"):
            if isinstance(value := computed.get(name), torch.Tensor):
                of_tokens = value.shape[:2] == valid.shape
                pair = [v[name][valid] if of_tokens else v[name] for v in (replayed, computed)]
                size = float(pair[1].abs().max())
                torch.testing.assert_close(*pair, rtol=0, atol=0.04 * size)
                assert not torch.equal(*pair)  # it was replayed: bf16 leaves a trace
    assert modes == [module.training for module in model.modules()]
    assert forwards == [vars(m).get("forward") for m in model.modules()]


def test_dropout_in_front_of_the_layers_is_noticed():
    """GPT-2's dropout of the embedding has no weights: it is on where the final norm trains."""
    model = tiny_models.model("gpt2", embd_pdrop=0.5)
    adapter = ah.attach(model, "freeze(top=1)", name="mine")
    adapter.train_mode()
    batch = tiny_models.batch()
    with (
        frozen_cache.replayable(adapter.anatomy, "decoder") as replay,
        pytest.raises(NotUsed, match="dropout"),
    ):
        frozen_cache.find_plan(model, replay, partial(model, **batch), runs(model, batch))
