"""`ah.combine` and `ah.to_lora` as a user calls them; the contract combines every method."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError, ConfigError, MergeError
from adapterhub.merging.combine import (
    RULES,
    Cut,
    combine_vectors,
    cut_product,
    low_rank,
    trim,
    update_ranks,
)
from adapterhub.methods.common.base import METHODS
from adapterhub.methods.lora import LoRALayer
from tests.kit import tiny_models
from tests.kit.selection import cases_of, long_table


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, (name, rank) in enumerate({"a": 2, "b": 3}.items()):
        spec = f"lora(rank={rank}, sites=['attn.q'])"
        tiny_models.scramble(ah.attach(model, spec, name=name), seed=seed)
    return model


def update(adapter, layer=0):
    tensors = adapter.tensors()
    a, b = (tensors[f"encoder.{layer}.attn.q.lora.{name}"] for name in "AB")
    return adapter.placed[0].module.scale * b @ a


def test_a_linear_combination_of_lora_is_exact_or_reports_what_is_lost(model):
    adapters = get_state(model).adapters.copy()
    combined = ah.combine(model, ["a", "b"], weights=[0.25, -1.0])
    expected = 0.25 * update(adapters["a"]) - update(adapters["b"])
    torch.testing.assert_close(update(combined), expected)
    assert combined.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 2 + 3
    assert combined.active
    smaller = ah.combine(model, ["a", "b"], rank=1, name="smaller")
    assert smaller.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 1
    assert 0 < smaller.metadata.training["combined"]["lost"] < 1


def test_what_cannot_be_combined_is_listed_and_nothing_changes(model):
    with pytest.raises(ConfigError) as error:
        ah.combine(model, ["a", "b"], weights=[1.0], density=2.0, rank=0)
    assert len(error.value.offenders) == 3
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        ah.combine(model, ["a", "b"], how="linar")
    ah.activate(model, "a")
    with pytest.raises(AttachError, match="'c'"):
        ah.combine(model, ["a", "c"])
    assert get_state(model).adapters["a"].active


def with_head(name, labels, seed):
    """Attach an adapter with a head for other labels."""
    other = tiny_models.model("bert", num_labels=len(labels))
    made = ah.attach(other, "lora(rank=2, sites=['attn.q'])", name=name)
    tiny_models.scramble(made, seed=seed)
    made.head.labels["id2label"] = dict(enumerate(labels))
    return made


@pytest.mark.parametrize("labels", [("x", "y"), ("LABEL_1", "LABEL_0", "LABEL_2"), tuple("wxyz")])
@pytest.mark.parametrize("order", [["a", "other"], ["other", "a"], ["a", "b", "other"]])
def test_different_heads_are_refused_unless_one_is_chosen(model, tmp_path, labels, order):
    with_head("other", labels, seed=7).save(tmp_path / "other")
    ah.load(model, tmp_path / "other", any_backbone=True)
    adapters = get_state(model).adapters
    with pytest.raises(MergeError, match="different heads") as caught:
        ah.combine(model, order)
    assert f"combine(..., head={order[0]!r})" in str(caught.value)
    assert "combined" not in adapters
    for number, head in enumerate(order):
        combined = ah.combine(model, order, head=head, name=f"head-{number}")
        assert combined.labels == adapters[head].labels
        own = {n: t for n, t in combined.tensors().items() if n.startswith("head.")}
        assert own
        assert all(torch.equal(t, adapters[head].tensors()[n]) for n, t in own.items())
        assert combined.metadata.training["combined"]["head"] == head
    with pytest.raises(AttachError, match="'c'"):
        ah.combine(model, order, head="c")


# `ah.to_lora`: each method whose updates are matrices becomes a LoRA, or is refused by name.


def attached(architecture, spec, seed=3):
    model = tiny_models.model(architecture)
    tiny_models.scramble(ah.attach(model, spec, name="own"), seed=seed)
    return model


def difference(model, new):
    """Return how far the outputs of a conversion are from those of the original."""
    after = tiny_models.logits(model)
    ah.activate(model, "own")
    before = tiny_models.logits(model)
    ah.activate(model, new.name)
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("architecture", cases_of(["bert", "llama"], 2))
@long_table("name", sorted(METHODS), 6, nightly=2)
def test_every_method_is_converted_or_refused(architecture, name):
    method = METHODS[name].example()
    try:
        model = attached(architecture, method)
    except ah.AdapterhubError:
        pytest.skip("does not fit")
    if refused(model, energy=1.0):
        assert list(get_state(model).adapters) == ["own"]
        assert refused(model, combine=True)
        return
    own = get_state(model).adapters["own"]
    new = ah.to_lora(model, "own", energy=1.0)
    assert all(isinstance(placed.module, LoRALayer) for placed in new.placed)
    assert difference(model, new) < 1e-4
    factors = [getattr(placed.module, "factors", lambda: None)() for placed in own.placed]
    if any(each is None for each in factors):
        assert "without a rank of their own" in refused(model)
        return
    exact = ah.to_lora(model, "own", new_name="exact")
    assert exact.metadata.training["combined"]["lost"] == 0
    assert difference(model, exact) < 1e-5


def refused(model, combine=False, **options):
    """Return why the adapter becomes no LoRA, or no combination that is one; "" if it does."""
    try:
        if not combine:
            ah.to_lora(model, "own", new_name="tried", **options).detach()
            return ""
        found = ah.combine(model, ["own"], energy=1.0, name="tried")
        return "" if [method.name for method in found.methods] == ["lora"] else "more than a LoRA"
    except MergeError as error:
        return str(error)


@pytest.mark.parametrize(
    "method", cases_of(["lora(rank=6)", "rslora(rank=6)", "pissa(rank=3)", "adalora", "dora"], 5)
)
def test_the_share_that_each_rank_keeps(method):
    model = attached("bert", method)
    adapter = get_state(model).adapters["own"]
    ranks = update_ranks(adapter)
    if method == "dora":
        assert ranks is None
        return
    products = [(left @ right).detach().numpy() for left, right in factors(adapter)]
    values = [np.linalg.svd(product, compute_uv=False) for product in products]
    total = sum(np.square(each).sum() for each in values)
    for rank in range(1, ranks.rank + 1):
        kept = sum(np.square(each[:rank]).sum() for each in values) / total
        assert ranks.kept(rank) == pytest.approx(kept, abs=1e-6)
        smaller = ah.to_lora(model, "own", rank=rank, new_name=f"of-{rank}")
        assert {placed.module.A.shape[0] for placed in smaller.placed} == {rank}
        told = smaller.metadata.training["combined"]["lost"]
        assert (told == 0) == (rank == ranks.rank)
        pairs = zip(products, factors(smaller), strict=True)
        rests = [product - (left @ right).detach().numpy() for product, (left, right) in pairs]
        lost = sum(np.square(rest).sum() for rest in rests) / total
        assert 1 - ranks.kept(rank) == pytest.approx(lost, abs=1e-5)
        least = ranks.least(ranks.kept(rank) - 1e-9)
        assert least == rank or ranks.kept(least) == pytest.approx(kept)
    assert ranks.kept(ranks.rank) == 1
    for placed in adapter.placed:
        torch.nn.init.constant_(next(placed.module.parameters()), float("nan"))
    assert update_ranks(adapter) is None


def factors(adapter):
    return [placed.module.factors() for placed in adapter.placed]


def test_what_a_lora_cannot_have_is_named():
    model = attached("bert", "bitfit")
    with pytest.raises(MergeError, match="changes more than the weights of projections") as error:
        ah.to_lora(model, "own", energy=0.99)
    assert any("bias" in line for line in error.value.offenders)
    for options in ({"rank": 0}, {"energy": 0.0}, {"energy": 1.5}):
        with pytest.raises(ConfigError, match="out of range"):
            ah.to_lora(attached("bert", "lora"), "own", **options)


# Rules for task vectors, by hand on small vectors; the contract compares them with peft.

A = torch.tensor([3.0, -1.0, 0.5, -4.0])
B = torch.tensor([1.0, 2.0, -0.5, -2.0])


def combined(how, weights=(1.0, 1.0), density=1.0, seed=0):
    return combine_vectors(how, [A, B], weights, density, torch.Generator().manual_seed(seed))


def test_rules_by_hand():
    assert torch.equal(combined("linear", (2.0, -1.0)), 2 * A - B)
    assert torch.equal(trim(A, 0.5), torch.tensor([3.0, 0.0, 0.0, -4.0]))
    # Signs of the sums: +, +, + (a sum of 0 counts as positive), -.
    assert torch.equal(combined("ties"), torch.tensor([2.0, 2.0, 0.5, -3.0]))
    for how in RULES:
        first, again = (combined(how, density=0.5, seed=3) for _ in range(2))
        assert torch.equal(first, again)


def test_of_a_large_matrix_few_components_are_found_nearly_as_near():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 640, generator=generator)
    state = torch.random.get_rng_state()
    left, right = low_rank(matrix, Cut(16))
    assert torch.equal(torch.random.get_rng_state(), state)
    values = torch.linalg.svdvals(matrix)
    nearest = values[16:].square().sum().sqrt()
    assert nearest <= (matrix - left @ right).norm() < 1.002 * nearest
    assert all(map(torch.equal, low_rank(matrix, Cut(16)), (left, right)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_a_product_is_cut_as_its_matrix_is(rows, columns, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=generator).double()
                   for shape in ((rows, rank), (rank, columns)))  # fmt: skip
    product = left @ right
    for cut in (Cut(2), Cut(energy=0.9), Cut(3, 0.99)):
        b, a, lost = cut_product(left, right, cut)
        expected = low_rank(product, cut)
        torch.testing.assert_close(b @ a, expected[0] @ expected[1], atol=1e-6, rtol=1e-5)
        assert len(a) <= (cut.rank or 9)
        assert abs(lost - (product - b @ a).norm() / product.norm()) < 1e-6
        if cut.rank is None:
            assert lost**2 <= 1 - cut.energy + 1e-9


@pytest.mark.parametrize("cut", [Cut(100, 1.0), Cut(energy=1.0), Cut(100)])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (520, 600)])
def test_a_rank_above_that_of_the_matrix_ends(cut, shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, right = low_rank(matrix, cut)
    assert len(right) == min(cut.rank or 1000, *shape)
    if len(right) == min(shape):
        torch.testing.assert_close(left @ right, matrix, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_the_same_labels_or_the_only_head_need_no_choice(model, kept):
    adapters = get_state(model).adapters
    if kept == "b":
        adapters["a"].head = None
    combined = ah.combine(model, ["a", "b"])
    assert combined.labels == adapters[kept].labels
    head = adapters[kept].head.own["classifier"]
    assert torch.equal(combined.head.own["classifier"].weight, head.weight)


def test_a_head_alone_is_no_lora():
    with pytest.raises(MergeError, match="changes no weights of projections"):
        ah.to_lora(attached("bert", "head"), "own")
