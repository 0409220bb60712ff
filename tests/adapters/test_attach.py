"""`ah.attach` and `ah.detach`: all or nothing, and what is built before the model changes."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import transformers
from forge import refused
from torch.utils import backend_registration

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.methods import METHODS
from tests.kit import devices, tiny_models
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
    ah.attach(other, "lora").detach()
    third = tiny_models.model("bert", seed=1)
    third.classifier.weight = other.bert.embeddings.word_embeddings.weight  # a parameter alone
    ah.attach(other, "full")
    with refused(third, "shares modules"):
        ah.attach(third, "lora")


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


def test_an_adapter_that_is_attached_in_inference_mode_can_train(tmp_path, subtests):
    for method in cases_of(one_of_each_signature(), 8):
        model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
        with subtests.test(method):
            for load in (False, True):
                with torch.inference_mode():
                    if load:
                        adapter = ah.load(model, tmp_path / method)
                    else:
                        adapter = ah.attach(model, example(method))
                    assert torch.is_inference_mode_enabled()
                assert not any(t.is_inference() for t in adapter.tensors().values())
                model(**tiny_models.labelled_batch(model)).loss.backward()
                assert all(p.grad is not None for p in adapter.parameters())
                if not load:
                    adapter.save(tmp_path / method)
                adapter.detach()


@pytest.mark.parametrize("method", ["full", "bitfit", "norms", "freeze", "unfreeze"])
def test_weights_in_float64_are_not_called_quantized(method):
    model = tiny_models.model("bert").double()
    with pytest.raises(SiteError) as error:
        ah.attach(model, method)
    assert "it is stored as float64" in str(error.value)
    assert "model.float()" in str(error.value)
    assert "quantized" not in str(error.value)


def test_labels_without_names_are_numbered_in_the_adapter_alone(tmp_path):
    """PVT's configuration has a number of labels, and no names."""
    config = transformers.PvtConfig(
        depths=[1] * 4, hidden_sizes=[4, 8, 8, 8], num_attention_heads=[1] * 4, num_labels=3
    )
    model = transformers.PvtForImageClassification(config).eval()
    assert config.id2label is None
    adapter = ah.attach(model, "head", name="a")
    assert adapter.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    adapter.save(tmp_path / "a")
    adapter.detach()
    assert config.id2label is None
    assert ah.load(model, tmp_path / "a").labels == adapter.labels
    with ah.route(model, ["a", None]):
        assert model(torch.zeros(2, 3, 224, 224)).logits.shape == (2, 3)
