"""What users give in place of a model: each error says what to type, and typing it works."""

import re
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import adapterhub as ah
from adapterhub.adapters.state import backbone_fingerprint, library_inside, remedy
from adapterhub.anatomy.backbone import Backbone
from adapterhub.errors import AttachError
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
PEFT = {
    "lora": peft.LoraConfig(target_modules=["query", "value"]),
    "ia3": peft.IA3Config(target_modules=["key"], feedforward_modules=[]),
    "lora with a head": peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=2, task_type="FEATURE_EXTRACTION"),
    "prompt with a head": peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"),
}
WRAPPERS = {
    "peft": (lambda model: peft.get_peft_model(model, PEFT["lora"]), "model = model.unload()"),
    "of torch": (nn.DataParallel, "model.module"),
    "own": (lambda model: nn.Sequential(nn.ReLU(), model), "model.1; attach first"),
}
VERBS = {
    "attach": lambda model: ah.attach(model, "lora"),
    "attach with a tokenizer": lambda model: ah.attach(model, "lora", tokenizer=word_tokenizer()),
    "load": lambda model: ah.load(model, "./nowhere"),
    "load by name": lambda model: ah.load(model, "polite", registry="./nowhere"),
    "activate": lambda model: ah.activate(model, "default"),
    "detach": ah.detach,
    "route": lambda model: ah.route(model, ["default"]).__enter__(),
    "adapters": ah.adapters,
    "disabled": lambda model: ah.disabled(model).__enter__(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_function_refuses_a_wrapped_model(verb, kind):
    wrap, hint = WRAPPERS[kind]
    with pytest.raises(AttachError, match="is not a model of transformers") as error:
        VERBS[verb](wrap(tiny_models.model("bert")))
    assert hint in error.value.hint


@pytest.mark.parametrize("kind", PEFT)
def test_what_the_error_says_of_a_peft_model_works(kind):
    bare = tiny_models.model("bert")
    wrapped = peft.get_peft_model(tiny_models.model("bert"), PEFT[kind])
    hint = remedy(wrapped)
    if call := re.search(r"model = model\.(\w+)\(\)", hint):
        model = getattr(wrapped, call[1])()
        ah.attach(model, "lora")
        assert backbone_fingerprint(model) == backbone_fingerprint(bare)
    else:
        assert "load_backbone(ID)" in hint
        with pytest.raises(AttachError, match="of the library peft in its layers"):
            ah.attach(wrapped.get_base_model(), "lora")


def test_a_model_with_adapters_of_another_library_in_its_layers_is_refused():
    """Its outputs would be the adapter's and theirs, and its files would not say so."""
    own = tiny_models.model("bert")
    own.add_adapter(PEFT["lora"])  # transformers' integration of peft
    of_peft = peft.get_peft_model(tiny_models.model("bert"), PEFT["lora"])
    for model in (own, of_peft.base_model.model):
        assert library_inside(model) == "peft"
        with pytest.raises(AttachError, match="adapters of the library peft in its layers"):
            ah.attach(model, "lora")
        assert ah.adapters(model) == {}
    model = tiny_models.model("bert")
    assert library_inside(model) is None
    adapters = {"__module__": "adapters.models.bert"}  # the library of this name
    model.__class__ = type("BertWithAdapters", (type(model),), adapters)
    with pytest.raises(AttachError, match="of the library adapters in its layers") as error:
        ah.attach(model, "lora")
    assert "load_backbone(ID)" in error.value.hint
    assert "load(model, FOLDER)" in error.value.hint


def test_a_compiled_model_is_refused():
    compiled = torch.compile(tiny_models.model("bert"), backend="eager")
    with pytest.raises(AttachError) as error:
        ah.attach(compiled, "lora")
    assert error.value.hint == "attach first, then torch.compile(model)"


@pytest.mark.parametrize(
    ("thing", "hint"),
    [
        ("bert-base-uncased", "model, tokenizer = load_backbone('bert-base-uncased')"),
        ("lora", "attach(model, 'lora')"),
        ("lora(rank=4)", "attach(model, 'lora(rank=4)')"),
        (None, "model, tokenizer = load_backbone(ID)"),
        ((1, 2), "model, tokenizer = load_backbone(ID)"),
        (SimpleNamespace(model=3), "model, tokenizer = load_backbone(ID)"),
    ],
)
def test_other_things(thing, hint):
    for verb in ("attach", "load", "activate", "adapters"):
        with pytest.raises(AttachError) as error:
            VERBS[verb](thing)
        assert error.value.hint == hint


def test_a_tokenizer_and_a_pipeline(backbone):
    model, tokenizer = ah.load_backbone(str(backbone))
    assert Backbone.of(model).tokenizer
    with pytest.raises(AttachError) as error:
        ah.attach(tokenizer, "lora")
    assert error.value.hint == "attach(model, METHOD, tokenizer=tokenizer)"
    with pytest.raises(AttachError, match="SimpleNamespace") as error:
        ah.attach(SimpleNamespace(model=model), "lora")
    assert "model.model" in error.value.hint


def test_a_distributed_model(tmp_path):
    store = f"file://{tmp_path / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(tiny_models.model("bert"))
        with pytest.raises(AttachError) as error:
            ah.attach(wrapped, "lora")
    finally:
        torch.distributed.destroy_process_group()
    assert error.value.hint == "use the model inside: model.module; attach first, then wrap"
    ah.attach(wrapped.module, "lora")
