"""Adapters on top of others: active with them, saved with them, detached with them."""

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.activation import with_foundations
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.state import find_state
from adapterhub.errors import AttachError, FileError, MergeError, MismatchError
from adapterhub.files.native import Saved
from adapterhub.methods import METHODS
from tests.kit import matrix, tiny_adapters, tiny_models
from tests.kit.selection import ALL, cases_of, long_table

# What cannot be below others, and what cannot be on top of `bitfit`, which changes the backbone.
NOT_BELOW = {"head": "it has a task head only"}
SAME_PARAMETERS = {"bitfit", "full", "freeze", "unfreeze", "staged"}


@pytest.fixture
def lang(tmp_path):
    """An adapter of the bare backbone."""
    return tiny_adapters.save_alone(tmp_path / "lang")


TRIED = sorted(METHODS if ALL else {*matrix.representatives().values()})


@long_table("method", TRIED, 4, nightly=4)
def test_every_method_can_be_below_and_is_the_same_when_loaded(method, tmp_path):
    tiny_adapters.save_alone(tmp_path / "lang", matrix.example(method))
    if method in NOT_BELOW:
        with pytest.raises(MismatchError) as error:
            ah.load(tiny_models.model("bert"), tmp_path / "lang", frozen=True)
        assert NOT_BELOW[method] in error.value.offenders
        return
    expected = tiny_adapters.save_on(tmp_path / "task", [tmp_path / "lang"])
    assert_loads_as(tmp_path / "task", expected)


def test_every_method_can_be_on_top(lang, tmp_path, subtests):
    for method in cases_of(TRIED, 8, nightly=4):
        with subtests.test(method):
            task = tmp_path / method / "task"
            expected = tiny_adapters.save_on(task, [lang], matrix.example(method))
            assert_loads_as(task, expected)


def assert_loads_as(folder, expected):
    """Load an adapter on a new model: its outputs are the expected ones; detached, the model's."""
    model = tiny_models.model("bert")
    before, flags = tiny_adapters.outputs(model), [p.requires_grad for p in model.parameters()]
    adapter = ah.load(model, folder)
    assert len(adapter.on) == 1
    assert torch.equal(tiny_adapters.outputs(model), expected)
    assert not any(p.requires_grad for p in adapter.on[0].parameters())
    assert all(p.requires_grad for p in adapter.parameters())
    adapter.detach()
    assert find_state(model) is None
    assert torch.equal(tiny_adapters.outputs(model), before)
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.parametrize("method", sorted(SAME_PARAMETERS))
def test_two_that_change_the_same_parameters_are_refused(method, tmp_path):
    tiny_adapters.save_alone(tmp_path / "lang", "bitfit")
    model = tiny_models.model("bert")
    below = ah.load(model, tmp_path / "lang", frozen=True)
    expected = tiny_adapters.outputs(model)
    with pytest.raises(AttachError, match="both train"):
        ah.attach(model, method, name="task", on=["lang"])
    assert ah.adapters(model) == {"lang": below}
    assert torch.equal(tiny_adapters.outputs(model), expected)


def test_the_order_of_the_list_is_that_of_the_stack(lang, tmp_path):
    """b(a(y)) is not a(b(y)): the adapters are of one site."""
    other = tiny_adapters.save_alone(tmp_path / "domain", "houlsby(size=4)", seed=5)
    model = tiny_adapters.attach_on([lang, other]).model
    forward = tiny_adapters.outputs(model)
    ah.activate(model, "lang", "domain", "task")
    assert torch.equal(tiny_adapters.outputs(model), forward)
    backward = tiny_adapters.outputs(tiny_adapters.attach_on([other, lang]).model)
    assert not torch.allclose(forward, backward)


def test_a_chain_of_three(lang, tmp_path):
    tiny_adapters.save_on(tmp_path / "domain", [lang], "houlsby(size=4)")
    expected = tiny_adapters.save_on(tmp_path / "task", [tmp_path / "domain"])
    model = tiny_models.model("bert")
    task = ah.load(model, tmp_path / "task")
    assert [*ah.adapters(model)][-1] == "task"
    assert [below.name[:4] for each in (task, task.on[0]) for below in each.on] == ["doma", "lang"]
    assert torch.equal(tiny_adapters.outputs(model), expected)
    task.detach()
    assert ah.adapters(model) == {}


def test_two_share_one_foundation(lang, tmp_path):
    for seed, name in enumerate(("first", "second"), start=7):
        tiny_adapters.attach_on([lang], name=name, seed=seed).save(tmp_path / name)
    model = tiny_models.model("bert")
    bare = tiny_adapters.outputs(model)
    first = ah.load(model, tmp_path / "first")
    alone = tiny_adapters.outputs(model)
    second = ah.load(model, tmp_path / "second")
    assert first.on == second.on
    assert len(ah.adapters(model)) == 3
    with ah.route(model, ["first", None, "second"]):
        routed = tiny_adapters.outputs(model)
    torch.testing.assert_close(routed[0], alone[0])
    torch.testing.assert_close(routed[1], bare[1])
    torch.testing.assert_close(routed[2], tiny_adapters.outputs(model)[2])
    first.detach()
    assert len(ah.adapters(model)) == 2
    second.detach()
    assert ah.adapters(model) == {}
    assert torch.equal(tiny_adapters.outputs(model), bare)


