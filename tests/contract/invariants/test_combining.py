"""Combining adapters: task-vector arithmetic agrees with peft; the result is a complete adapter."""

import pytest
import torch
from peft.utils import merge_utils

import adapterhub as ah
from adapterhub.errors import AttachError, MergeError
from adapterhub.merging.combine import RULES, combine_vectors, trim
from tests.kit import tiny_models
from tests.kit.tiny_adapters import with_adapters
from tests.kit.tiny_models import logits

SEED = 7


def random_vectors(count=3, shape=(12, 10)):
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(count)]


@pytest.mark.parametrize("density", [0.2, 0.55])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, -0.3, 2.0)])
def test_task_vector_rules_agree_with_peft(density, weights):
    taus, shares, generator = random_vectors(), torch.tensor(weights), torch.Generator()
    torch.testing.assert_close(
        combine_vectors("linear", taus, weights, density, generator),
        merge_utils.task_arithmetic(taus, shares),
    )
    torch.testing.assert_close(
        combine_vectors("ties", taus, weights, density, generator),
        merge_utils.ties(taus, shares, density),
    )
    for tau in taus:
        expected = merge_utils.prune(tau, density, "magnitude")
        assert torch.equal(trim(tau, density), expected)


@pytest.mark.parametrize(
    ("how", "theirs"), [("dare", merge_utils.dare_linear), ("dare-ties", merge_utils.dare_ties)]
)
def test_dare_agrees_with_peft_on_the_same_mask(how, theirs, monkeypatch):
    taus, weights, density = random_vectors(), (0.5, 0.25, 1.0), 0.4
    generator = torch.Generator().manual_seed(SEED)
    masks = iter([(torch.rand(t.shape, generator=generator) < density).float() for t in taus])
    monkeypatch.setattr(merge_utils.torch, "bernoulli", lambda *args, **kwargs: next(masks))
    expected = theirs(taus, torch.tensor(weights), density)
    generator = torch.Generator().manual_seed(SEED)
    combined = combine_vectors(how, taus, weights, density, generator)
    torch.testing.assert_close(combined, expected)


def test_trimming_ignores_rows_without_an_adapter():
    """If q, k and v are one weight, the rows without an adapter do not count as trimmed zeros."""
    changed = {}
    for architecture in ("gpt2", "llama"):  # one weight, and three
        model = tiny_models.usual_model(architecture)
        ah.attach(model, "lora(sites=['attn.q'], rank=32, layers='first 1')", name="a")
        torch.manual_seed(0)
        for _, tensor in sorted(model._adapterhub.adapters["a"].tensors().items()):
            if tensor.shape == (32, 32):
                torch.nn.init.normal_(tensor)
        made = ah.combine(model, ["a"], how="ties", density=0.25, name="new")
        changed[architecture] = sum((c.own != c.original).sum().item() for c in made.changed)
    assert changed["gpt2"] == changed["llama"] == 256


def same_head(model):
    """Give both adapters the head of the first, so that outputs differ by the backbone alone."""
    a, b = (model._adapterhub.adapters[name] for name in "ab")
    for child, module in b.head.own.items():
        module.load_state_dict(a.head.own[child].state_dict())


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "gpt_neox", "albert"])
@pytest.mark.parametrize(
    "methods", [("lora", "rslora(rank=3)"), ("pissa", "lora"), ("lora", "ia3")]
)
def test_a_sum_equals_both_adapters_active(architecture, methods, tmp_path):
    """The sum is exact: by concatenated ranks, or as full weights if an update has no low rank."""
    sites = "sites=['attn.q', 'attn.v']"
    first, second = (
        m.replace(")", f", {sites})") if "(" in m else f"{m}({sites})" for m in methods
    )
    model = with_adapters({"a": first, "b": second}, architecture)
    same_head(model)
    ah.activate(model, "a")
    alone = logits(model)
    made = ah.combine(model, ["a"], weights=[1.0], name="one")
    torch.testing.assert_close(logits(model), alone, atol=1e-5, rtol=1e-4)
    made.detach()
    made = ah.combine(model, ["a", "b"], weights=[1.0, 1.0])
    both = logits(model)
    if methods[1] != "ia3":  # ia3 also scales the updates before it
        ah.activate(model, "a", "b")
        torch.testing.assert_close(logits(model), both, atol=1e-4, rtol=1e-4)
    assert [m.name for m in made.methods] == (["lora"] if "ia3" not in methods else ["staged"])
    made.save(tmp_path / "sum")
    fresh = tiny_models.usual_model(architecture)
    again = ah.load(fresh, tmp_path / "sum")
    assert torch.equal(logits(fresh), both)
    assert again.metadata.training["combined"]["weights"] == [1.0, 1.0]


