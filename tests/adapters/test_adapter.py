"""The handle: tensors by name, labels, parts in place of others, and several heads."""

import pytest
import torch
from transformers import LevitConfig, LevitForImageClassification

import adapterhub as ah
from adapterhub.adapters.adapter import NamedHead
from adapterhub.adapters.heads import add_heads, select_head
from adapterhub.errors import AttachError, ConfigError
from tests.kit import tiny_models


@pytest.mark.parametrize("method", ["full", "freeze", "unfreeze"])
def test_what_a_module_computed_of_its_parameters_is_computed_anew(method):
    """LeViT keeps its attention biases by position while it does not train."""
    sizes = {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1],
             "depths": [1, 1, 1], "key_dim": [8, 8, 8]}  # fmt: skip
    model = LevitForImageClassification(LevitConfig(**sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("attention_biases"):
            torch.nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 64, 64)
    bare = model(pixels).logits
    for _ in range(2):
        adapter = ah.attach(model, method, name="a")
        with torch.no_grad():
            for changed in adapter.changed:
                changed.own.add_(1.0 * changed.name.endswith("attention_biases"))
        with ah.disabled(model):
            assert torch.equal(model(pixels).logits, bare)
        assert not torch.equal(model(pixels).logits, bare)
        ah.detach(model)
        assert torch.equal(model(pixels).logits, bare)


# Several heads of one adapter: one applies at a time, and detaching restores the model.

TASKS = {
    "a": NamedHead("classification", "classification", ("no", "yes")),
    "b": NamedHead("classification", "classification", ("x", "y", "z")),
    "c": NamedHead("regression", "regression"),
}


def attached(architecture="bert", seed=0):
    torch.manual_seed(0)
    model = tiny_models.model(architecture, "classification").eval()
    adapter = ah.attach(model, "lora(rank=2)")
    before = torch.get_rng_state()
    add_heads(adapter, TASKS, seed)
    assert torch.equal(torch.get_rng_state(), before)
    return model, adapter


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2", "bart"])
def test_the_selected_head_applies_and_trains_alone(architecture):
    model, adapter = attached(architecture)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]])}
    for name, outputs in (("a", 2), ("b", 3), ("c", 1), ("a", 2)):
        select_head(adapter, name)
        assert model(**inputs).logits.shape[-1] == outputs
        assert model.config.num_labels == outputs
        assert adapter.labels == TASKS[name].labels
        trained = {n.split(".")[1] for n, t in adapter.tensors().items()
                   if n.startswith("heads.") and t.requires_grad}  # fmt: skip
        assert trained == {name}
    names = {n.split(".")[1] for n in adapter.tensors() if n.startswith("heads.")}
    assert names == set(TASKS)


def test_losses_follow_the_problem_type_of_the_head():
    ids = torch.tensor([[5, 6, 7, 2], [5, 6, 8, 2]])
    for name, labels in (("b", torch.tensor([0, 2])), ("c", torch.tensor([0.5, 2.0]))):
        model, adapter = attached()
        select_head(adapter, name)
        adapter.train_mode()
        model(input_ids=ids, labels=labels).loss.backward()
        learned = [n for n, t in adapter.tensors().items() if t.grad is not None]
        assert {n.split(".")[1] for n in learned if n.startswith("heads.")} == {name}


def test_heads_are_drawn_from_the_seed_and_the_name_alone():
    def weights(seed):
        _, adapter = attached(seed=seed)
        return {n: t.detach().clone() for n, t in adapter.tensors().items() if n[:6] == "heads."}

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["heads.b.classifier.weight"], other["heads.b.classifier.weight"])
    assert first["heads.b.classifier.weight"].std() > 0
    assert torch.equal(first["heads.b.classifier.bias"], torch.zeros(3))


def test_a_saved_folder_loads_one_head_at_a_time_and_routes_rows(tmp_path):
    model, adapter = attached()
    ids = torch.tensor([[5, 6, 7, 2], [5, 9, 8, 2]])
    expected = {}
    for name in TASKS:
        select_head(adapter, name)
        with torch.no_grad():
            expected[name] = model(input_ids=ids).logits
    adapter.save(tmp_path / "saved")
    adapter.detach()
    assert model.config.num_labels == model.classifier.out_features
    assert not torch.equal(model(input_ids=ids).logits[:, :2], expected["a"])
    with pytest.raises(ConfigError, match="3 heads") as error:
        ah.load(model, tmp_path / "saved")
    assert "a, b, c" in str(error.value)
    for name in TASKS:
        loaded = ah.load(model, tmp_path / "saved", head=name)
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, expected[name])
        assert loaded.labels == TASKS[name].labels
    with ah.route(model, ["default-b", "default-c"]), torch.no_grad():
        logits = model(input_ids=ids).logits
    assert torch.allclose(logits[0], expected["b"][0], atol=1e-6)
    assert torch.allclose(logits[1, :1], expected["c"][1], atol=1e-6)
    headless = ah.load(model, tmp_path / "saved", head=False, name="bare")
    assert headless.head is None


def test_an_inactive_adapter_keeps_its_choice_and_a_missing_head_is_refused():
    model, adapter = attached()
    ah.activate(model, None)
    select_head(adapter, "b")
    assert model.config.num_labels == 3
    ah.activate(model, "default")
    assert model(input_ids=torch.tensor([[5, 6, 7, 2]])).logits.shape[-1] == 3
    with pytest.raises(ConfigError, match="unknown head 'd'"):
        select_head(adapter, "d")
    without = tiny_models.model("gpt2", "causal-lm")
    with pytest.raises(AttachError, match="no task head"):
        add_heads(ah.attach(without, "lora"), TASKS, 0)


def modes(modules):
    return {each.training for module in modules for each in module.modules()}


@pytest.mark.parametrize("architecture", ["distilbert", "roberta", "llama", "t5"])
def test_heads_that_are_out_of_the_model_follow_its_mode(architecture):
    """`train` and `eval` reach the head of an inactive adapter and the head that it replaces."""
    model = tiny_models.usual_model(architecture)
    for name in "ab":
        ah.attach(model.eval(), "lora", name=name)
    for mode in (True, False, True):
        model.train(mode)
        for active in ((), ("a",), ("b",)):
            ah.activate(model, *active)
            assert modes([model]) == {mode}
        for adapter in ah.adapters(model).values():  # a route may use each
            assert modes(adapter.head.own.values()) == {mode}
    ah.detach(model)
    assert modes([model]) == {True}
    adapter = ah.attach(model, "lora")
    adapter.train_mode()
    assert modes(adapter.head.own.values()) == {True}
    with ah.disabled(model):  # a reference has no dropout
        assert modes(adapter.head.original.values()) == {False}
