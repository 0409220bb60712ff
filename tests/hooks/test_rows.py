"""Modules of a batch's rows as stacks: equal to calls of each, and never older than the modules.

The first tests hold the adapters, whose modules are in banks; the last ones do not.
"""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import adapterhub as ah
from adapterhub.adapters.route import PackedRoutes, TokenRun
from adapterhub.hooks.rows import ROOM
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.ops import constant_form
from tests.kit import tiny_models
from tests.kit.selection import long_table

METHODS = (
    "lora(rank=2)", "lora(rank=5, alpha=3)", "pissa(rank=2)", "dora(rank=3)", "ia3",
    "pfeiffer(size=3)", "houlsby(size=4)", "scaled-parallel(size=6)", "compacter(size=4, n=4)",
    "prefix(length=3)", "prefix(length=5)", "prompt(length=2)", "vera(rank=4)",
    "randlora(rank=8, alpha=8)", "road(group=8)", "ssf",
)  # fmt: skip


def held(architecture="bert", methods=METHODS):
    model = tiny_models.usual_model(architecture).eval()
    for number, method in enumerate(methods):
        attach(model, method, f"a{number}", seed=number)
    return model


def attach(model, method, name, seed):
    adapter = ah.attach(model, method, name=name)
    tiny_models.scramble(adapter, seed=seed)
    adapter.hold()
    return adapter


def routed(model, rows, grad=False):
    ids = tiny_models.batch(len(rows), 9, seed=7)["input_ids"]
    ids[-1, 6:] = tiny_models.PAD
    ids[-1, 5] = tiny_models.EOS
    mask = ids.ne(tiny_models.PAD).long()
    with torch.set_grad_enabled(grad), ah.route(model, rows):
        return model(input_ids=ids, attention_mask=mask).logits


def by_groups(model, rows, grad=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "stacked", lambda *_: None)
        return routed(model, rows, grad)


def assert_same(model, rows, atol=1e-5):
    torch.testing.assert_close(routed(model, rows), by_groups(model, rows), atol=atol, rtol=1e-5)


def slots(model):
    return [m for m in model.modules() if isinstance(m, Slot) and m.sites]


def banks(model):
    return [bank for slot in slots(model) for bank in slot.banks.banks if bank]


def module_of(model, name="a0"):
    return ah.adapters(model)[name].placed[0].module


ORDERS = {
    "sorted": lambda names: [*names, None],
    "mixed": lambda names: [names[-1], None, *names[::-1], names[0], None, *names[:2]],
    "of one": lambda names: [names[0]] * 3 + [None, names[1]],
}


@long_table(
    ("order", "architecture"), list(itertools.product(ORDERS, ("bert", "gpt2", "t5", "llama"))), 4
)
def test_all_methods_in_one_batch(order, architecture):
    """In fp64: in fp32 both ways are up to 2e-5 from the exact logits of T5, by rounding."""
    model = held(architecture).double()
    for adapter in ah.adapters(model).values():
        adapter.hold()
    assert_same(model, ORDERS[order](list(ah.adapters(model))), atol=1e-12)


@long_table("method", METHODS, 3)
def test_each_method_beside_others_and_in_low_precision(method):
    model = held(methods=(method, method, "lora(rank=2)"))
    assert_same(model, ["a0", "a1", None, "a0", "a1"])
    assert_same(model, ["a2", "a0", "a1", ("a2", "a0"), ("a1", "a2")])
    rows = ["a1", "a0", "a2", None, "a0"]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(routed(model, rows), by_groups(model, rows), atol=0.1, rtol=0.05)
    model.to(torch.bfloat16)
    torch.testing.assert_close(routed(model, rows), by_groups(model, rows), atol=0.1, rtol=0.05)


def test_no_held_module_is_called_or_stacked_again(monkeypatch):
    model = held()
    monkeypatch.setattr("adapterhub.hooks.slot.from_modules", None)
    rows = [n for n, m in zip(ah.adapters(model), METHODS, strict=True) if "prompt" not in m]
    for adapter in ah.adapters(model).values():
        for placed in adapter.placed if adapter.name in rows else ():
            placed.module.register_forward_pre_hook(lambda *_: pytest.fail("a module was called"))
    routed(model, rows)


