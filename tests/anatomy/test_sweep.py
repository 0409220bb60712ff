"""The sweep over all model types: what it finds is seen, and counted."""

from __future__ import annotations

import every_type
import pytest
import sweep
import sweep_cells

import adapterhub as ah
from adapterhub.methods import METHODS


@pytest.fixture
def model():
    return every_type.build("llama", "AutoModelForCausalLM", tiny=True)


@pytest.mark.parametrize("method", ["lora", "prefix", "norms", "full"])
def test_a_method_that_works_is_ok(model, method):
    assert sweep_cells.cell(model, method, sweep_cells.inputs_for(model)) == "ok"


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("jamba", "houlsby"),  # a mixer whose input is named
        ("mamba", "pfeiffer"),  # a mixer in place of a feed-forward network
        ("internvl", "lora"),  # two stacks
        ("kimi_linear", "ia3"),  # latent and linear attention
        ("recurrent_gemma", "prefix"),  # attention in some layers
        ("informer", "lora"),  # a list of modules with None in it
        ("dinov3_vit", "lora"),  # a base model with a module around its layers
        ("encoder-decoder", "lora"),  # no class of AutoModel
        ("funnel", "full"),  # two classes of AutoModel
        ("gemma4_text", "lora"),  # options that differ between layers
        ("mobilebert", "full"),  # an empty parameter
        ("parakeet_ctc", "lora"),  # integer buffers
        ("qianfan_ocr", "lora"),  # other names in a checkpoint of the base model
        ("convnext", "pfeiffer"),  # stages of several sizes, networks alone
        ("mgp-str", "lora"),  # a sequence of layers, no list
        ("swin", "pfeiffer"),  # stages of several sizes
        ("pp_lcnet", "head"),  # modules without parameters behind the encoder
        ("pvt", "freeze"),  # a number of labels without names
        ("rwkv", "lora"),  # states that are changed in place, unless it trains
    ],
)
def test_a_method_works_on_an_irregular_architecture(model_type, method):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    found = every_type.build(model_type, auto, tiny=True)
    assert sweep_cells.cell(found, method, sweep_cells.inputs_for(found)) in ("ok", "ok, not run")


@pytest.mark.parametrize(
    ("model_type", "cells"),
    [
        ("neomme", {"lora": "ok"}),  # outputs of zero at the start, in each sublayer
        ("mra", {"lora": "ok, not run", "prompt": "ok, not run", "pfeiffer": "ok"}),
    ],
)
def test_what_a_random_model_does_not_compute_is_no_failure(model_type, cells):
    """MRA's attention is zero without its kernel; NeoMME's weights are drawn again."""
    found = every_type.build(model_type, "AutoModelForMaskedLM", tiny=True)
    inputs = sweep_cells.inputs_for(found)
    assert {method: sweep_cells.cell(found, method, inputs) for method in cells} == cells


def test_a_module_that_gets_no_gradient_is_seen_where_the_backbone_would_learn(model, monkeypatch):
    monkeypatch.setattr(sweep_cells, "_learns", lambda *rest: False)
    inputs = sweep_cells.inputs_for(model)
    for method in ("lora", "prefix", "prompt", "full"):
        assert sweep_cells.cell(model, method, inputs) == "wrong: gradients"


def test_a_refusal_has_its_reason(model):
    found = sweep_cells.cell(model, "bitfit", sweep_cells.inputs_for(model))
    assert found.startswith("refused: ")
    assert "has none" in found


@pytest.mark.parametrize("broken", ["start", "changes", "detach"])
def test_a_broken_invariant_is_named(model, monkeypatch, broken):
    """Outputs that are wrong in one place: after attaching, after a change, after detaching."""
    calls = iter(range(99))
    wrong = {"start": lambda n: n == 1, "changes": lambda n: False, "detach": lambda n: n == 4}
    first = []

    def outputs(model, inputs):
        found = real(model, inputs)
        first.append(found)
        if broken == "changes":
            return first[0]
        return found + 1 if wrong[broken](next(calls)) else found

    inputs, real = sweep_cells.inputs_for(model), sweep_cells.outputs
    monkeypatch.setattr(sweep_cells, "outputs", outputs)
    monkeypatch.setattr(sweep_cells, "_check_cache", lambda *rest: None)
    assert sweep_cells.cell(model, "lora", inputs) == f"wrong: {broken}"


def test_a_wrong_cached_step_is_seen(model, monkeypatch):
    inputs, real = sweep_cells.inputs_for(model), sweep_cells._cached_step

    assert sweep_cells._cached_step(model, inputs) is not None
    bare = sweep_cells.outputs(model, inputs)
    ah.attach(model, "lora")
    sweep_cells._check_cache(model, inputs, bare)
    calls = iter((0.0, 1.0))
    monkeypatch.setattr(sweep_cells, "_cached_step", lambda *rest: real(*rest) + next(calls))
    with pytest.raises(sweep_cells.Broken, match="cache"):
        sweep_cells._check_cache(model, inputs, bare)


def test_a_type_runs_in_a_process_of_its_own():
    found = sweep._in_a_process("bert", ("lora", "head"), False)
    assert found["class"] == "BertForMaskedLM"
    assert found["inputs"]
    assert found["cells"]["lora"] == "ok"
    assert found["cells"]["head"].startswith("refused: ")


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(sweep, "SECONDS", 0.0)
    assert sweep._in_a_process("bert", ("lora",), False)["reason"] == "more than 0.0 s"


def test_types_are_counted_and_shown():
    cells = {"lora": "ok", "prefix": "refused: it has no tokens", "full": "error: KeyError: 1"}
    types = [
        {"type": "a", "class": "A", "cells": cells, "peft": {None: "error", "all-linear": "ok"}},
        {"type": "b", "class": "B", "cells": cells | {"full": "ok, not run"}},
        {"type": "c", "cells": {}, "reason": "it cannot be built"},
    ]
    found = {"transformers": "5", "methods": tuple(cells), "types": types}
    assert sweep.summary(found) == [
        "2 model types of transformers 5 were built",
        "lora: 2 ok",
        "prefix: 2 refused",
        "full: 1 error, 1 ok",
        "lora of peft, its own targets: attached to 0 of 1",
        "lora of peft, all-linear: attached to 1 of 1",
    ]
    assert "| a | ✓ | - | ✗ |\n| b | ✓ | - | ✓ |\n" in sweep.page(found)


def test_the_methods_of_the_sweep_exist():
    assert set(sweep.METHODS) <= set(METHODS)
    assert {every_type.autos("whisper", every_type.ADAPTED)[0]} == {"AutoModelForSpeechSeq2Seq"}


def test_a_stack_that_needs_token_ids_has_no_site_for_a_prompt():
    """FSMT's stacks take no embeddings without ids."""
    found = every_type.build("fsmt", "AutoModelForSeq2SeqLM", tiny=True)
    cell = sweep_cells.cell(found, "prompt", sweep_cells.inputs_for(found))
    assert cell.startswith("refused: prompt does not fit")
