"""The identity of a backbone as it was before any adapter; adapters may have replaced parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.any_module import is_view
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.checkpoint_form import named_tensors
from adapterhub.backbones.fingerprint import BackboneIdentity, ModelIdentities, Vocabulary
from adapterhub.backbones.identity import origin_of
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.tokenizer import tokenizer_snapshot
from adapterhub.backbones.weights import packed_hosts

Originals = Mapping[int, nn.Parameter]  # by the ids of the adapters' parameters in their place


def identities_before(
    anatomy: Anatomy, originals: Originals, trained: BackboneIdentity | None = None
) -> ModelIdentities:
    """Return the identities of a backbone, of a sample and of all values.

    `originals` are the parameters that adapters have replaced; `trained` is the identity to compare
    with, whose vocabulary may have fewer rows.
    """
    vocabulary = _vocabulary(anatomy.model).common(trained.vocabulary if trained else None)
    tensors = _tensors(anatomy, originals)
    # The folder of another library's module is no checkpoint of transformers.
    origin = None if is_view(anatomy.model) else origin_of(anatomy.model)
    return ModelIdentities(anatomy.model, tensors, origin, vocabulary, trained)


def _tensors(anatomy: Anatomy, originals: Originals) -> dict[str, Tensor]:
    """Map paths to the backbone's tensors, without those of adapters and new heads."""
    new = newly_initialized(anatomy.model)
    heads = tuple(f"{name}." for name in anatomy.head())
    own = {
        path: originals.get(id(tensor), tensor)
        for path, tensor in named_tensors(anatomy.model).items()
        if not path.startswith(heads) and path not in new
    }
    return own | dict(_codes(anatomy))


def _codes(anatomy: Anatomy) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor without values for each weight that is packed."""
    codes = torch.empty(1, 1, device="meta")
    return ((f"{host}.weight", codes) for host in packed_hosts(anatomy))


def _vocabulary(model: PreTrainedModel) -> Vocabulary:
    """Return how many rows the token embedding has, and how many of them the tokenizer uses."""
    if (table := token_embedding(model)) is None:
        return Vocabulary()
    # Some may have been added since the backbone was loaded.
    rows = min(checkpoint_vocabulary_size(model) or len(table), len(table))
    snapshot = tokenizer_snapshot(model)
    return Vocabulary(rows, min(snapshot.size, rows) if snapshot else rows)
