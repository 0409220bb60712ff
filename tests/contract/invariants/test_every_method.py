"""Invariants of every method on every architecture.

The matrix is built from the registries, so a new method or architecture is tested automatically.
"""

from __future__ import annotations

import collections
import copy

import pytest
import tiny_models
import torch
from fixtures import train
from matrix import ALL_CELLS, CELLS, LOW_RANK_METHODS, REFUSED, every_cell, example

import adapterhub as ah
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS


def test_the_matrix_covers_every_method_and_architecture():
    assert len(METHODS) >= 11
    assert len(tiny_models.ARCHITECTURES) >= 37
    assert set(tiny_models.CORE) <= set(tiny_models.ARCHITECTURES)
    assert REFUSED.keys() < set(ALL_CELLS)
    refused = [cell for cell in REFUSED if cell[1] in tiny_models.MATRIX]
    assert len(CELLS) + len(refused) == len(METHODS) * len(tiny_models.MATRIX)


def test_the_number_of_refused_cells_is_known():
    """No cell is skipped: it works, or it is refused by design."""
    counts = collections.Counter(method for method, _ in REFUSED)
    updates = dict.fromkeys(LOW_RANK_METHODS, 1)
    expected = {
        "prefix": 1,
        "mam": 1,
        "unipelt": 1,
        "bitfit": 13,
        "head": 3,
        "norms": 1,
        "staged": 1,
        "scalar-mix": 1,
    }
    assert counts == updates | expected


@pytest.mark.parametrize(("method", "architecture"), REFUSED)
def test_a_refused_cell_names_the_supported_methods(method, architecture):
    model = tiny_models.usual_model(architecture)
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(REFUSED[method, architecture]) as error:
        ah.attach(model, example(method))
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    if error.type is SiteError:
        assert method in error.value.problem
        named = error.value.hint.partition(": ")[2].split(", ")
        cells = [m for m, a in REFUSED if a == architecture]
        refused = {m for m in cells if REFUSED[m, architecture] is not AttachError}
        assert set(named) == METHODS.keys() - refused


def logits(model, **inputs):
    inputs = inputs or tiny_models.batch()
    with torch.no_grad():
        return model(**inputs, **tiny_models.decoder_inputs(model, inputs)).logits


@every_cell
def test_initial_outputs_match_the_declared_start(method, architecture):
    """Before training, outputs are unchanged, nearly unchanged, or those of the paper's start."""
    model = tiny_models.usual_model(architecture)
    before = logits(model)
    ah.attach(model, example(method))
    change = (logits(model) - before).abs().max().item()
    if METHODS[method].start == "identity":
        assert change == 0
    elif METHODS[method].start == "near-identity":
        assert 0 < change < 0.1 * before.abs().max().item()
    else:
        assert change > 0


# XLNet uses its mask vector in pre-training only, and its segment parameters with token types only.
UNUSED = {"xlnet": (".mask_emb", ".r_s_bias", ".seg_embed")}


@every_cell
def test_exactly_the_declared_parameters_train(method, architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, example(method))
    declared = {id(p) for p in adapter.parameters()}
    assert declared
    assert {id(p) for p in model.parameters() if p.requires_grad} == declared
    others = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in declared}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    start = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    train(adapter, steps=3)
    for name, tensor in adapter.tensors().items():
        if name.endswith(UNUSED.get(architecture, ())):
            assert tensor.grad is None, name
            continue
        trains = isinstance(tensor, torch.nn.Parameter)
        assert (tensor.grad is not None) == trains, name
        assert torch.equal(tensor, start[name]) != trains, f"{name}: a wrong change, or none"
    for name, parameter in model.named_parameters():
        if name in others:
            assert parameter.grad is None, name
            assert torch.equal(parameter, others[name]), f"{name} changed"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@every_cell
def test_parameter_count_equals_its_formula(method, architecture):
    model = tiny_models.usual_model(architecture)
    formula = example(method).count(ah.anatomy_of(model))
    assert ah.attach(model, example(method)).count() == formula


@every_cell
def test_training_lowers_the_loss(method, architecture):
    torch.manual_seed(0)
    losses = train(ah.attach(tiny_models.usual_model(architecture), example(method)), steps=20)
    assert losses[-1] < losses[0]


