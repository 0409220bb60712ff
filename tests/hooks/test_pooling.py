"""The pooling of token states for a head belongs to the adapter, and follows each row."""

import itertools
import types

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.pooling import POOLS
from adapterhub.errors import AttachError, ConfigError, MergeError, MismatchError, SiteError
from tests.kit import tiny_models
from tests.kit.selection import ALL, long_table
from tests.kit.tiny_adapters import check_rows

POOLED = tuple(
    name
    for name in tiny_models.ARCHITECTURES
    if name not in (*tiny_models.WITHOUT_CLASSIFIER, *tiny_models.ENCODER_DECODERS)
)
SIDES = ("left", "right", None)
assert len(POOLED) == 31  # all with a classifier on one stack


def pooled_by_hand(model, batch, how):
    """Pool the states of the base model, which gives them as they are, one row after the other."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    states = model.base_model(**batch).last_hidden_state
    rows = [row[kept.bool()] for row, kept in zip(states, mask, strict=True)]
    pools = {
        "cls": lambda row: row[0],
        "mean": lambda row: row.mean(0),
        "last": lambda row: row[-1],
        "max": lambda row: row.max(0).values,
    }
    return torch.stack([pools[how](row) for row in rows])


def logits_by_hand(model, batch, how):
    """Return the logits of the model's head for the pooled states, whatever it reads of a row."""
    base, vectors = model.base_model, pooled_by_hand(model, batch, how)

    def forward(self, *args, **kwargs):
        output = type(base).forward(self, *args, **kwargs)
        length = batch["input_ids"].shape[1]
        output["last_hidden_state"] = vectors[:, None].expand(-1, length, -1)
        if output.get("pooler_output") is not None:
            output["pooler_output"] = vectors
        return output

    base.forward = types.MethodType(forward, base)
    try:
        return model(**batch).logits
    finally:
        del base.forward


def pooled_adapter(model, method, how, name="default"):
    """Attach an adapter with an effect on every output."""
    adapter = ah.attach(model, method, name=name, pooling=how)
    tiny_models.scramble(adapter)
    return adapter


def named_hooks(model):
    """Return the number of hooks of each module, and its attributes."""
    return {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
        for name, m in model.named_modules()
    }


@long_table(("architecture", "side"), list(itertools.product(POOLED, SIDES)), 4, nightly=2)
def test_the_head_reads_the_pooled_states_of_the_tokens(architecture, side):
    model = tiny_models.model(architecture)
    batch = tiny_models.padded_batch(side)
    bare = named_hooks(model)
    for how in POOLS:
        adapter = pooled_adapter(model, "ia3", how)
        with torch.no_grad():
            logits = model(**batch).logits
            expected = logits_by_hand(model, batch, how)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        adapter.detach()
        assert named_hooks(model) == bare


CORE = [a for a in tiny_models.MATRIX if a in POOLED]


@long_table(("architecture", "side"), list(itertools.product(CORE, SIDES)), 4)
def test_virtual_tokens_are_not_pooled(architecture, side):
    model = tiny_models.model(architecture)
    batch = tiny_models.padded_batch(side)
    before = pooled_adapter(model, "lora", "mean", "before")  # its hooks are the first
    pooled_adapter(model, "prompt(length=3)", "mean", "prompted")
    with torch.no_grad():
        expected = logits_by_hand(model, batch, "mean")
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)
        before.detach()
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)


@long_table("architecture", CORE, 2)
def test_each_row_of_a_route_is_pooled_by_its_adapter(architecture):
    model = tiny_models.model(architecture)
    for how in POOLS:
        pooled_adapter(model, "pfeiffer", how, how)
    pooled_adapter(model, "houlsby", "model", "class")
    names = [*POOLS, "class", None, "mean"]
    batch = tiny_models.batch(rows=len(names))
    check_rows(model, names, lambda: model(**batch).logits, rtol=1e-5)


def test_adapters_that_pool_differently_are_not_composed():
    model = tiny_models.model("bert")
    for name, how in (("a", "mean"), ("b", "mean"), ("c", "max"), ("d", "model")):
        pooled_adapter(model, "lora", how, name)
    batch = tiny_models.padded_batch("right")
    ah.activate(model, "a", "b")
    stacked = model(**batch).logits
    torch.testing.assert_close(stacked, logits_by_hand(model, batch, "mean"))
    with ah.route(model, [("a", "b")] * 3):
        torch.testing.assert_close(model(**batch).logits, stacked)
    ah.activate(model, ah.Average(["a", "b"]))
    for names in (("a", "c"), ("b", "d")):
        with pytest.raises(AttachError, match="pool differently") as error:
            ah.activate(model, *names)
        assert f"{names[0]!r}: pooling=mean" in str(error.value)
        with pytest.raises(AttachError, match="pool differently"), ah.route(model, [names] * 3):
            pass
        with pytest.raises(AttachError, match="pool differently"):
            ah.activate(model, ah.Average(list(names)))
    assert ah.combine(model, ["a", "b"], name="e").pooling.how == "mean"