def test_affine_methods_are_one_product():
    affine = ("lora(rank=2)", "dora(rank=3)", "pissa(rank=2)", "ia3", "vera(rank=2)",
              "miss(rank=2)")  # fmt: skip
    model = held(methods=affine)
    at_values = [s for s in slots(model) if next(iter(s.sites.values())).role == "attn.v"]
    assert at_values
    assert all(len(slot.banks.banks) == 1 for slot in at_values)
    kinds = [ah.adapters(model)[f"a{n}"].hold().kinds for n in (0, 1, 2, 4, 5)]
    assert all(kind == kinds[0] for kind in kinds)


@pytest.mark.parametrize(
    "method",
    ["dora(rank=3)", "ia3", "compacter(size=4, n=4)", "pissa(rank=2)", "lora(rank=2)", "delora"],
)
def test_a_constant_form_computes_the_same(method):
    model = held(methods=(method,))
    for slot, key in ah.adapters(model)["a0"].occupied:
        site = slot.sites[key]
        host = model.get_submodule(site.host)
        form, module = slot.constant(host, key), slot.placed(key)
        if form is module:
            assert "InputScale" in type(module).__name__
            continue
        x, y = torch.randn(2, 3, site.d_in), torch.randn(2, 3, site.d_out)
        weight = (host.weight, host.bias) if module.reads_weight else ()
        torch.testing.assert_close(form(x, y), module(x, y, *weight), atol=1e-5, rtol=1e-5)
        other = copy.copy(module)
        other.__class__ = type("Other", (type(module),), {"forward": lambda self, x, y: y})
        assert constant_form(other, None) is other, "a subclass does not inherit the form"


def test_a_module_that_may_change_is_read_in_each_call():
    model = held(methods=METHODS[:2])
    tiny_models.scramble(ah.attach(model, "lora(rank=3)", name="free"), seed=5)
    rows = ["a0", "free", "a1"]
    routed(model, rows)
    module_of(model, "free").A.data.add_(0.5)
    assert_same(model, rows)
    ah.attach(model.train(), "lora(rank=2, dropout=0.5)", name="drops").hold()
    assert not any("drops" in str(bank.keys) for bank in banks(model))


def test_places_grow_by_doubling_and_are_used_again():
    model = held(methods=("lora(rank=2)",) * ROOM)
    assert {len(bank.keys) for bank in banks(model)} == {ROOM}
    for number in range(ROOM, 3 * ROOM):
        attach(model, "lora(rank=2)", f"a{number}", seed=number)
    assert {len(bank.keys) for bank in banks(model)} == {4 * ROOM}
    pointers = [bank.stack.tensors[0].data_ptr() for bank in banks(model)]
    for name in ("a1", "a5"):
        ah.detach(model, name)
    attach(model, "lora(rank=1)", "other", seed=50)
    attach(model, "lora(rank=2)", "a5", seed=51)
    assert [bank.stack.tensors[0].data_ptr() for bank in banks(model)] == pointers
    assert_same(model, ["other", "a5", "a0", None, "a11"])


def test_banks_shrink_and_leave_with_their_modules():
    model = held(methods=("lora(rank=2)",) * (4 * ROOM))
    with torch.inference_mode():
        for n in range(2, 4 * ROOM):
            ah.detach(model, f"a{n}")
    attach(model, "lora(rank=2)", "new", seed=3)
    assert {len(bank.keys) for bank in banks(model)} == {ROOM}
    assert_same(model, ["a1", None, "a0", "new"])
    ah.detach(model, "new")
    tensors = [weakref.ref(t) for t in ah.adapters(model)["a1"].tensors().values()]
    tensors += [weakref.ref(t) for bank in banks(model) for t in bank.stack.tensors]
    attach(model, "prompt(length=2)", "last", seed=1)
    for name in ("a0", "a1"):
        ah.detach(model, name)
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors)


