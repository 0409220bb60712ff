"""What applies in a call: compositions, rows, contexts and threads; the modules of a slot."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.discovery.layer_sites import expert_blocks
from adapterhub.errors import AttachError, SiteError
from adapterhub.hooks import composition
from adapterhub.hooks.composition import AppliedModules, Average
from adapterhub.hooks.slot import Slot, output_slot
from adapterhub.methods.common.site_module import InputModule
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.own_models import TYPES, expert_logits, expert_model, redraw
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_rows


def test_user_input_becomes_a_composition():
    for given, expected in (
        (None, ()), ("a", "a"), (["a", ["b", "c"]], ("a", ("b", "c"))),
        (Average(["a"]), Average(["a"])), (Average(["a", "b"]), Average(["a", "b"], [0.5, 0.5])),
    ):  # fmt: skip
        assert composition.parse_composition(given) == expected
    with pytest.raises(AttachError):
        composition.parse_composition(3)
    for parts, weights in (([], None), (["a"], [0.5]), (["a", "b"], [1.0])):
        with pytest.raises(AttachError):
            Average(parts, weights)
    node = composition.parse_composition(["a", Average(["b", ("a", "c")])])
    assert list(composition.adapter_names(node)) == ["a", "b", "a", "c"]
    assert composition.has_average(("a", ("b", Average(["c"]))))
    assert not composition.has_average(("a", ("b", "c")))
    assert composition.is_stack([("a", "b"), ("a", "b")])
    for rows in ([("a", "b"), ("a",)], [("a", "a")], [Average(["a"])]):
        assert not composition.is_stack(rows)


def in_thread(function):
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(function).result()


def test_what_is_kept_belongs_to_the_thread_and_the_slot_and_dies_with_it():
    slot = Slot()
    slot.keep("x", value := nn.Linear(2, 2))
    assert slot.kept("x") is value
    assert in_thread(partial(slot.kept, "x")) is None
    assert Slot().kept("x") is None
    assert slot.take("x") is value
    assert slot.take("x", "nothing") == "nothing"
    slot.keep("x", value)
    reference = weakref.ref(value)
    del slot, value
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("method", ["full", "lora", "scalar-mix"])
def test_a_thread_that_kept_nothing_recomputes_again_and_again(method):
    """After the first recomputation, what the thread kept is as before: nothing."""
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    ah.attach(model, method)
    tiny_models.enable_gradient_checkpointing(model)
    model.train()

    def steps():
        for _ in range(3):
            model(**tiny_models.labelled_batch(model)).loss.backward()

    in_thread(steps)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# Experts that return scores or a state too, or that hold a matrix for each in several modules.
BLOCKS = (*TYPES, "lfm2_moe", "zaya", "jetmoe")


def test_changed_inputs_reach_all_modules_of_a_projection():
    model = tiny_models.model("bert")
    for seed, method in enumerate(("lora(sites=['ffn.down'])", "ia3", "ia3(sites=['ffn.down'])")):
        tiny_models.scramble(ah.attach(model, method, name=str(seed)), seed=seed)
    host = model.bert.encoder.layer[0].output.dense
    x = torch.randn(2, 3, host.in_features)
    low_rank, *scales = (module for _, module in host.adapterhub.named_children())
    for names, factor in (("0", 1), ("01", scales[0].scale),
                          ("012", scales[0].scale * scales[1].scale)):  # fmt: skip
        ah.activate(model, *names)
        y = torch.nn.functional.linear(factor * x, host.weight, host.bias)
        expected = y + low_rank.scale * factor * x @ low_rank.A.T @ low_rank.B.T
        torch.testing.assert_close(host(x), expected)
    assert len(host._forward_pre_hooks) == 1


def test_a_parallel_adapter_reads_the_unchanged_input():
    """Its x is the sublayer's input, even if a module changes the projection's input."""

    class Double(InputModule):
        def forward(self, x):
            return 2 * x

    for parallel_first in (True, False):
        model = tiny_models.model("bert")
        if parallel_first:
            tiny_models.scramble(ah.attach(model, "parallel"))
        site = ah.anatomy_of(model).sites["encoder.0.ffn.up"]
        slot = output_slot(model, site, double := Double())
        slot.add("x-2", site, double)
        slot.active = AppliedModules(("x-2",))
        if not parallel_first:
            tiny_models.scramble(ah.attach(model, "parallel"))
        layer = model.bert.encoder.layer[0]
        x = torch.randn(1, 2, 32)
        layer.intermediate(x)
        assert torch.equal(layer.output.dense.adapterhub.kept("sublayer_input"), x)


@long_table(
    ("model_type", "method"),
    list(itertools.product(BLOCKS, ("pfeiffer", "parallel"))),
    6,
    nightly=2,
)
def test_a_block_of_experts_is_a_sublayer_whatever_it_returns(model_type, method):
    """One tensor, or a tuple that its output comes first in; as the input is, or flat; by rows."""
    model = expert_model(model_type)
    adapter = ah.attach(model, f"{method}(sites=[ffn], activation=relu)")
    redraw(adapter)
    blocks = [p for p in adapter.placed if expert_hosts(model) & {p.site.host}]
    placed = blocks[0]
    host = model.get_submodule(placed.site.host)
    x = torch.randn(2, 3, placed.site.d_in)
    with torch.no_grad():
        alone, adapted = host.forward(x), host(x)
        assert type(alone) is type(adapted)
        alone, adapted = (y[0] if isinstance(y, tuple) else y for y in (alone, adapted))
        assert adapted.shape == alone.shape
        down, up = placed.module.down, placed.module.up
        source = x if method == "parallel" else alone.view(x.shape)
        change = up(torch.relu(down(source))) * placed.module.scale
        torch.testing.assert_close(adapted.view(x.shape), alone.view(x.shape) + change)
    expert_logits(model).square().sum().backward()
    assert all(p.module.up.weight.grad.abs().sum() > 0 for p in blocks)
    redraw(ah.attach(model, "pfeiffer(sites=[ffn])", name="other"), seed=1)
    check_rows(model, ["default", "other", None], lambda: expert_logits(model))
    ah.detach(model)


def expert_hosts(model):
    """Return the paths of the blocks of experts in the layers of a model."""
    layers = [path for paths in ah.anatomy_of(model).layers.values() for path in paths]
    return {
        f"{layer}.{block}"
        for layer in layers
        for block in expert_blocks(model.get_submodule(layer))
    }


def scores(model):
    """Generate two tokens; return their scores."""
    ids = tiny_models.batch(2, 6)["input_ids"]
    with torch.no_grad():
        return model.generate(
            input_ids=ids, max_new_tokens=2, do_sample=False, output_scores=True,
            return_dict_in_generate=True, eos_token_id=None, pad_token_id=tiny_models.PAD,
        ).scores  # fmt: skip


def test_a_mix_is_refused_where_heads_read_another_stream():
    """XLNet's generate passes target_mapping: its head reads the second stream."""
    model = tiny_models.model("xlnet", "causal-lm")
    bare, inputs = scores(model), tiny_models.batch()
    with torch.no_grad():
        outputs = model(**inputs).logits
    for method in ("loreft", "scalar-mix"):
        tiny_models.scramble(ah.attach(model, method, name=method), std=0.5)
        with torch.no_grad():
            assert not torch.allclose(model(**inputs).logits, outputs, atol=1e-3)
        with pytest.raises(SiteError, match="stream of hidden states") as error:
            scores(model)
        assert "target_mapping" in error.value.expected
    ah.activate(model)
    assert all(torch.equal(a, b) for a, b in zip(scores(model), bare, strict=True))
    ah.detach(model)
    for method in ["bitfit", "compacter", "full", "houlsby", "ia3", "norms"]:  # others are applied
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter, std=0.5)
        for one, other in zip(scores(model), bare, strict=True):
            assert not torch.allclose(one, other, atol=1e-3), method
        adapter.detach()
