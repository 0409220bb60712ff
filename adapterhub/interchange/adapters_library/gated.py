"""Gated parts of `adapters`, its UniPELT or any of LoRA, prefixes and sequential adapters alone.

    g = mean over the tokens i of sigmoid(w z_i + b)

They become the parts of one unipelt with `gate: sequence`. In a decoder that gate reads the tokens
that are still to come, and while it generates only those of the step: ours is refused on a model
that generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.sites import Site
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.unipelt import UniPELT


def add_gated(options: Mapping[str, Any], chosen: Iterable[Site], draft: Translation) -> None:
    """Add a gated part at some sites, with its options of unipelt, to the one unipelt."""
    chosen = list(chosen)
    decoding = [site.id for site in chosen if site.stack == "decoder"]
    if decoding and draft.anatomy.model.can_generate():
        draft.problems.append(
            f"use_gating: {decoding[0]} and {len(decoding) - 1} more sites of a decoder have the "
            "mean of a sequence's gates, which reads tokens still to come, and changes when they "
            "are generated one by one; a model that does not generate, a classifier, takes it"
        )
    spec = {"gate": "sequence", **options, "sites": sites_option(draft.anatomy, chosen)}
    for number, method in enumerate(draft.methods):
        if held := method.get(UniPELT.name):
            if twice := sorted(options.keys() & held.keys()):
                draft.problems.append(f"use_gating: several parts have {', '.join(twice)}")
            sites = [*held["sites"], *spec["sites"]]
            draft.methods[number] = {UniPELT.name: {**held, **spec, "sites": sites}}
            return
    draft.methods.append({UniPELT.name: spec})
