"""A pass takes what is active when it begins; the contract suite runs it in threads."""

from __future__ import annotations

import torch

import adapterhub as ah
from adapterhub.adapters.state import get_state
from tests.kit import tiny_models


def two_adapters(model):
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora", name=name), seed=seed)
    return model


def hooks_of(model):
    return {
        name: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }


def test_watching_is_undone_with_the_last_adapter(subtests):
    for architecture in tiny_models.MATRIX:
        with subtests.test(architecture=architecture):
            model = tiny_models.usual_model(architecture)
            before = hooks_of(model)
            attributes = {n: set(vars(m)) for n, m in model.named_modules()}
            ah.attach(model, "prompt")
            assert hooks_of(model) != before
            ah.detach(model)
            assert hooks_of(model) == before
            assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes


def test_a_pass_ends_with_what_it_began_with():
    model = two_adapters(tiny_models.language_model("llama"))
    batch = tiny_models.batch()
    ah.activate(model, "a")
    expected = model(**batch).logits
    handle = model.get_submodule("model.layers.0").register_forward_hook(
        lambda *_: get_state(model)._make_active(get_state(model).activation.without(other))
    )
    other = get_state(model).adapters["a"]
    interrupted = model(**batch).logits
    handle.remove()
    assert not torch.equal(interrupted, expected), "a change by the pass itself applies at once"
    ah.activate(model, "a")
    assert torch.equal(model(**batch).logits, expected)


def test_replacing_exchanges_one_activation_for_another():
    model = tiny_models.model("bert")
    tiny_models.scramble(ah.attach(model, "bitfit", name="a"))
    passes, own = get_state(model).passes, model.bert.encoder.layer[0].attention.self.query.bias
    assert passes.replacing is passes.active
    passes.replace(None)
    assert model.bert.encoder.layer[0].attention.self.query.bias is not own
    passes.replace(passes.active)
    assert model.bert.encoder.layer[0].attention.self.query.bias is own


def test_labels_of_a_route_are_those_of_the_loss_only():
    model = two_adapters(tiny_models.model("bert"))
    before = dict(model.config.id2label)
    for adapter in get_state(model).adapters.values():
        adapter.head.own["classifier"] = torch.nn.Linear(
            adapter.head.own["classifier"].in_features, 5
        )
        adapter.head.labels["id2label"] = {i: f"c{i}" for i in range(5)}
    ah.activate(model)
    labels = torch.tensor([4, 0, 3])
    with ah.route(model, ["a", "b", "a"]):
        outputs = model(**tiny_models.batch(), labels=labels)
        assert model.config.id2label == before
    expected = torch.nn.functional.cross_entropy(outputs.logits, labels)
    torch.testing.assert_close(outputs.loss, expected)
