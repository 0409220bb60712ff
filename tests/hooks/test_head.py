"""Heads: of each row, of layers in place of those of a class, and in fp32 on a lower precision."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import adapterhub as ah
from adapterhub.hooks import head as heads
from adapterhub.hooks.composition import AppliedModules, BatchPlan
from adapterhub.hooks.head import layered_head
from adapterhub.hooks.precision import hold_in_fp32, raise_input
from tests.kit import tiny_models
from tests.kit.selection import long_table


def test_a_copy_of_a_head_loses_the_slot():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    expected = model(x)
    slot = heads.add_variant_slot(model, "0", "user")
    slot.active = AppliedModules(("a",), BatchPlan(["a"]), {"a": nn.Linear(4, 3)})
    copied = heads.without_variant_slots(copy.deepcopy(model[0]))
    assert torch.equal(copied(x), expected)
    assert not copied._forward_hooks
    assert not torch.equal(model(x), expected)


class Expansions(TorchDispatchMode):
    """Notes the shapes that weights are expanded to: a copy for each row of a batch."""

    def __init__(self, weight):
        super().__init__()
        self.shape, self.found = tuple(weight.T.shape), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and tuple(result.shape[1:]) == self.shape:
            self.found.append((str(function), tuple(result.shape)))
        return result


@long_table("architecture", sorted(tiny_models.DECODERS), 4)
def test_a_frozen_head_is_not_copied_for_each_row(architecture):
    """In front of a view of the last position, as of `generate` and its `logits_to_keep`."""
    model = tiny_models.model(architecture, "causal-lm")
    batch = tiny_models.batch()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        pytest.skip("computes all logits")
    with torch.no_grad():
        before = model(**batch, logits_to_keep=1).logits
    ah.attach(model, "lora")
    with Expansions(model.get_output_embeddings().weight) as seen, torch.no_grad():
        after = model(**batch, logits_to_keep=1).logits
    assert seen.found == []
    assert after.shape == before.shape
    assert torch.allclose(after, before, atol=1e-6)


SHAPES = {"classifier.dense.weight": (5, 4), "classifier.dense.bias": (5,),
          "classifier.out.weight": (3, 5)}  # fmt: skip


def test_a_relu_of_the_model_in_between_changes_nothing():
    original = {"pre_classifier": nn.Linear(4, 4), "classifier": nn.Linear(4, 2)}
    own = layered_head(original, SHAPES, "tanh")
    states = torch.randn(6, 4)
    plain = layered_head({"classifier": nn.Linear(4, 2)}, SHAPES, "tanh")["classifier"].eval()
    plain.load_state_dict(own["classifier"].state_dict())
    assert isinstance(own["pre_classifier"], heads.BothSigns)
    found = own["classifier"].eval()(own["pre_classifier"](states).relu())
    torch.testing.assert_close(found, plain(states))


def test_a_head_that_reads_the_first_token_and_drops_as_that_of_the_class():
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 2))
    head = layered_head({"classifier": module}, SHAPES, "tanh")["classifier"].eval()
    assert isinstance(head, heads.LayeredHead)
    assert head.dropout.p == 0.25
    states = torch.randn(2, 7, 4)
    torch.testing.assert_close(head(states), head(states[:, 0]))


@pytest.mark.parametrize(
    ("shapes", "activation", "error"),
    [(SHAPES, "no such", KeyError), ({}, "tanh", KeyError), ({}, heads.NO_ACTIVATION, KeyError),
     ({**SHAPES, "classifier.out.weight": (3,)}, "tanh", ValueError)],
)  # fmt: skip
def test_shapes_of_a_broken_file_are_refused(shapes, activation, error):
    with pytest.raises(error):
        layered_head({"classifier": nn.Linear(4, 2)}, shapes, activation)


# Trained parameters in fp32 on a backbone of lower precision.


def master(module, name):
    """Replace a parameter by a trained fp32 copy."""
    dtype = module.get_parameter(name).dtype
    parameter = nn.Parameter(module.get_parameter(name).detach().float())
    module._parameters[name] = parameter
    hold_in_fp32(module, name, dtype)
    return parameter


@pytest.fixture
def linear():
    return nn.Linear(4, 3).bfloat16()


def test_a_module_computes_in_its_dtype_with_an_fp32_parameter(linear):
    """Also behind an error, and in a copy, which has a parameter of its own."""
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    expected = linear(x)
    weight = master(linear, "weight")
    output = linear(x)
    assert output.dtype == linear(x.float()).dtype == torch.bfloat16
    assert torch.equal(output, expected)
    output.sum().backward()
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert weight.grad.any()
    with pytest.raises(RuntimeError):
        linear(torch.randn(2, 5, dtype=torch.bfloat16))
    assert linear.weight is weight
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(copied(x), expected)


def test_a_head_reads_floating_point_inputs_in_fp32():
    head = nn.Linear(4, 3)
    head.register_forward_pre_hook(raise_input, with_kwargs=True)
    assert head(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    ids = torch.tensor([1, 2])
    assert raise_input(head, (ids,), {})[0][0].dtype == ids.dtype