@long_table("architecture", CORE, 2)
def test_the_pooling_travels_with_the_file(architecture, tmp_path):
    model = tiny_models.model(architecture)
    adapter = pooled_adapter(model, "lora", "max")
    batch = tiny_models.padded_batch("right")
    with torch.no_grad():
        expected = model(**batch).logits
        manifest = adapter.save(tmp_path / "a")
        adapter.detach()
        loaded = ah.load(model, tmp_path / "a")
        assert torch.equal(model(**batch).logits, expected)
    assert manifest.head is not None
    assert manifest.head.pooling == "max"
    assert loaded.manifest().head == manifest.head
    without_head = ah.load(model, tmp_path / "a", name="b", head=False)
    assert without_head.pooling is None
    ah.attach(model, "lora", name="c").save(tmp_path / "c")
    assert '"pooling"' not in (tmp_path / "c" / "adapter.json").read_text(encoding="utf-8")


@long_table("architecture", POOLED, 4)
def test_all_that_trains_gets_a_gradient(architecture):
    missing = {}
    for how in ("model", "mean"):
        model = tiny_models.model(architecture)
        adapter = ah.attach(model, "full", pooling=how)
        model(**tiny_models.labelled_batch(model)).loss.backward()
        tensors = adapter.tensors().items()
        missing[how] = {n for n, p in tensors if p.requires_grad and p.grad is None}
        read = [name for name in adapter.tensors() if not name.startswith("head.")]
    assert missing["mean"] == missing["model"]  # XLNet has parameters for other inputs
    assert not any(".pooler." in name for name in read)


@pytest.mark.skipif(not ALL, reason="a compilation")
def test_a_compiled_model_pools():
    model = tiny_models.model("bert", num_hidden_layers=1)
    pooled_adapter(model, "lora", "mean")
    batch = tiny_models.padded_batch("right")
    with torch.no_grad():
        expected = model(**batch).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(**batch).logits, expected)
    torch.compiler.reset()


def test_outputs_may_be_tuples_and_a_mask_is_one_of_tokens():
    model = tiny_models.model("bert")
    pooled_adapter(model, "lora", "mean")
    batch = tiny_models.padded_batch("right")
    expected = model(**batch).logits
    with pytest.raises(SiteError, match="attention_mask of"):
        model(**tiny_models.batch() | {"attention_mask": torch.ones(3, 1, 9, 9)})
    model.config.return_dict = False
    assert torch.equal(model(**batch, return_dict=False)[0], expected)


def test_the_texts_of_a_multiple_choice_are_pooled_one_by_one():
    model = tiny_models.model("bert", "multiple-choice")
    adapter = pooled_adapter(model, "lora", "mean")
    flat = tiny_models.padded_batch("right")
    batch = {name: value.view(1, 3, -1) for name, value in flat.items()}
    with torch.no_grad():
        logits = model(**batch).logits
        vectors = pooled_by_hand(model, flat, "mean")
        expected = adapter.head.own["classifier"](vectors).view(1, 3)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("model", "how", "error", "text"),
    [
        (lambda: tiny_models.language_model("gpt2"), "mean", SiteError, "needs a task head"),
        (lambda: tiny_models.model("bert"), "avg", ConfigError, "pooling"),
        *((lambda a=a: tiny_models.usual_model(a), "mean", SiteError, "one stack of layers")
          for a in tiny_models.ENCODER_DECODERS),
    ],
)  # fmt: skip
def test_models_that_cannot_pool_are_refused(model, how, error, text):
    with pytest.raises(error, match=text):
        ah.attach(model(), "lora", pooling=how)
    if error is SiteError:
        ah.attach(model(), "lora", pooling="model")


def test_a_plain_checkpoint_and_peft_cannot_pool(tmp_path):
    model = tiny_models.model("bert")
    adapter = pooled_adapter(model, "lora", "mean")
    with pytest.raises(MergeError, match="does not pool") as merge_error:
        ah.merge(model)
    assert "pooling=model" in str(merge_error.value)
    with pytest.raises(MismatchError, match="peft leaves the head's input") as export_error:
        adapter.export(tmp_path / "peft")
    assert "classification(pooling=model)" in str(export_error.value)