def test_what_others_are_on_cannot_be_detached(lang):
    task = tiny_adapters.attach_on([lang])
    with pytest.raises(AttachError, match="others are on it") as error:
        ah.detach(task.model, "lang")
    assert error.value.hint == "detach(model, 'task') first"
    task.detach()
    assert list(ah.adapters(task.model)) == ["lang"]  # the user loaded it
    ah.detach(task.model)


def test_only_frozen_adapters_can_be_below(lang):
    model = tiny_models.model("bert")
    ah.load(model, lang)
    with pytest.raises(AttachError, match="loaded frozen") as error:
        ah.attach(model, "lora", name="task", on=["lang", "nowhere"])
    assert error.value.offenders == ("'lang' is not frozen", "'nowhere' is not attached")
    assert list(ah.adapters(model)) == ["lang"]


def test_a_foundation_does_not_train_and_its_dropout_is_off(tmp_path):
    tiny_adapters.save_alone(tmp_path / "lang", "lora(rank=2, dropout=0.5)")
    task = tiny_adapters.attach_on([tmp_path / "lang"])
    below = task.on[0]
    before = {name: tensor.clone() for name, tensor in below.tensors().items()}
    task.train_mode()
    assert task.model.training
    assert not any(placed.module.training for placed in below.placed)
    task.model(**tiny_models.labelled_batch(task.model)).loss.backward()
    assert all(t.grad is None for t in below.tensors().values())
    assert all(torch.equal(t, before[n]) for n, t in below.tensors().items())
    assert any(t.grad is not None for t in task.tensors().values())


def test_a_failed_load_leaves_the_model_as_it_was(lang, tmp_path):
    tiny_adapters.save_on(tmp_path / "task", [lang])
    model = tiny_models.model("bert")
    ah.attach(model, "ia3", name="task")
    before = tiny_adapters.outputs(model)
    with pytest.raises(AttachError, match="already attached"):
        ah.load(model, tmp_path / "task")
    assert list(ah.adapters(model)) == ["task"]
    assert ah.adapters(model)["task"].active
    assert torch.equal(tiny_adapters.outputs(model), before)


def test_files_are_not_loaded_without_those_below(lang, tmp_path):
    tiny_adapters.save_on(tmp_path / "task", [lang])
    with pytest.raises(FileError, match="was trained on other adapters") as error:
        load_folder(tiny_models.model("bert"), tmp_path / "task")
    assert "lang, sha256" in error.value.offenders[0]


def test_new_tokens_cannot_be_below(backbone, tmp_path):
    options = {"task": "classification", "labels": ["a", "b"]}
    model, _ = ah.load_backbone(str(backbone), new_tokens=["<new>"], **options)
    ah.attach(model, "lora", name="lang").save(tmp_path / "lang")
    model, _ = ah.load_backbone(str(backbone), **options)
    with pytest.raises(MismatchError, match="no adapter can be on top") as error:
        ah.load(model, tmp_path / "lang", frozen=True)
    assert error.value.offenders == ("new token: '<new>'",)


def test_layers_above_that_the_checkpoint_lacks_belong_to_the_one_on_top(tmp_path):
    tiny_models.model("bert", "causal-lm").save_pretrained(tmp_path / "bare")  # without a pooler

    def backbone():
        labels = ["a", "b"]
        return ah.load_backbone(str(tmp_path / "bare"), task="classification", labels=labels)[0]

    lang = ah.attach(backbone(), "lora(rank=2)", name="lang")
    tiny_models.scramble(lang)
    lang.save(tmp_path / "lang")
    assert any(".fresh." in name for name in Saved.at(tmp_path / "lang").manifest.tensors)
    model = backbone()
    ah.load(model, tmp_path / "lang", frozen=True)
    task = ah.attach(model, "lora(rank=2)", name="task", on=["lang"])
    tiny_models.scramble(task, seed=3)
    task.save(tmp_path / "task")
    expected = tiny_adapters.outputs(model)
    other = backbone()
    ah.load(other, tmp_path / "task")
    assert torch.equal(tiny_adapters.outputs(other), expected)


def test_merging_merges_the_chain_and_combining_refuses(tmp_path):
    tiny_adapters.save_alone(tmp_path / "lang", "lora(rank=2)")
    expected = tiny_adapters.save_on(tmp_path / "task", [tmp_path / "lang"])
    model = tiny_models.model("bert")
    ah.load(model, tmp_path / "task")
    with pytest.raises(MergeError, match="on top of others cannot be combined"):
        ah.combine(model, ["task"])
    assert [each.name[:4] for each in ah.merge(model, "task").adapters] == ["lang", "task"]
    torch.testing.assert_close(tiny_adapters.outputs(model), expected, atol=1e-4, rtol=1e-4)
    ah.unmerge(model)
    assert torch.equal(tiny_adapters.outputs(model), expected)


def test_a_foundation_applies_once_in_each_stack(lang):
    model = tiny_adapters.attach_on([lang]).model
    ah.attach(model, "ia3", name="other", on=["lang"])
    adapters = ah.adapters(model)
    cases = [  # asked for, applied
        ("task", ("lang", "task")),
        (("lang", "task"), ("lang", "task")),
        (("task", "lang"), ("lang", "task")),
        (("task", "other"), ("lang", "task", "other")),
        (("task", ("other",)), ("lang", "task", "other")),
        ("lang", "lang"),
        ((), ()),
        (ah.Average(["task", "other"]), ah.Average([("lang", "task"), ("lang", "other")])),
        (("task", ah.Average(["other"])), ("lang", "task", ah.Average([("other",)]))),
    ]
    for asked, expected in cases:
        assert with_foundations(adapters, asked) == expected
