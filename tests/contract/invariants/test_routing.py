"""Routes, and stacks and averages of adapters: what they compute, and what is refused.

That each row of a batch equals a run with its adapter alone holds for every cell of the matrix:
test_cells.py.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertTokenizerFast

import adapterhub as ah
from adapterhub.errors import AttachError
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.matrix import alone, attach_two
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import with_adapters
from tests.kit.tiny_models import logits


def generated(model, ids, beams=1, **options):
    """Generate six tokens; return the sequences and the logits of each step."""
    output = model.generate(
        ids, attention_mask=ids.ne(tiny_models.PAD).long(), max_new_tokens=6, min_new_tokens=6,
        do_sample=False, pad_token_id=tiny_models.PAD, num_beams=beams,
        return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)


def prompts(architecture):
    ids = tiny_models.batch(3, 8, seed=5)["input_ids"]
    ids[:, -1] = 9
    if architecture not in tiny_models.ENCODER_DECODERS:
        ids[0, :3] = tiny_models.PAD  # left padding
    return ids


BEAMS = [(m, a) for m in ("lora", "houlsby", "mam", "prompt", "ia3")
         for a in ("llama", "t5", "bart") if a in tiny_models.MATRIX]  # fmt: skip


@long_table(("method", "architecture"), BEAMS, 3)
def test_beams_and_returned_sequences_follow_their_row(method, architecture):
    model = tiny_models.language_model(architecture)
    attach_two(model, method)
    ids, rows = prompts(architecture), ["a", None, "b"]
    options = {"beams": 3, "num_return_sequences": 2}
    solo = [alone(model, name, lambda: generated(model, ids, **options)[0]) for name in rows]
    with ah.route(model, rows):
        together = generated(model, ids, **options)[0]
    for i, each in enumerate(solo):
        assert torch.equal(together[2 * i : 2 * i + 2], each[2 * i : 2 * i + 2])


MIXED = ["lora", "pfeiffer", "prompt(length=4)", "ia3", "scalar-mix", "prefix", "mam"]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2", "opt", "xlnet", "t5", "bart"])
def test_different_methods_run_in_one_batch(architecture):
    """One row per method, one with a stack, one with an average."""
    model = tiny_models.model(architecture)
    names = []
    for number, method in enumerate(MIXED):
        try:
            tiny_models.scramble(ah.attach(model, method, name=method), seed=number)
            names.append(method)
        except ah.AdapterhubError:
            assert architecture == "xlnet"
    names += [None, ("pfeiffer", "ia3"), ah.Average(["pfeiffer", "ia3"], [0.25, 0.75])]
    batch = tiny_models.batch(len(names), 9, seed=2)
    batch["input_ids"][1, 5] = tiny_models.EOS
    batch["input_ids"][1, 6:] = tiny_models.PAD
    batch["attention_mask"][1, 6:] = 0
    solo = [alone(model, name, lambda: logits(model, **batch)) for name in names]
    with ah.route(model, names):
        together = logits(model, **batch)
    expected = torch.stack([each[i] for i, each in enumerate(solo)])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def save_with_classes(folder, architecture, count, seed):
    """Save an adapter whose head has `count` classes."""
    names = {"id2label": {i: f"{count}-{i}" for i in range(count)}}
    model = tiny_models.model(architecture, num_labels=count, **names)
    plain = architecture not in ("xlnet", "mixtral")  # their ffn has no projections for lora
    adapter = ah.attach(model, "lora(sites=['ffn.up'])" if plain else "houlsby")
    tiny_models.scramble(adapter, seed=seed)
    adapter.save(folder)
    return folder


@long_table(
    "architecture", [a for a in tiny_models.MATRIX if a not in tiny_models.WITHOUT_CLASSIFIER], 3
)
def test_heads_of_different_sizes_run_in_one_batch(architecture, tmp_path):
    model = tiny_models.model(architecture)
    for count in (2, 3, 5):
        folder = save_with_classes(tmp_path / str(count), architecture, count, seed=count)
        ah.load(model, folder, name=str(count), any_backbone=True)
    rows = ["5", "2", None, "3", "2"]
    batch = tiny_models.batch(5, 9)
    solo = [alone(model, name, lambda: logits(model, **batch)) for name in rows]
    ah.activate(model)
    config = model.config.to_dict()
    with ah.route(model, rows) as routed:
        together = logits(model, **batch)
    assert together.shape == (5, 5)
    assert torch.isneginf(together[1, 2:]).all()
    assert routed.labels[1] == ("2-0", "2-1")
    assert [len(row) for row in routed.split(together)] == [5, 2, 3, 3, 2]
    for i, row in enumerate(routed.split(together)):
        torch.testing.assert_close(row, solo[i][i], atol=1e-5, rtol=1e-5)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("method", ["lora", "houlsby", "mam", "prompt", "scalar-mix"])
@pytest.mark.parametrize("precision", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"quantize": "nf4"}])
def test_rows_equal_solo_runs_in_low_precision(method, precision, tmp_path):
    """Heads and a newly initialized pooler stay in fp32, row by row."""
    if "quantize" in precision:
        pytest.importorskip("bitsandbytes")
    bare = tmp_path / "bare"
    AutoModelForMaskedLM.from_config(tiny_models.model("bert").config).save_pretrained(bare)
    options = {"task": "classification", "labels": ["x", "y", "z"], **precision}
    word_tokenizer().save_pretrained(bare)
    model, _ = ah.load_backbone(str(bare), **options)
    adapters = attach_two(model, method)
    assert all(any(c.method is None for c in a.changed) for a in adapters), "no new pooler"
    names = ["a", "b", None, "b"]
    batch = tiny_models.batch(len(names), 9)
    solo = [alone(model, name, lambda: logits(model, **batch))[i] for i, name in enumerate(names)]
    with ah.route(model, names):
        together = logits(model, **batch)
    for row, expected in zip(together, solo, strict=True):
        torch.testing.assert_close(row, expected.to(row.dtype), atol=2e-2, rtol=2e-2)
    if method not in ("mam", "prompt"):  # virtual tokens have no average
        ah.activate(model, ah.Average(["a", "b"]))
        assert logits(model, **batch).isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["lora", "mam", "scalar-mix", "prompt"])
def test_routed_gradients_equal_those_of_solo_runs(method, checkpointing):
    """One batch trains several adapters, each on its own rows only."""
    gradients = []
    for together in (True, False):
        model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
        adapters = attach_two(model, method)
        if checkpointing:
            tiny_models.enable_gradient_checkpointing(model)
            model.train()
        batch, labels = tiny_models.batch(4, 7), torch.tensor([0, 1, 2, 1])
        if together:
            with ah.route(model, ["a", "b", "a", "b"]):
                (4 * model(**batch, labels=labels).loss).backward()
        else:
            for name, rows in (("a", [0, 2]), ("b", [1, 3])):
                ah.activate(model, name)
                inputs = {k: v[rows] for k, v in batch.items()}
                (2 * model(**inputs, labels=labels[rows]).loss).backward()
        gradients.append([p.grad for a in adapters for p in a.parameters()])
    for routed, solo in zip(*gradients, strict=True):
        torch.testing.assert_close(routed, solo, atol=2e-6, rtol=1e-4)


def test_a_route_refuses_adapters_that_cannot_be_routed():
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
    with ah.route(model, ["full"] * 3):  # the same adapter for all rows needs no routing
        together = logits(model)
    ah.activate(model, "full")
    assert torch.equal(together, logits(model))


def raise_in_nested_routes(model):
    with ah.route(model, ["a", "b", None]):
        inner = logits(model)
        with ah.route(model, ["b", "b", "a"]):
            assert not torch.allclose(logits(model), inner)
        assert torch.equal(logits(model), inner)
        raise KeyError


@pytest.mark.parametrize("before", [(), ("a",), ("b", "a"), (ah.Average(["a", "b"]),)])
def test_leaving_a_route_restores_the_activation(before):
    names_only = all(isinstance(part, str) for part in before)
    model = with_adapters({"a": "mam" if names_only else "lora", "b": "houlsby"})
    ah.activate(model, *before)
    expected, keys = logits(model), set(model.state_dict())
    with pytest.raises(KeyError):
        raise_in_nested_routes(model)
    assert torch.equal(logits(model), expected)
    assert set(model.state_dict()) == keys


def test_a_new_pooler_follows_its_row(tmp_path):
    """Each adapter has its own copy of the modules that the checkpoint lacks."""
    tiny_models.model("bert", "causal-lm", is_decoder=False).save_pretrained(tmp_path / "mlm")
    (tmp_path / "mlm" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    BertTokenizerFast(vocab=str(tmp_path / "mlm" / "vocab.txt")).save_pretrained(tmp_path / "mlm")
    model, _ = ah.load_backbone(str(tmp_path / "mlm"), task="classification", labels=["no", "yes"])
    for seed, name in enumerate("ab"):
        adapter = ah.attach(model, "lora", name=name)
        assert {c.name.rpartition(".")[2] for c in adapter.changed} == {"weight", "bias"}
        tiny_models.scramble(adapter, seed=seed, std=1.0)
    rows = ["b", None, "a"]
    each = {name: alone(model, name, lambda: logits(model)) for name in rows}
    with ah.route(model, rows):
        together = logits(model)
    expected = torch.stack([each[name][i] for i, name in enumerate(rows)])
    torch.testing.assert_close(together, expected)
    assert not torch.allclose(each["a"], each["b"])
    ah.activate(model, ah.Average(["a", "b"]))
    assert torch.isfinite(logits(model)).all()


def test_two_active_adapters_form_a_stack():
    model = tiny_models.model("bert", "features")
    hidden = lambda: model(**tiny_models.batch()).last_hidden_state.detach()  # noqa: E731
    for name in "ab":
        tiny_models.scramble(ah.attach(model, "lora(sites=['attn.q'])", name=name), seed=ord(name))
    alone = hidden()
    ah.activate(model, "a", "b")
    both = hidden()
    assert not torch.allclose(both, alone)
    query = model.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    modules = [m for _, m in query.adapterhub.named_children()]
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    expected = y + sum(2.0 * x @ m.A.T @ m.B.T for m in modules)
    torch.testing.assert_close(query(x), expected)


def test_an_average_is_the_mean_of_the_outputs_at_a_site():
    model = with_adapters({"a": "lora", "b": "lora(rank=2)", "c": "pfeiffer"})
    ah.activate(model, ah.Average(["a", "b", "c"], weights=[0.5, 0.3, 0.2]))
    query = model.bert.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    a, b = (m for _, m in query.adapterhub.named_children())
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    updates = [m.scale * x @ m.A.T @ m.B.T for m in (a, b)]
    expected = y + 0.5 * updates[0] + 0.3 * updates[1]  # c has no module here, so it returns y
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


def test_an_impossible_average_changes_nothing():
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


def test_a_member_of_the_active_average_cannot_be_detached():
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
