"""`ah.to_lora`: each method whose updates are matrices becomes a LoRA, or is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.route import activate
from adapterhub.adapters.state import get_state
from adapterhub.errors import ConfigError, MergeError
from adapterhub.merging.combine import update_ranks
from adapterhub.methods.common.base import METHODS
from adapterhub.methods.lora import LoRALayer
from tests.kit import tiny_models
from tests.kit.selection import cases_of, long_table


def attached(architecture, spec, seed=3):
    model = tiny_models.model(architecture)
    tiny_models.scramble(ah.attach(model, spec, name="own"), seed=seed)
    return model


def outputs(model):
    with torch.no_grad():
        return model.eval()(**tiny_models.batch()).logits


def difference(model, new):
    """Return how far the outputs of a conversion are from those of the original."""
    after = outputs(model)
    activate(model, "own")
    before = outputs(model)
    activate(model, new.name)
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("architecture", cases_of(["bert", "llama"], 2))
@long_table("name", sorted(METHODS), 4)
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


def test_each_site_gets_the_rank_of_its_energy():
    model = attached("bert", "lora(rank=6)")
    first = get_state(model).adapters["own"].placed[0]
    with torch.no_grad():
        first.module.B[:, 1:] = 0
    new = ah.to_lora(model, "own", energy=0.999)
    ranks = {placed.site.id: placed.module.A.shape[0] for placed in new.placed}
    assert ranks.pop(first.site.id) == 1
    assert min(ranks.values()) > 1
    assert difference(model, new) < 0.05


def test_what_a_lora_cannot_have_is_named():
    model = attached("bert", "bitfit")
    with pytest.raises(MergeError, match="changes more than the weights of projections") as error:
        ah.to_lora(model, "own", energy=0.99)
    assert any("bias" in line for line in error.value.offenders)
    for options in ({"rank": 0}, {"energy": 0.0}, {"energy": 1.5}):
        with pytest.raises(ConfigError, match="out of range"):
            ah.to_lora(attached("bert", "lora"), "own", **options)
