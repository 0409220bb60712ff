"""Outputs with replayed layers are the computed ones, or nothing is replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.loop.speedups import NotUsed
from adapterhub.speed.frozen_cache import StateRecorder, find_plan, record_runs, replayable
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_models import EOS, MATRIX, NO_DROPOUT

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
    with replayable(anatomy, next(iter(anatomy.stacks))) as replay:
        try:
            plan = find_plan(model, replay, run, singles)
        except NotUsed:
            assert expected_plan(method, architecture, side) == "outputs differ"
            return
        if plan is None:
            assert expected_plan(method, architecture, side) == "nothing is frozen"
            return
        assert plan.below == expected_plan(method, architecture, side)
        with evaluation_mode(model), torch.no_grad():
            computed = run()
            recorded = record_runs(StateRecorder(replay, plan.layers, 27), singles, plan)
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
    with replayable(adapter.anatomy, "decoder") as replay, pytest.raises(NotUsed, match="dropout"):
        find_plan(model, replay, partial(model, **batch), runs(model, batch))