def test_changes_of_full_parameters_add_up():
    model = with_adapters({"a": "norms", "b": "norms"}, "gpt2")
    made = ah.combine(model, ["a", "b"], weights=[2.0, -0.5])
    assert [m.name for m in made.methods] == ["norms"]
    a, b = (model._adapterhub.adapters[name] for name in "ab")
    for new, one, two in zip(made.changed, a.changed, b.changed, strict=True):
        expected = one.original + 2 * (one.own - one.original) - 0.5 * (two.own - two.original)
        torch.testing.assert_close(new.own, expected)


def test_a_negated_adapter_undoes_a_merge(tmp_path):
    """Loaded onto the merged model, the negated adapter restores the backbone's outputs."""
    model = tiny_models.model("llama", "features")
    hidden = lambda: model(**tiny_models.batch()).last_hidden_state.detach()  # noqa: E731
    bare = hidden()
    tiny_models.scramble(ah.attach(model, "lora", name="a"), std=0.1)
    assert not torch.allclose(hidden(), bare, atol=1e-2)
    minus = ah.combine(model, ["a"], weights=[-1.0], name="minus")
    minus.save(tmp_path / "minus")
    minus.detach()
    ah.merge(model, "a")
    ah.load(model, tmp_path / "minus", any_backbone=True)
    torch.testing.assert_close(hidden(), bare, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", sorted(set(RULES) - {"linear"}))
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_trimmed_updates_are_saved_in_full_or_in_a_rank(how, architecture):
    methods = {"a": "lora(sites=['attn.q', 'attn.v'])", "b": "lora(sites=['attn.q'])"}
    model = with_adapters(methods, architecture)
    whole = ah.combine(model, ["a", "b"], how=how, density=0.5, name="whole")
    expected = logits(model)
    assert [m.name for m in whole.methods] == ["staged"]
    full = ah.combine(model, ["a", "b"], how=how, density=0.5, rank=32, name="full rank")
    assert [m.name for m in full.methods] == ["lora"]
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-3)
    assert full.metadata.training["combined"]["lost"] < 1e-4
    low = ah.combine(model, ["a", "b"], how=how, density=0.5, rank=4, name="rank 4")
    assert low.count() < whole.count()
    assert 0.05 < low.metadata.training["combined"]["lost"] < 1
    again = ah.combine(model, ["a", "b"], how=how, density=0.5, rank=4, name="again")
    for name, tensor in low.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])


def test_a_combined_adapter_merges_and_its_sources_are_unchanged():
    model = with_adapters({"a": "lora", "b": ["dora", "bitfit"]})
    before = [t.clone() for a in model._adapterhub.adapters.values() for t in a.tensors().values()]
    torch.manual_seed(0)
    draw = torch.rand(1)
    torch.manual_seed(0)
    made = ah.combine(model, ["a", "b"])
    assert made.metadata.training["combined"]["weights"] == [0.5, 0.5]
    assert all(p.requires_grad for p in made.parameters())
    assert torch.is_grad_enabled()
    assert torch.equal(torch.rand(1), draw)
    live = logits(model)
    after = [t for n in "ab" for t in model._adapterhub.adapters[n].tensors().values()]
    assert all(map(torch.equal, before, after))
    assert made.labels == model._adapterhub.adapters["a"].labels
    ah.detach(model, "a")
    ah.detach(model, "b")
    ah.merge(model)
    torch.testing.assert_close(logits(model), live, atol=1e-4, rtol=1e-4)


def test_refused_combinations_name_the_reason():
    model = with_adapters({"a": "lora", "b": "prefix"})
    with pytest.raises(MergeError, match=r"prefix at encoder\.attn\.kv"):
        ah.combine(model, ["a", "b"])
    with pytest.raises(AttachError, match="no adapters to combine"):
        ah.combine(tiny_models.model("bert"), ["a"])