@pytest.mark.parametrize(
    "methods",
    [
        ("lora(rank=2)", "lora(rank=30)", "lora(rank=28)"),  # sizes are very different
        ("pfeiffer(size=3)", "pfeiffer(size=3, activation=gelu)", "pfeiffer(size=2)"),
    ],
)
def test_modules_that_differ_have_banks_of_their_own(methods, monkeypatch):
    monkeypatch.setattr("adapterhub.hooks.rows.SMALL", 64)
    model = held(methods=methods)
    assert {len(slot.banks.banks) for slot in slots(model)} == {2}
    assert_same(model, ["a2", "a0", "a1", None])


def test_copies_of_a_model_hold_nothing():
    model = held(methods=METHODS[:4])
    rows = list(ah.adapters(model))
    expected = routed(model, rows)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not banks(twin)
        module_of(twin).A.data.mul_(3)
        assert not torch.allclose(routed(twin, rows)[0], expected[0], atol=1e-4)
    assert torch.equal(routed(model, rows), expected)


@pytest.mark.parametrize("names", ["aba", "a-b", "acb-", "ac", "-c"])
def test_a_packed_row_of_several_banks(names):
    model = tiny_models.language_model("llama").eval()
    for name, method in {"a": "lora(rank=2)", "b": "ia3", "c": "road(group=8)"}.items():
        attach(model, method, name, seed=ord(name))
    texts, length = len(names), 6
    ids = tiny_models.batch(texts, length, seed=2)["input_ids"]
    rows = [None if name == "-" else name for name in names]
    routes = PackedRoutes(model)
    places = torch.arange(texts * length)
    text, position = places // length, places % length
    seen = (text[:, None] == text) & (position[:, None] >= position)
    with torch.no_grad(), routes.open([TokenRun(name, length, 0) for name in rows]):
        packed = model(
            input_ids=ids.view(1, -1),
            attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
            position_ids=position[None],
            use_cache=False,
        ).logits
    with torch.no_grad(), ah.route(model, rows):
        expected = model(ids).logits
    torch.testing.assert_close(packed.view(expected.shape), expected, atol=1e-5, rtol=1e-5)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("attach"), st.integers(0, 5), st.sampled_from(METHODS)),
        st.tuples(st.just("detach"), st.integers(0, 5), st.none()),
        st.tuples(st.just("change"), st.integers(0, 5), st.none()),
        st.tuples(st.just("route"), st.integers(0, 10_000), st.none()),
    ),
    min_size=4,
    max_size=14,
)


# Modules narrower than one that has left are padded to its width; a change counts once it is held.
@example([("attach", 0, "lora(rank=2)"), ("attach", 1, "lora(rank=9)"), ("detach", 1, None),
          ("attach", 2, "lora(rank=3)"), ("attach", 3, "lora(rank=12)"), ("route", 0, None),
          ("change", 0, None)])  # fmt: skip
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
def test_random_histories(history):
    """Adapters come, change, leave and come back; no row gets the values of another one."""
    model, there = tiny_models.usual_model("bert").eval(), {}
    for seed, (what, number, method) in enumerate([*history, ("route", 1, None)]):
        name = f"a{number}"
        if what == "attach" and name not in there:
            there[name] = attach(model, method, name, seed)
        elif what == "detach" and name in there:
            ah.detach(model, name)
            del there[name]
        elif what == "change" and name in there:
            for parameter in there[name].parameters():
                parameter.data.mul_(1.5)
            there[name].hold()
        elif what == "route" and there:
            rows = [*there, None, *there]
            start = number % len(rows)
            assert_same(model, rows[start:] + rows[:start])


# Two adapters of each kind, of different sizes where there is one.
PAIRS = {
    "lora": ("lora(rank=2)", "lora(rank=5, alpha=3)"),
    "lora and pissa": ("lora(rank=5)", "pissa(rank=3)"),
    "pfeiffer": ("pfeiffer(size=3)", "pfeiffer(size=6, scale=2.0)"),
    "block": ("pfeiffer(size=3, source=block)", "pfeiffer(size=6, source=block)"),
    "scaled-parallel": ("scaled-parallel(size=3)", "scaled-parallel(size=6)"),
    "ia3": ("ia3", "ia3"),
    "prefix": ("prefix(length=3)", "prefix(length=5)"),
}
ROWS = ["a1", "a0", None, "a1", "a0"]


