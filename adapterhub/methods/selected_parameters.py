"""Train selected parameters of the backbone, by default the token embeddings (`chosen`).

    theta trains if its name matches one of `names`; all other parameters are frozen

Training only the embeddings transfers a model to another language or vocabulary; with other names,
any parameters can be selected. A tied parameter trains once, for all its uses; with `untied` each
name selects one use, which gets a separate copy.

Parameters: the sizes of the selected ones.

Artetxe et al. 2020, "On the Cross-lingual Transferability of Monolingual Representations", section
2, https://arxiv.org/abs/1910.11856.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.errors import SiteError, did_you_mean
from adapterhub.methods.common.base import Unfreezing, Unfrozen, register_method

EMBEDDINGS = "embeddings"


@register_method
@dataclass(frozen=True)
class SelectedParameters(Unfreezing):
    """Train the backbone parameters that the user names."""

    name = "chosen"
    paper = "Artetxe et al. 2020, https://arxiv.org/abs/1910.11856"
    summary = "train selected backbone parameters, by default the token embeddings"
    learning_rate = 5e-4

    names: tuple[str, ...] = option(
        (EMBEDDINGS,),
        "embeddings, or names as in adapter files with * as a wildcard (decoder.*.attn.q.weight)",
    )

    untied: bool = option(False, "train only the named uses of tied parameters, each by itself")

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield the named parameters."""
        return (Unfrozen(path, untied=self.untied) for path in self.paths(anatomy))

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the named parameters.

        Raises:
            SiteError: a name does not match any parameter of the backbone.
        """
        parameters = anatomy.parameters(every_use=self.untied)
        path_of = {anatomy.key(path): path for path in parameters}
        embedding = anatomy.backbone.token_embedding
        embedding_paths = [path for path, p in parameters.items() if p is embedding]
        selected: set[str] = set()
        unmatched = []
        for name in self.names:
            paths = [path_of[key] for key in fnmatch.filter(path_of, name)]
            if name == EMBEDDINGS and embedding_paths:
                paths = embedding_paths
            selected.update(paths)
            if not paths:
                unmatched.append(f"{name!r}{did_you_mean(name, path_of)}")
        if unmatched:
            raise SiteError(
                "the backbone has no such parameters",
                offenders=unmatched,
                expected=f"{EMBEDDINGS}, or names such as {next(iter(path_of))}",
            )
        return [path for path in parameters if path in selected]
