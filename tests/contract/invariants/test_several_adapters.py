"""Several adapters on one backbone do not affect each other, whatever their names."""

import pytest
import torch
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.files.schema import name_problems
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import example, one_of_each_signature
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["attach", "activate", "detach", "none"]), st.integers(0, 2)),
    max_size=12,
)


@settings(max_examples=15)
@given(actions=ACTIONS, methods=st.lists(st.sampled_from(sorted(METHODS)), min_size=3, max_size=3))
def test_no_sequence_of_actions_affects_another_adapter(actions, methods):
    """Attaching, activating or detaching an adapter keeps the others' values and outputs."""
    model = tiny_models.model("bert")
    bare = logits(model)
    live: dict[int, ah.Adapter] = {}
    expected: dict[int, torch.Tensor] = {}
    for action, number in actions:
        if action == "attach" and number not in live:
            live[number] = ah.attach(model, example(methods[number]), name=str(number))
            tiny_models.scramble(live[number], seed=number)
            expected[number] = logits(model)
        elif action == "activate" and number in live:
            ah.activate(model, str(number))
            assert torch.equal(logits(model), expected[number])
        elif action == "detach" and number in live:
            live.pop(number).detach()
        elif action == "none" and live:
            ah.activate(model)
            assert torch.equal(logits(model), bare)
        for adapter in live.values():
            assert all(p.requires_grad for p in adapter.parameters())
        active = {id(p) for a in live.values() if a.active for p in a.parameters()}
        attached = {id(p) for a in live.values() for p in a.parameters()}
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert not live or active <= trainable <= attached
    for number, adapter in live.items():
        ah.activate(model, str(number))
        assert torch.equal(logits(model), expected[number])
        adapter.detach()
    assert torch.equal(logits(model), bare)


NAMES = [
    "lora", "mlp", "default", "head", "attn.q", "bert/encoder", "classifier", "adapterhub",
    "weight", "active", "hf:someone/polite@v2", "naïve 名前 🙂", "x" * 200, "../up", "a.b", "a/b",
    "a b", "forward", "None", "0", "", "größe", "training", "default-0",
]  # fmt: skip
ANY_NAME = st.one_of(
    st.sampled_from(NAMES), st.text(min_size=1, max_size=30),
    st.from_regex(r"[a-z]{1,8}[./][a-z.]{1,8}", fullmatch=True),
)  # fmt: skip


@settings(max_examples=60 if tiny_models.FULL_MATRIX else 4)
@given(names=st.lists(ANY_NAME, min_size=2, max_size=3, unique=True))
@case(names=["a.b", "a/b", "a_b"])
@case(names=["a b", "a-b", "adapterhub"])
@case(names=["mlp", "lora", "training"])
@case(names=["default-0", "größe", "../up"])
def test_a_name_works_everywhere_or_is_refused(names, tmp_path_factory):
    """A name that files accept works everywhere; any other name is refused before training."""
    model = tiny_models.model("bert")
    keys = list(model.state_dict())
    for name in [n for n in names if name_problems(n)]:
        with pytest.raises(AttachError, match="invalid adapter name"):
            ah.attach(model, "lora", name=name)
        names.remove(name)
    if not names:
        return
    each, adapters = {}, []
    for seed, name in enumerate(names):
        adapter = ah.attach(model, ("lora", "pfeiffer", "prefix(length=2)")[seed], name=name)
        tiny_models.scramble(adapter, seed=seed)
        each[name] = logits(model)
        adapters.append(adapter)
    for name, expected in each.items():
        ah.activate(model, name)
        assert torch.equal(logits(model), expected)
    rows = (names * 3)[:3]
    with ah.route(model, rows):
        routed = logits(model)
    torch.testing.assert_close(routed, torch.stack([each[n][i] for i, n in enumerate(rows)]))
    folder = tmp_path_factory.mktemp("names") / "adapter"
    adapters[0].save(folder)
    ah.detach(model, names[0])
    assert ah.load(model, folder).name == names[0]
    assert torch.equal(logits(model), each[names[0]])
    ah.detach(model)
    assert list(model.state_dict()) == keys


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_wrong_names_two_owners_of_a_parameter_and_compiled_models_are_refused():
    """The bare backbone never answers in place of an unknown adapter."""
    model = tiny_models.model("bert")
    for name, method in {"polite": "lora", "full": "full", "part": "freeze"}.items():
        ah.attach(model, method, name=name)
    for text, change in {
        "already attached": lambda: ah.attach(model, "lora", name="polite"),
        "did you mean 'polite'": lambda: ah.activate(model, "polit"),
        "one of 'polite'": lambda: ah.detach(model, "rude"),
        "both train": lambda: ah.activate(model, "full", "part"),
        "no adapter": lambda: (ah.detach(model), ah.detach(model)),
        r"torch\.compile": lambda: (model.compile(), ah.attach(model, "lora")),
    }.items():
        with pytest.raises(AttachError, match=text):
            change()


FROZEN = [name for name in one_of_each_signature() if not METHODS[name].trains_backbone]


@long_table("method", FROZEN, 4)
def test_a_frozen_backbone_has_no_dropout_in_training(method):
    """`train_mode` keeps the backbone's dropout off unless `dropout=True`."""
    model = tiny_models.model("roberta", classifier_dropout=0.0)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.train_mode()
    assert torch.equal(logits(model), expected)
    adapter.train_mode(dropout=True)
    assert not torch.equal(logits(model), expected)