@every_cell
def test_detach_restores_every_byte(method, architecture):
    model = tiny_models.usual_model(architecture)
    next(model.parameters()).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    modules = [(name, type(m)) for name, m in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    objects = [id(p) for p in model.parameters()]
    config = model.config.to_dict()
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    expected = logits(model)
    adapter = ah.attach(model, example(method))
    assert set(before) <= set(model.state_dict()), "the backbone's keys are unchanged"
    train(adapter, steps=2)
    adapter.detach()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [(name, type(m)) for name, m in model.named_modules()] == modules
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [id(p) for p in model.parameters()] == objects
    assert model.config.to_dict() == config
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks
    assert torch.equal(logits(model), expected)


WITHOUT_CHECKPOINTING = ("albert", "mpnet", "xlnet", "openai-gpt")


@every_cell
def test_gradient_checkpointing_gives_equal_gradients(method, architecture):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)
        torch.manual_seed(0)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        if checkpointing and architecture in WITHOUT_CHECKPOINTING:
            with pytest.raises(ValueError, match="does not support"):
                tiny_models.enable_gradient_checkpointing(model)
            return
        if checkpointing:
            tiny_models.enable_gradient_checkpointing(model)
        model.train()
        model(**tiny_models.labelled_batch(model)).loss.backward()
        tensors = adapter.tensors().items()
        gradients.append({n: t.grad for n, t in tensors if isinstance(t, torch.nn.Parameter)})
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(
            checkpointed[name], gradient, atol=1e-6 * max(1, size), rtol=1e-4
        )


# Their head reads the last position, padding included, or every position.
READS_THE_END = ("xlnet", "xglm")


def hidden(model, ids, mask):
    with torch.no_grad():
        return model.base_model(input_ids=ids, attention_mask=mask)[0]


@every_cell
def test_padding_does_not_change_a_row(method, architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    short, full = tiny_models.batch(1, 5)["input_ids"], tiny_models.batch(1, 9, seed=3)["input_ids"]
    padded = torch.nn.functional.pad(short, (0, 4), value=tiny_models.PAD)
    ids = torch.cat([padded, full])
    mask = ids.ne(tiny_models.PAD).long()
    if architecture in READS_THE_END:
        together = hidden(model, ids, mask)[mask.bool()]
        alone = [hidden(model, row, torch.ones_like(row))[0] for row in (short, full)]
    else:
        together = logits(model, input_ids=ids, attention_mask=mask)
        alone = [
            logits(model, input_ids=row, attention_mask=torch.ones_like(row))
            for row in (short, full)
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-4)


@every_cell
def test_an_adapter_has_an_effect_only_while_active(method, architecture):
    """Changed tensors change the output, and deactivation restores it."""
    model = tiny_models.usual_model(architecture)
    before = logits(model)
    adapter = ah.attach(model, example(method))
    if adapter.head:
        for module in adapter.head.own.values():
            assert all(p.requires_grad for p in module.parameters())
    with_start = logits(model)
    tiny_models.scramble(adapter)
    assert not torch.allclose(logits(model), with_start, atol=1e-4)
    ah.activate(model)
    assert torch.equal(logits(model), before)
    ah.activate(model, adapter.name)
    assert not torch.allclose(logits(model), with_start, atol=1e-4)


GENERATING = [
    (m, a)
    for m in sorted(METHODS)
    for a in tiny_models.GENERATORS
    if m != "head" and (m, a) not in REFUSED
]


def test_generation_covers_decoders_and_encoder_decoders():
    assert {a for _, a in GENERATING} == {*tiny_models.GENERATORS}
    assert {*tiny_models.GENERATORS} & {*tiny_models.DECODERS}
    assert {*tiny_models.GENERATORS} & {*tiny_models.ENCODER_DECODERS}


WINDOWED = ("gemma3_text",)


@pytest.mark.parametrize(("method", "architecture"), GENERATING)
def test_generation_is_independent_of_cache_and_padding(method, architecture):
    """Neither the KV cache nor left padding changes the generated logits."""
    model = tiny_models.language_model(architecture)
    ids = tiny_models.batch(2, 8, seed=5)["input_ids"]
    ids[:, -1] = 9
    ids[0, :3] = tiny_models.PAD
    bare = generated(model, ids)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    cached = generated(model, ids)
    assert not torch.allclose(cached, bare, atol=1e-3), "the adapter is not applied"
    torch.testing.assert_close(generated(model, ids, use_cache=False), cached, atol=1e-4, rtol=1e-4)
    if architecture in WINDOWED and any(p.site.kind == "embed" for p in adapter.placed):
        return  # the sliding window includes the padding between virtual tokens and the row
    if architecture in tiny_models.ENCODER_DECODERS:  # left padding shifts an encoder's positions
        ids[0] = ids[0].roll(-3)
        cached = generated(model, ids)
    alone = generated(model, ids[:1, ids[0] != tiny_models.PAD])
    torch.testing.assert_close(alone[:, 0], cached[:, 0], atol=1e-4, rtol=1e-4)


def generated(model, ids, **options):
    """Return the logits of eight greedy steps: (steps, batch, vocabulary)."""
    options |= {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": tiny_models.PAD,
    }
    mask = ids.ne(tiny_models.PAD).long()
    output = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options
    )
    return torch.stack(output.logits)
