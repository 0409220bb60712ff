"""Adapters built from trained adapters: attached ones or folders."""

from __future__ import annotations

import pytest
import torch
from forge import refused

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models

FUSION = "adapterfusion(adapters=['{}', '{}'])"


def trained(model, name, seed):
    adapter = ah.attach(model, "pfeiffer(size=4)", name=name)
    tiny_models.scramble(adapter, seed=seed)
    return adapter


def test_sources_are_copied_from_the_model_and_from_folders(tmp_path):
    model = tiny_models.model("bert")
    first, second = trained(model, "a", 1), trained(model, "b", 2)
    second.save(tmp_path / "b")
    second.detach()
    fused = ah.attach(model, FUSION.format("a", tmp_path / "b"), name="fused")
    copied = fused.tensors()
    for number, source in enumerate((first, second)):
        for name, tensor in source.tensors().items():
            site, found, rest = name.partition(".pfeiffer.")
            if found:
                member = copied[f"{site}.adapterfusion.members.{number}.{rest}"]
                assert torch.equal(member, tensor)
                assert member is not tensor


def test_a_missing_source_is_refused():
    model = tiny_models.model("bert")
    with refused(model, "'nowhere'"):
        ah.attach(model, FUSION.format("nowhere", "gone"))


def test_a_source_of_a_different_backbone_is_refused(tmp_path):
    trained(tiny_models.model("bert", seed=1), "b", 2).save(tmp_path / "b")
    model = tiny_models.model("bert")
    trained(model, "a", 1)
    with pytest.raises(MismatchError, match="different backbone"):
        ah.attach(model, FUSION.format("a", tmp_path / "b"), name="fused")
