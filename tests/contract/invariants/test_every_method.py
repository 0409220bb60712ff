"""What holds for every method on every architecture. Both lists are the registries: what is
registered is tested."""

from __future__ import annotations

import collections
import copy

import pytest
import tiny_models
import torch
from fixtures import train
from matrix import ALL, CELLS, REFUSED, UPDATES, example, matrix

import adapterhub as ah
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS


def test_the_matrix_covers_every_method_and_architecture():
    assert len(METHODS) >= 11
    assert len(tiny_models.ARCHITECTURES) >= 37
    assert set(tiny_models.SIZES) == set(tiny_models.ARCHITECTURES)
    assert set(tiny_models.CORE) <= set(tiny_models.ARCHITECTURES)
    assert REFUSED.keys() < set(ALL)
    refused = [cell for cell in REFUSED if cell[1] in tiny_models.MATRIX]
    assert len(CELLS) + len(refused) == len(METHODS) * len(tiny_models.MATRIX)


def test_the_number_of_refused_cells():
    """By method: a cell is never skipped, it works or it is refused on purpose."""
    counts = collections.Counter(method for method, _ in REFUSED)
    updates = dict.fromkeys(UPDATES, 1)
    expected = {
        "prefix": 9,
        "mam": 9,
        "unipelt": 9,
        "bitfit": 12,
        "head": 3,
        "norms": 1,
        "staged": 1,
        "scalar-mix": 1,
    }
    assert counts == updates | expected


@pytest.mark.parametrize(("method", "architecture"), REFUSED)
def test_a_refused_cell_names_the_methods_that_fit(method, architecture):
    model = tiny_models.usual_model(architecture)
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(REFUSED[method, architecture]) as error:
        ah.attach(model, example(method))
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    if error.type is SiteError:
        assert method in error.value.problem
        named = error.value.hint.partition(": ")[2].split(", ")
        here = {m: kind for (m, a), kind in REFUSED.items() if a == architecture}
        refused_here = {m for m, kind in here.items() if kind is not AttachError}
        assert set(named) == METHODS.keys() - refused_here


def logits(model, **inputs):
    inputs = inputs or tiny_models.batch()
    with torch.no_grad():
        return model(**inputs, **tiny_models.decoder_inputs(model, inputs)).logits


@matrix
def test_start(method, architecture):
    """Before training the backbone computes what it did, or what the paper's
    initialization gives."""
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


# XLNet masks by a vector in pre-training alone, and has segments only where token types are given.
UNUSED = {"xlnet": (".mask_emb", ".r_s_bias", ".seg_embed")}


@matrix
def test_exactly_the_declared_parameters_train(method, architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, example(method))
    declared = {id(p) for p in adapter.parameters()}
    assert declared
    assert {id(p) for p in model.parameters() if p.requires_grad} == declared
    others = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in declared}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    own = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    train(adapter, steps=3)
    for name, tensor in adapter.tensors().items():
        if name.endswith(UNUSED.get(architecture, ())):
            assert tensor.grad is None, name
            continue
        trains = isinstance(tensor, torch.nn.Parameter)
        assert (tensor.grad is not None) == trains, name
        assert torch.equal(tensor, own[name]) != trains, f"{name} did not move, or should not have"
    for name, parameter in model.named_parameters():
        if name in others:
            assert parameter.grad is None, name
            assert torch.equal(parameter, others[name]), f"{name} moved"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@matrix
def test_parameter_count_equals_its_formula(method, architecture):
    model = tiny_models.usual_model(architecture)
    formula = example(method).count(ah.anatomy_of(model))
    assert ah.attach(model, example(method)).count() == formula


@matrix
def test_loss_falls(method, architecture):
    torch.manual_seed(0)
    losses = train(ah.attach(tiny_models.usual_model(architecture), example(method)), steps=20)
    assert losses[-1] < losses[0]


@matrix
def test_detach_restores_everything(method, architecture):
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
    assert set(before) <= set(model.state_dict()), "base keys are unchanged"
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


@matrix
def test_gradient_checkpointing_gives_equal_gradients(method, architecture):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)
        torch.manual_seed(0)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        if checkpointing and architecture in WITHOUT_CHECKPOINTING:
            with pytest.raises(ValueError, match="does not support"):
                tiny_models.recompute(model)
            return
        if checkpointing:
            tiny_models.recompute(model)
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


# Here the end of a row, padding or not, is what the head reads, or the head is at every token.
READS_THE_END = ("xlnet", "xglm")


def hidden(model, ids, mask):
    with torch.no_grad():
        return model.base_model(input_ids=ids, attention_mask=mask)[0]


@matrix
def test_a_padded_batch_equals_its_single_rows(method, architecture):
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


@matrix
def test_the_adapter_has_an_effect(method, architecture):
    """Trained tensors change the output: no method is silently not applied."""
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
def test_generate_with_and_without_cache_agrees(method, architecture):
    """A batch of two, one row padded on the left: neither the cache nor the padding changes it."""
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
        return  # the window counts the padding between the virtual tokens and the row's own
    if (
        architecture in tiny_models.ENCODER_DECODERS
    ):  # left padding moves the positions of an encoder's tokens
        ids[0] = ids[0].roll(-3)
        cached = generated(model, ids)
    alone = generated(model, ids[:1, ids[0] != tiny_models.PAD])
    torch.testing.assert_close(alone[:, 0], cached[:, 0], atol=1e-4, rtol=1e-4)


def generated(model, ids, **options):
    """The logits of eight greedy steps: (steps, batch, vocabulary)."""
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
