"""Adapters that come and go on one backbone: what is active, names, memory."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, BertTokenizerFast

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.files.manifest import name_problems


def logits(model, **options):
    with torch.no_grad():
        return model(**(options or tiny_models.batch())).logits


def with_adapters(methods, architecture="bert"):
    model = tiny_models.model(architecture)
    for name, method in methods.items():
        tiny_models.scramble(ah.attach(model, method, name=name), seed=len(name) + ord(name[0]))
    return model


def test_an_average_is_the_mean_of_the_outputs_at_a_site():
    model = with_adapters({"a": "lora", "b": "lora(rank=2)", "c": "pfeiffer"})
    ah.activate(model, ah.Average(["a", "b", "c"], weights=[0.5, 0.3, 0.2]))
    query = model.bert.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    a, b = (m for _, m in query.adapterhub.named_children())
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    updates = [m.scale * x @ m.A.T @ m.B.T for m in (a, b)]
    expected = y + 0.5 * updates[0] + 0.3 * updates[1]  # c has no module here: it gives y
    torch.testing.assert_close(query(x), expected)


def test_the_head_of_an_average_is_the_mean_of_the_heads():
    model = with_adapters({"a": "head", "b": "head"})
    each = [(ah.activate(model, name), logits(model))[1] for name in "ab"]
    ah.activate(model, ah.Average(["a", "b"], weights=[0.25, 0.75]))
    torch.testing.assert_close(logits(model), 0.25 * each[0] + 0.75 * each[1])
    ah.activate(model, ah.Average(["a", "a"]))
    torch.testing.assert_close(logits(model), each[0])


def test_compositions_nest():
    """An average of a stack, and a stack on an average."""
    model = with_adapters({"a": "pfeiffer", "b": "houlsby", "c": "lora"})
    layer = model.bert.encoder.layer[0].output.dense
    x, y = torch.randn(1, 2, 48), None
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    a, b = (m for _, m in layer.adapterhub.named_children())
    ah.activate(model, ah.Average([("a", "b"), "b"]), "a")
    middle = 0.5 * b(x, a(x, y)) + 0.5 * b(x, y)
    torch.testing.assert_close(layer(x), a(x, middle))


def test_what_has_no_average_is_refused_and_nothing_changes():
    model = with_adapters({"a": "lora", "p": "prefix", "v": "prompt", "full": "full", "n": "norms"})
    ah.activate(model, "a")
    expected = logits(model)
    with pytest.raises(AttachError, match="virtual tokens cannot be averaged") as error:
        ah.activate(model, ah.Average(["a", "p", "v"]))
    assert error.value.offenders == ("'p': prefix", "'v': prompt")
    with pytest.raises(AttachError, match="shared by the whole batch") as error:
        ah.activate(model, ah.Average(["full", "n", "a"]))
    assert error.value.offenders == ("'full': full", "'n': norms")
    assert "lora" in error.value.expected
    assert "norms" not in error.value.expected
    with pytest.raises(AttachError, match="sum to 1"):
        ah.Average(["a", "b"], weights=[1, 1])
    with pytest.raises(AttachError, match="is not the name of an adapter"):
        ah.activate(model, 3)
    assert torch.equal(logits(model), expected)


def test_an_average_of_different_labels_is_refused(tmp_path):
    other = tiny_models.model("bert", num_labels=2)
    ah.attach(other, "lora").save(tmp_path / "two")
    model = with_adapters({"three": "lora"})
    ah.load(model, tmp_path / "two", name="two", any_backbone=True)
    with pytest.raises(AttachError, match="different labels") as error:
        ah.activate(model, ah.Average(["two", "three"]))
    assert len(error.value.offenders) == 2


def test_a_part_of_the_active_average_is_not_detached():
    model = with_adapters({"a": "lora", "b": "lora"})
    keys = set(model.state_dict())
    ah.activate(model, ah.Average(["a", "b"]))
    with pytest.raises(AttachError, match="part of the active average"):
        ah.detach(model, "a")
    ah.activate(model, "a", "b")
    assert set(model.state_dict()) == keys
    ah.detach(model, "a")
    ah.activate(model, ah.Average(["b"]))
    ah.detach(model)
    assert not hasattr(model, "_adapterhub")
    assert not [n for n, m in model.named_modules() if n.endswith("adapterhub")]


def test_a_failed_attach_leaves_the_average_active():
    model = with_adapters({"a": "lora", "b": "lora"})
    ah.activate(model, ah.Average(["a", "b"]))
    expected = logits(model)
    with pytest.raises(ah.AdapterhubError):
        ah.attach(model, {"lora": {"sites": ["cross.q"]}}, name="c")
    assert torch.equal(logits(model), expected)


def test_a_route_refuses_what_cannot_be_routed():
    model = with_adapters({"polite": "lora", "full": "full", "bias": "bitfit"})
    with pytest.raises(AttachError, match="shared by the whole batch") as error:
        ah.route(model, ["polite", "full", "bias"]).__enter__()
    assert error.value.offenders == ("'full': full", "'bias': bitfit")
    with pytest.raises(AttachError, match=r"'polit'; did you mean 'polite'\?, 'rude'"):
        ah.route(model, ["polit", "rude", None]).__enter__()
    for wrong in ("polite", []):
        with pytest.raises(AttachError, match="is not a list of rows"):
            ah.route(model, wrong).__enter__()
    with pytest.raises(AttachError, match="no adapter is attached"):
        ah.route(tiny_models.model("bert"), ["polite"]).__enter__()
    with (
        pytest.raises(AttachError, match=r"the route has 2 rows, the batch at .* has 3"),
        ah.route(model, ["polite", None]),
    ):
        logits(model)
    with ah.route(model, ["full"] * 3):  # one adapter for all rows is that adapter
        together = logits(model)
    ah.activate(model, "full")
    assert torch.equal(together, logits(model))


@pytest.mark.parametrize("before", [(), ("a",), ("b", "a"), (ah.Average(["a", "b"]),)])
def test_leaving_a_route_restores_what_was_active(before):
    plain = all(isinstance(part, str) for part in before)
    model = with_adapters({"a": "mam" if plain else "lora", "b": "houlsby"})
    ah.activate(model, *before)
    expected, keys = logits(model), set(model.state_dict())
    with pytest.raises(KeyError):
        interrupted(model)
    assert torch.equal(logits(model), expected)
    assert set(model.state_dict()) == keys


def interrupted(model):
    """A route with another one inside, that ends with an error."""
    with ah.route(model, ["a", "b", None]):
        inner = logits(model)
        with ah.route(model, ["b", "b", "a"]):
            assert not torch.allclose(logits(model), inner)
        assert torch.equal(logits(model), inner)
        for change in (
            lambda: ah.activate(model, "a"),
            lambda: ah.attach(model, "lora", name="c"),
            lambda: ah.detach(model, "a"),
            lambda: ah.detach(model),
        ):
            with pytest.raises(AttachError, match="inside route"):
                change()
        assert torch.equal(logits(model), inner)
        raise KeyError


def test_an_error_inside_a_forward_pass_leaves_nothing_behind():
    model = with_adapters({"a": "prompt", "b": "scalar-mix", "c": "parallel"})
    bare = (ah.activate(model), logits(model))[1]
    with (
        pytest.raises(AttachError, match="the batch at"),
        ah.route(model, ["a", "b", "c", None]),
    ):
        logits(model)
    ah.activate(model)
    assert torch.equal(logits(model), bare)


def test_a_fresh_pooler_follows_its_row(tmp_path):
    """What the checkpoint lacked is each adapter's own, and stands beside the others'."""
    tiny_models.model("bert", "causal-lm", is_decoder=False).save_pretrained(tmp_path / "mlm")
    (tmp_path / "mlm" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    BertTokenizerFast(vocab=str(tmp_path / "mlm" / "vocab.txt")).save_pretrained(tmp_path / "mlm")
    model, _ = ah.load_backbone(str(tmp_path / "mlm"), task="classification", labels=["no", "yes"])
    for seed, name in enumerate("ab"):
        adapter = ah.attach(model, "lora", name=name)
        assert {c.name.rpartition(".")[2] for c in adapter.changed} == {"weight", "bias"}
        tiny_models.scramble(adapter, seed=seed, std=1.0)
    each = {}
    for name in ("a", "b", None):
        ah.activate(model, *([name] if name else []))
        each[name] = logits(model)
    rows = ["b", None, "a"]
    with ah.route(model, rows):
        found = logits(model)
    expected = torch.stack([each[name][i] for i, name in enumerate(rows)])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(each["a"], each["b"])
    ah.activate(model, ah.Average(["a", "b"]))
    assert torch.isfinite(logits(model)).all()


FULL = tiny_models.MATRIX == tiny_models.ARCHITECTURES
LOADED = {"mam": "bert", "prompt": "gpt2", "full": "distilbert"}  # each mechanism once
MORE = {"lora": "bert", "scalar-mix": "bert", "ia3": "gpt2", "dora": "bert", "compacter": "bert"}
CYCLES = [*LOADED.items(), *(MORE.items() if FULL else ())]


def footprint(model):
    """Everything on a model that a cycle could leave behind."""
    modules = dict(model.named_modules())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values())
    attributes = {name: set(vars(m)) for name, m in modules.items()}
    return set(modules), hooks, attributes, set(model.state_dict())


def rss():
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("method", "architecture"), [*LOADED.items(), *(MORE.items() if FULL else ())]
)
def test_a_hundred_load_and_unload_cycles_leave_memory_flat(method, architecture, tmp_path):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, method)
    adapter.save(tmp_path / "adapter")
    adapter.detach()
    before, registered = footprint(model), set(AttentionInterface._global_mapping)

    def cycle(use):
        loaded = ah.load(model, tmp_path / "adapter", name="served")
        if use:
            logits(model)
            with ah.route(model, ["served"] * 3):
                logits(model)
        ah.detach(model)
        return weakref.ref(loaded)

    last = [cycle(use=True) for _ in range(10)][-1]
    gc.collect()
    objects, tensors, resident = len(gc.get_objects()), live_tensors(), rss()
    for number in range(90):
        last = cycle(use=number % 10 == 0)
    gc.collect()
    assert last() is None
    assert live_tensors() == tensors
    assert len(gc.get_objects()) - objects < 90, "less than one object a cycle"
    assert rss() - resident < 8e6
    assert footprint(model) == before
    assert set(AttentionInterface._global_mapping) == registered


def live_tensors():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


NAMES = [
    "lora", "mlp", "default", "head", "attn.q", "bert/encoder", "classifier", "adapterhub",
    "weight", "active", "hf:someone/polite@v2", "naïve 名前 🙂", "x" * 200, "../up", "a.b", "a/b",
    "a b", "forward", "None", "0", "",
]  # fmt: skip
ANY_NAME = st.one_of(st.sampled_from(NAMES), st.text(min_size=1, max_size=30))


@settings(max_examples=60 if FULL else 8, deadline=None)
@given(names=st.lists(ANY_NAME, min_size=2, max_size=3, unique=True))
def test_any_name_lives_through_everything(names, tmp_path_factory):
    """A name that files take is taken everywhere; another one is refused before any training."""
    model = tiny_models.model("bert")
    keys = list(model.state_dict())
    for name in [n for n in names if name_problems(n)]:
        with pytest.raises(AttachError, match="invalid adapter name"):
            ah.attach(model, "lora", name=name)
        names.remove(name)
    each, adapters = {}, []
    for seed, name in enumerate(names):
        adapter = ah.attach(model, ("lora", "pfeiffer", "prefix(length=2)")[seed], name=name)
        tiny_models.scramble(adapter, seed=seed)
        each[name] = logits(model)
        adapters.append(adapter)
    for name, expected in each.items():
        ah.activate(model, name)
        assert torch.equal(logits(model), expected)
    if not names:
        return
    rows = (names * 3)[:3]
    with ah.route(model, rows):
        found = logits(model)
    torch.testing.assert_close(found, torch.stack([each[n][i] for i, n in enumerate(rows)]))
    folder = tmp_path_factory.mktemp("names") / "adapter"
    adapters[0].save(folder)
    ah.detach(model, names[0])
    assert ah.load(model, folder).name == names[0]
    assert torch.equal(logits(model), each[names[0]])
    ah.detach(model)
    assert list(model.state_dict()) == keys


def test_names_that_look_alike_stay_apart():
    names = ["a.b", "a/b", "a_b", "a b", "a-b"]
    model = with_adapters({})
    each = []
    for seed, name in enumerate(names):
        tiny_models.scramble(ah.attach(model, "lora", name=name), seed=seed)
        each.append(logits(model))
    with ah.route(model, ["a_b", "a/b", "a.b"]):
        found = logits(model)
    torch.testing.assert_close(found, torch.stack([each[2][0], each[1][1], each[0][2]]))
    assert len({tuple(e.flatten().tolist()) for e in each}) == len(names)
