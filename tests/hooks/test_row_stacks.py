"""Modules of a batch's rows as stacks: equal to groups, and never older than the modules."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.hooks import row_stacks
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.ops import RowStack
from tests.kit import tiny_models
from tests.kit.selection import long_table

# Two adapters of each kind, of different sizes where there is one.
PAIRS = {
    "lora": ("lora(rank=2)", "lora(rank=5, alpha=3)"),
    "pissa": ("pissa(rank=2)", "pissa(rank=3)"),
    "lora and pissa": ("lora(rank=5)", "pissa(rank=3)"),
    "pfeiffer": ("pfeiffer(size=3)", "pfeiffer(size=6, scale=2.0)"),
    "block": ("pfeiffer(size=3, source=block)", "pfeiffer(size=6, source=block)"),
    "scaled-parallel": ("scaled-parallel(size=3)", "scaled-parallel(size=6)"),
    "ia3": ("ia3", "ia3"),
    "prefix": ("prefix(length=3)", "prefix(length=5)"),
}
ROWS = ["b", "a", None, "b", "a"]
every_pair = pytest.mark.parametrize("pair", PAIRS)


def adapted(pair="lora", architecture="bert"):
    model = tiny_models.usual_model(architecture).eval()
    for seed, (name, method) in enumerate(zip("ab", PAIRS[pair], strict=True)):
        tiny_models.scramble(ah.attach(model, method, name=name), seed=seed)
    return model


def batch():
    ids = tiny_models.batch(5, 9, seed=7)["input_ids"]
    ids[1, 6:] = tiny_models.PAD
    ids[1, 5] = tiny_models.EOS
    return {"input_ids": ids, "attention_mask": ids.ne(tiny_models.PAD).long()}


def routed(model, rows=ROWS, grad=False):
    with torch.set_grad_enabled(grad), ah.route(model, rows):
        return model(**batch()).logits


def by_groups(model, rows=ROWS, grad=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "stacked", lambda *_: None)
        return routed(model, rows, grad)


def slots(model):
    return [m for m in model.modules() if isinstance(m, Slot) and m.sites]


def kept(model):
    return [stack for slot in slots(model) for stack in slot.stacks.kept.values()]


def module_of(model, name="a"):
    return ah.adapters(model)[name].placed[0].module


def assert_same(model, rows=ROWS):
    torch.testing.assert_close(routed(model, rows), by_groups(model, rows), atol=1e-5, rtol=1e-5)


@long_table(("pair", "architecture"), list(itertools.product(PAIRS, ("bert", "gpt2", "t5"))), 2)
def test_stacks_equal_groups(pair, architecture):
    model = adapted(pair, architecture)
    if pair == "block" and architecture != "bert":
        return
    assert_same(model)
    assert_same(model, [None, "a", "b", None, "a"])
    biased = pair == "prefix" and architecture == "t5"
    assert bool(kept(model)) != biased, "relative positions widen a bias, group by group"


@every_pair
def test_gradients_equal_those_of_groups(pair):
    model = adapted(pair)
    gradients = []
    for run in (routed, by_groups):
        run(model, grad=True).square().sum().backward()
        parameters = [p for a in ah.adapters(model).values() for p in a.parameters()]
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
    assert len(gradients[0]) == len(gradients[1]) > 0
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert not kept(model), "a stack with gradients belongs to one call"


def test_unchanged_modules_are_stacked_once():
    model = adapted()
    first = routed(model)
    before = kept(model)
    assert torch.equal(routed(model), first)
    assert all(one is other for one, other in zip(kept(model), before, strict=True))
    routed(model, ["a", "b", "a", "b", None])
    routed(model, ["a", None, "a", "a", None])
    assert all(len(slot.stacks.kept) <= row_stacks.KEPT for slot in slots(model))


def _replace(module):
    module.A = nn.Parameter(module.A.detach() * 3)


def _set_data(module):
    module.A.data = module.A.detach() * 3


def _in_place(module):
    with torch.no_grad():
        module.A.mul_(3)


def _one_number_through_data(module):
    module.A.data[1, 2] += 1


def _through_numpy(module):
    module.B.detach().numpy()[3, 1] += 1


def _load(module):
    module.load_state_dict({name: 3 * value for name, value in module.state_dict().items()})


def _optimize(module):
    module.A.grad = 4 * module.A.detach()
    torch.optim.SGD([module.A], lr=0.5).step()
    module.A.grad = None


def _swap(module):
    module._parameters["A"] = nn.Parameter(module.A.detach() * 3)


def _scale(module):
    module.scale *= 3


def _hook(module):
    module.register_forward_hook(lambda module, inputs, y: 3 * y)


def _pre_hook(module):
    module.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0], inputs[1]))


def _forward(module):
    module.forward = lambda x, y: 3 * y


def _parametrize(module):
    class Triple(nn.Module):
        def forward(self, value):
            return 3 * value

    nn.utils.parametrize.register_parametrization(module, "A", Triple())


def _restride(module):
    module.A.data = module.A.data.T.reshape(module.A.shape)


CHANGES = [
    _replace, _set_data, _in_place, _one_number_through_data, _through_numpy, _load, _optimize,
    _swap, _scale, _hook, _pre_hook, _forward, _parametrize, _restride,
]  # fmt: skip


def test_no_change_of_a_module_leaves_an_old_stack(subtests):
    for change in CHANGES:
        with subtests.test(change=change):
            model = adapted()
            with torch.inference_mode():
                before = routed(model)
            assert kept(model)
            change(module_of(model))
            after = routed(model)
            assert not torch.allclose(after[1], before[1], atol=1e-4)
            torch.testing.assert_close(after, by_groups(model), atol=1e-5, rtol=1e-5)
            assert torch.allclose(after[0], before[0], atol=1e-5), "rows of the other adapter stay"


def test_a_change_inside_an_open_route_counts():
    model = adapted()
    with torch.no_grad(), ah.route(model, ROWS):
        before = model(**batch()).logits
        module_of(model).A.data.mul_(3)
        after = model(**batch()).logits
    assert not torch.allclose(after, before, atol=1e-4)
    assert torch.allclose(after, by_groups(model), atol=1e-5)


@pytest.mark.parametrize("pair", ["pfeiffer", "ia3", "prefix", "pissa"])
def test_no_change_of_any_tensor_leaves_an_old_stack(pair):
    model = adapted(pair)
    routed(model)
    for tensor in module_of(model).state_dict().values():
        tensor.data.add_(0.5)
        assert_same(model)


def test_another_activation_function_is_no_old_stack():
    model = adapted("pfeiffer")
    routed(model)
    module_of(model).activation = nn.Tanh()
    assert_same(model)


def test_an_adapter_of_the_same_name_has_its_own_stack():
    model = adapted()
    before = routed(model)
    ah.detach(model, "a")
    assert not any(slot.stacks.kept for slot in slots(model))
    tiny_models.scramble(ah.attach(model, "lora(rank=2)", name="a"), seed=9)
    assert not torch.allclose(routed(model), before, atol=1e-4)
    assert_same(model)


def test_another_dtype_has_another_stack():
    model = adapted()
    routed(model)
    model.to(torch.bfloat16)
    tolerance = {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(routed(model), by_groups(model), **tolerance)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(routed(model), by_groups(model), **tolerance)
    assert_same(model)


def test_a_copied_or_pickled_model_has_no_stacks_of_the_first():
    model = adapted()
    expected = routed(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not kept(twin)
        assert torch.equal(routed(twin), expected)


def test_modules_of_different_kinds_are_computed_by_group():
    model = adapted()
    ah.attach(model, "dora(rank=2)", name="c")
    ah.attach(model, "lora(rank=2, dropout=0.5)", name="d")
    assert_same(model, ["c", "a", None, "b", "c"])
    assert not kept(model)
    assert_same(model, ["d", "a", None, "b", "d"])
    assert kept(model), "dropout is off in evaluation"
    model.train()
    for slot in slots(model):
        slot.stacks.clear()
    with torch.no_grad(), ah.route(model, ["d", "a", None, "b", "d"]):
        model(**batch())
    assert not kept(model)


def test_an_average_is_computed_by_group():
    model = adapted()
    assert_same(model, [ah.Average(["a", "b"]), "a", None, "b", "a"])
    assert not kept(model)


def test_stacked_adapters_have_a_column_each():
    model = adapted()
    assert_same(model, [("a", "b"), "a", None, "b", ("b", "a")])
    assert all(len(stack.columns) == 2 for stack in kept(model))


def test_hooks_for_every_module_are_called():
    model = adapted()
    routed(model)
    called = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(type(module).__name__)
    )
    try:
        routed(model)
    finally:
        handle.remove()
    assert "LoRALayer" in called


def test_numbers_that_are_not_finite_stay_in_their_rows():
    model = adapted()
    before = routed(model)
    module_of(model).A.data.fill_(float("nan"))
    after = routed(model)
    assert torch.isnan(after[1]).all()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_few_modules_for_many_rows_of_one_token_are_called():
    stack = RowStack((torch.zeros(2, 8, 768),), lambda x, t: x)
    column = row_stacks.StackedColumn(stack, None, None)
    plan = row_stacks.BatchPlan([("a",), ("b",)] * 32)
    assert not row_stacks.pays(column, plan, torch.zeros(64, 1, 384))
    assert row_stacks.pays(column, plan, torch.zeros(64, 16, 384))
    each = row_stacks.BatchPlan([("a",), ("b",)])
    assert row_stacks.pays(column, each, torch.zeros(2, 1, 384))


def test_large_modules_are_computed_by_group(monkeypatch):
    monkeypatch.setattr(row_stacks, "LARGEST", 100)
    model = adapted()
    assert_same(model)
    assert not kept(model)


def test_without_memcmp_tensors_are_compared(monkeypatch):
    monkeypatch.setattr(row_stacks, "_MEMCMP", None)
    model = adapted()
    routed(model)
    module_of(model).A.data[0, 0] += 1
    assert_same(model)


def test_modules_of_several_kinds_are_called_and_not_read(monkeypatch):
    """A batch of many methods has several at each site: nothing is copied for a stack of these."""
    model = adapted()
    tiny_models.scramble(ah.attach(model, "dora(rank=2)", name="c"), seed=4)
    monkeypatch.setattr(row_stacks, "Snapshot", None)
    assert_same(model, ["a", "c", "b", "c", "a"])
