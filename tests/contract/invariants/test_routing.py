"""Routes, and stacks and averages of adapters: what they compute, and what is refused.

That each row of a batch equals a run with its adapter alone holds for every cell of the matrix:
test_cells.py.
"""

import itertools

import pytest
import torch
from transformers import AutoModelForMaskedLM

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


@long_table("architecture", ["bert", "roberta", "gpt2", "opt", "xlnet", "t5", "bart"], 3)
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


@long_table("precision", ["fp32", "bf16", "fp16", "nf4"], 4)
def test_heads_and_a_new_pooler_follow_their_row_in_every_precision(precision, tmp_path):
    """Each adapter has its own copy of the modules that the checkpoint lacks, in fp32."""
    options = {"dtype": precision}
    if precision == "nf4":
        pytest.importorskip("bitsandbytes")
        options = {"quantize": precision}
    AutoModelForMaskedLM.from_config(tiny_models.model("bert").config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    labels = ["x", "y", "z"]
    model, _ = ah.load_backbone(str(tmp_path), task="classification", labels=labels, **options)
    names, batch = ["a", "b", None, "b"], tiny_models.batch(4, 9)
    near = 1e-5 if precision == "fp32" else 2e-2
    for method in ("lora", "houlsby", "mam", "prompt", "scalar-mix"):
        adapters = attach_two(model, method)
        assert all(any(c.method is None for c in a.changed) for a in adapters), "no new pooler"
        solo = {name: alone(model, name, lambda: logits(model, **batch)) for name in set(names)}
        assert not torch.allclose(solo["a"], solo["b"])
        with ah.route(model, names):
            together = logits(model, **batch)
        for i, (row, name) in enumerate(zip(together, names, strict=True)):
            torch.testing.assert_close(row, solo[name][i].to(row.dtype), atol=near, rtol=near)
        if method not in ("mam", "prompt"):  # virtual tokens have no average
            ah.activate(model, ah.Average(["a", "b"]))
            assert logits(model, **batch).isfinite().all()
        ah.detach(model)


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


def test_a_stack_adds_the_updates_at_a_site_and_an_average_their_mean():
    model = with_adapters({"a": "lora", "b": "lora(rank=2)", "c": "pfeiffer"})
    query = model.bert.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    a, b = (m.scale * x @ m.A.T @ m.B.T for _, m in query.adapterhub.named_children())
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    ah.activate(model, "a", "b")
    torch.testing.assert_close(query(x), y + a + b)
    ah.activate(model, ah.Average(["a", "b", "c"], weights=[0.5, 0.3, 0.2]))
    torch.testing.assert_close(query(x), y + 0.5 * a + 0.3 * b)  # c has no module here


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


def test_an_impossible_average_changes_nothing(tmp_path):
    ah.attach(tiny_models.model("bert", num_labels=2), "lora").save(tmp_path / "two")
    model = with_adapters({"a": "lora", "p": "prefix", "v": "prompt", "full": "full", "n": "norms"})
    ah.load(model, tmp_path / "two", name="two", any_backbone=True)
    ah.activate(model, "a")
    expected = logits(model)
    for names, problem, offenders in (
        ("apv", "virtual tokens cannot be averaged", ("'p': prefix", "'v': prompt")),
        (["full", "n", "a"], "shared by the whole batch", ("'full': full", "'n': norms")),
        (["two", "a"], "different labels", None),
    ):
        with pytest.raises(AttachError, match=problem) as error:
            ah.activate(model, ah.Average([*names]))
        assert offenders in (None, error.value.offenders)
        if problem.startswith("shared"):
            assert "lora" in error.value.expected
            assert "norms" not in error.value.expected
    assert len(error.value.offenders) == 2
    assert torch.equal(logits(model), expected)


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


@long_table(
    ("method", "checkpointing"),
    itertools.product(("lora", "mam", "scalar-mix", "prompt"), (False, True)),
    3,
)
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
