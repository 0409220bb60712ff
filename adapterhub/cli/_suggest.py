"""The work of `adapterhub suggest`, apart from what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.pooling import max_positions
from adapterhub.bench.suggest import Candidate, Suggestion, check_probed, suggest
from adapterhub.data.examples import sample
from adapterhub.recipe.recipe import Recipe, read_draft
from adapterhub.registry.pull import pull_verified
from adapterhub.registry.store import Query
from adapterhub.registry.stores import registry_at
from adapterhub.status import doing
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.kernels import KernelChoice
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.run_data import NO_EVALUATION, read_data

_MOST = 1000  # adapters of a registry


def probe_adapters(
    flags: dict[str, Any], adapters: Sequence[str], rows: int, registry: str | None
) -> Suggestion:
    """Read the data, load the backbone, and probe each adapter.

    Args:
        flags: options of a recipe: the backbone and the data.
        adapters: references; those of the registry if empty.
        rows: the training rows to probe, at most.
        registry: the folder of the registry.
    """
    recipe = read_draft(None, (), flags)
    recipe = replace(recipe, data=replace(recipe.data, eval=NO_EVALUATION))
    check_probed(parse_task(recipe.task))
    data = read_data(recipe)
    data = replace(data, train=sample(data.train, rows, recipe.seed))
    candidates = _candidates(recipe, adapters, registry)
    loader = BackboneLoader()
    loaded = loader.backbone(recipe, data, KernelChoice(recipe.dtype or "fp32", recipe.attention))
    loaded.model.eval()
    positions = max_positions(loaded.model)
    setting = Setting(loaded.processor, positions, data.labels, recipe.seed, positions)
    encoded = loader.rows(data, setting, recipe.train.max_length, None).train
    with doing(f"probing {len(candidates)} adapters on {len(encoded.rows):,} rows"):
        return suggest(loaded.model, encoded, candidates)


def _candidates(recipe: Recipe, adapters: Sequence[str], registry: str | None) -> list[Candidate]:
    """Return the adapters that are named, or those of the registry for the backbone."""
    if not adapters:
        backbone = fingerprint(recipe.backbone, revision=recipe.revision)
        query = Query(backbone=backbone, limit=_MOST)
        adapters = [entry.reference for entry in registry_at(registry).search(query)]
    found = []
    for reference in adapters:
        fetched = pull_verified(reference, registry=registry)
        found.append(Candidate(reference, fetched.folder, fetched.digest, fetched.on))
    return found
