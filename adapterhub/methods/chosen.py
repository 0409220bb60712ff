"""Chosen parameters of the backbone train; by default the token embeddings.

    theta' = theta for all parameters but those that are named, which train as they are

Training the embeddings on a frozen body moves a model to another language or vocabulary; other
names give any selective fine-tuning. A tied parameter trains once, wherever it is used. Parameters:
the sizes of the chosen ones.

Artetxe et al. 2020, "On the Cross-lingual Transferability of Monolingual Representations", section
2, https://arxiv.org/abs/1910.11856.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.token_embedding import token_embedding
from adapterhub.config.options import option
from adapterhub.errors import SiteError, did_you_mean
from adapterhub.methods._base import Unfreezing, register_method

EMBEDDINGS = "embeddings"


@register_method
@dataclass(frozen=True)
class Chosen(Unfreezing):
    """Parameters of the backbone that the user names train."""

    name = "chosen"
    paper = "Artetxe et al. 2020, https://arxiv.org/abs/1910.11856"
    summary = "chosen parameters of the backbone train, such as the embeddings"
    learning_rate = 5e-4

    names: tuple[str, ...] = option(
        (EMBEDDINGS,),
        "names as in adapter files, * as a wildcard (decoder.*.attn.q.weight); or embeddings",
    )

    def paths(self, anatomy: Anatomy) -> list[str]:
        """The named parameters.

        Raises:
            SiteError: names that are no parameter of the backbone.
        """
        named = anatomy.parameters()
        keys = {anatomy.key(path): path for path in named}
        embedding = token_embedding(anatomy.model)
        table = next((path for path, p in named.items() if p is embedding), None)
        found = {
            name: [table] if name == EMBEDDINGS and table else fnmatch.filter(keys, name)
            for name in self.names
        }
        if wrong := [name for name, keys_ in found.items() if not keys_]:
            raise SiteError(
                "the backbone has no such parameters",
                offenders=[f"{name!r}{did_you_mean(name, keys)}" for name in wrong],
                expected=f"{EMBEDDINGS}, or names such as {next(iter(keys))}",
            )
        chosen = {keys.get(key, key) for keys_ in found.values() for key in keys_}
        return [path for path in named if path in chosen]
