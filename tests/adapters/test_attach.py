"""`ah.attach` and `ah.detach`: all or nothing."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from forge import refused
from torch import nn
from torch.utils import backend_registration

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError
from adapterhub.methods import METHODS
from tests.kit import devices, tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.matrix import example, one_of_each_signature
from tests.kit.selection import cases_of


@pytest.mark.parametrize(
    ("method", "name", "says"),
    [
        ("lora(sites=['attn.x'])", "a", "attn.x"),
        ("lora(sites=['ffn'], rank=0)", "a", "at least 1"),
        (["lora", "lora"], "a", "two methods of one kind"),
        ("lora", "../up", "invalid adapter name"),
        ("adapterfusion(adapters=['x', 'y'])", "a", "no such adapter"),
    ],
)
def test_a_refused_adapter_leaves_the_model_as_it_was(method, name, says):
    model = tiny_models.model("bert")
    with refused(model, says):
        ah.attach(model, method, name=name)


def test_a_new_adapter_is_the_active_one_and_alone_trains():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="a")
    adapter = ah.attach(model, "ia3", name="b")
    state = get_state(model)
    assert [a.name for a in state.adapters.values() if a.active] == ["b"]
    own = {id(p) for p in adapter.parameters()}
    assert all(p.requires_grad for p in adapter.parameters())
    backbone = [p for n, p in model.named_parameters() if "adapterhub" not in n]
    assert not any(p.requires_grad for p in backbone if id(p) not in own)


def test_detach_without_a_name_detaches_all():
    model = tiny_models.model("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ah.attach(model, "bitfit", name="a")
    ah.attach(model, "lora", name="b")
    ah.detach(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_detach_names_the_nearest_adapter():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="did you mean 'polite'"):
        ah.detach(model, "polit")


class Wrapper(nn.Module):
    """A user's own module around a backbone."""

    def __init__(self, model):
        super().__init__()
        self.inner = model


@pytest.mark.parametrize(
    ("wrap", "hint"),
    [
        (lambda model: nn.DataParallel(model), "model.module"),
        (Wrapper, "model.inner"),
        (lambda model: "tiny-bert", "load_backbone"),
        (lambda model: None, "load_backbone"),
    ],
)
def test_what_is_not_a_model_of_transformers_is_refused(wrap, hint, tmp_path):
    model = tiny_models.model("bert")
    ah.attach(model, "lora").save(tmp_path / "adapter")
    ah.detach(model)
    wrapped = wrap(model)
    for attempt in (
        lambda: ah.attach(wrapped, "lora"),
        lambda: ah.attach(wrapped, "lora", tokenizer=word_tokenizer()),
        lambda: ah.load(wrapped, tmp_path / "adapter"),
        lambda: ah.load(wrapped, "polite", registry=tmp_path),
    ):
        with pytest.raises(AttachError, match="not a model of transformers") as error:
            attempt()
        assert hint in error.value.hint


def sharing_models():
    one, other = (tiny_models.model("bert", seed=seed) for seed in (0, 1))
    other.bert = one.bert
    return one, other


@pytest.mark.parametrize("method", ["lora", "prefix", "prompt", "head", "norms", "full"])
def test_models_that_share_modules_do_not_both_have_adapters(method):
    one, other = sharing_models()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    adapter = ah.attach(one, method)
    with refused(other, "shares modules with a BertForSequenceClassification that has adapters"):
        ah.attach(other, method)
    with refused(one.bert, "shares modules"):
        ah.attach(one.bert, "lora")
    ah.attach(one, "ia3", name="second")
    ah.detach(one)
    for model in (other, one):
        adapter = ah.attach(model, method)
        adapter.detach()
        assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_with_adapters_shares_nothing(duplicate):
    one, other = sharing_models()
    ah.attach(one, "lora")
    twin = duplicate(one)
    ah.attach(twin, "lora", name="second")
    other.bert = twin.bert
    with refused(other, "shares modules"):
        ah.attach(other, "lora")
    ah.detach(twin)
    ah.attach(other, "lora")


def test_models_that_share_a_parameter_do_not_both_have_adapters():
    one, other = tiny_models.model("bert"), tiny_models.model("bert", seed=1)
    other.classifier.weight = one.bert.embeddings.word_embeddings.weight
    ah.attach(one, "full")
    with refused(other, "shares modules"):
        ah.attach(other, "lora")


def test_an_adapter_that_is_attached_in_inference_mode_can_train(tmp_path, subtests):
    for method in cases_of(one_of_each_signature(), 4):
        with subtests.test(method):
            check_inference_mode(method, tmp_path / method)


def check_inference_mode(method, folder):
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    with torch.inference_mode():
        adapter = ah.attach(model, example(method))
        assert torch.is_inference_mode_enabled()
    assert not any(t.is_inference() for t in adapter.tensors().values())
    model(**tiny_models.labelled_batch(model)).loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())
    adapter.save(folder)
    adapter.detach()
    with torch.inference_mode():
        adapter = ah.load(model, folder)
    model(**tiny_models.labelled_batch(model)).loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())


# Methods that train the backbone take the weights there, which are of a class, for quantized ones.
BESIDE = [m for m in sorted(METHODS) if not METHODS[m].trains_backbone]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in Python",
)
def test_each_method_is_attached_on_the_device_of_the_model():
    """In a fork, for a device is registered for the rest of a process."""
    methods = cases_of(BESIDE)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as fork:
        problems = fork.submit(devices.attached_elsewhere, methods).result(timeout=280)
    assert len(problems) >= max(len(methods), 2 * len(methods) - 10)
    assert not {cell: problem for cell, problem in problems.items() if problem}
