"""Modules of an encoder of pictures whose outputs the language model does not read.

LLaVA and its kin take the states before the last layer, hidden_states[-2]: what follows is computed
and dropped, so that nothing there could be trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from adapterhub.anatomy.sites import Anatomy

_OPTION = "vision_feature_layer"


def dropped_modules(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of the modules behind the last states that are read; () in most models."""
    chosen = getattr(anatomy.model.config, _OPTION, None)
    numbers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    if not numbers or "vision" not in anatomy.layers:
        return ()
    layers = anatomy.layers["vision"]
    # States 0 are the embeddings: states n are read behind n layers.
    read = max(n if n >= 0 else len(layers) + 1 + n for n in numbers)
    return (*layers[read:], *_behind(anatomy)) if read < len(layers) else ()


def _behind(anatomy: Anatomy) -> Iterator[str]:
    """Yield the modules of the encoder that are registered behind its layers, such as a norm."""
    paths = [paths[0].split(".") for paths in anatomy.layers.values()]
    columns = zip(*paths, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, columns))
    parts = anatomy.layers["vision"][0].split(".")[:-1]
    for depth in range(shared + 1, len(parts)):
        holder = ".".join(parts[:depth])
        names = [name for name, _ in anatomy.model.get_submodule(holder).named_children()]
        yield from (f"{holder}.{name}" for name in names[names.index(parts[depth]) + 1 :])