def free(pair="lora", architecture="bert"):
    model = tiny_models.usual_model(architecture).eval()
    for seed, method in enumerate(PAIRS[pair]):
        tiny_models.scramble(ah.attach(model, method, name=f"a{seed}"), seed=seed)
    return model


def stacked_slots(model, rows=ROWS, grad=False):
    """Count the results of a pass that are stacks."""
    results, stacked = [], Slot.stacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "stacked", lambda *args: results.append(stacked(*args)) or results[-1])
        routed(model, rows, grad)
    return sum(map(bool, results))


@long_table(("pair", "architecture"), list(itertools.product(PAIRS, ("bert", "gpt2", "t5"))), 2)
def test_stacks_of_a_call_equal_groups(pair, architecture):
    if pair == "block" and architecture != "bert":
        return
    model = free(pair, architecture)
    assert_same(model, ROWS)
    assert_same(model, [None, *ROWS[1:]])
    biased = pair == "prefix" and architecture == "t5"
    assert bool(stacked_slots(model)) != biased, "relative positions widen a bias, group by group"


@pytest.mark.parametrize("pair", ["held", *PAIRS])
def test_gradients_equal_those_of_groups(pair):
    model, gradients = held(methods=METHODS[:6]) if pair == "held" else free(pair), []
    rows = list(ah.adapters(model)) if pair == "held" else ROWS
    for run in (routed, by_groups):
        run(model, rows, grad=True).square().sum().backward()
        parameters = [p for a in ah.adapters(model).values() for p in a.parameters()]
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
    assert len(gradients[0]) == len(gradients[1]) > 0
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert stacked_slots(model, rows, grad=True)


class Triple(nn.Module):
    def forward(self, value):
        return 3 * value


def parametrize(module):
    nn.utils.parametrize.register_parametrization(module, "A", Triple())


CHANGES = {
    "through numpy": lambda module: module.A.detach().numpy().__imul__(3),
    "its scale": lambda module: setattr(module, "scale", 3 * module.scale),
    "a hook": lambda module: module.register_forward_hook(lambda module, inputs, y: 3 * y),
    "a hook of inputs": lambda module: module.register_forward_pre_hook(
        lambda module, inputs: (3 * inputs[0], inputs[1])
    ),
    "its forward": lambda module: setattr(module, "forward", lambda x, y: 3 * y),
    "a parametrization": parametrize,
}


def test_every_change_of_a_module_counts_in_an_open_route(subtests):
    for name, change in CHANGES.items():
        with subtests.test(name):
            model = free()
            ids = tiny_models.batch(5, 9, seed=7)["input_ids"]
            with torch.inference_mode(), ah.route(model, ROWS):
                before = model(ids).logits
                change(module_of(model))
                after = model(ids).logits
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Slot, "stacked", lambda *_: None)
                    torch.testing.assert_close(after, model(ids).logits, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(after[1], before[1], atol=1e-4)
            assert torch.allclose(after[0], before[0], atol=1e-5), "rows of the other adapter stay"


@pytest.mark.parametrize(
    ("rows", "stacks"),
    [
        (["c", "a0", None, "a1", "c"], False),  # another kind
        (["d", "a0", None, "a1", "d"], True),  # dropout is off in evaluation
        ([ah.Average(["a0", "a1"]), "a0", None, "a1", "a0"], False),
        ([("a0", "a1"), "a0", None, "a1", ("a1", "a0")], True),
    ],
)
def test_modules_are_stacked_where_they_are_alike(rows, stacks):
    model = free()
    ah.attach(model, "dora(rank=2)", name="c")
    ah.attach(model, "lora(rank=2, dropout=0.5)", name="d")
    assert_same(model, rows)
    assert bool(stacked_slots(model, rows)) == stacks
    if "d" in rows:
        assert not stacked_slots(model.train(), rows)


def test_hooks_for_every_module_are_called_and_other_rows_have_no_nan():
    model, called = free(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(type(module).__name__)
    )
    try:
        routed(model, ROWS)
    finally:
        handle.remove()
    assert "LoRALayer" in called
    before = routed(model, ROWS)
    module_of(model).A.data.fill_(float("nan"))
    after = routed(model, ROWS)
    assert torch.isnan(after[1]).all()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
