"""Gated parts of `adapters`: UniPELT, or LoRA, prefixes and sequential adapters alone.

    g = mean over the tokens i of sigmoid(w z_i + b)

They become the parts of one unipelt with `gate: sequence`. In a decoder that gate depends on later
tokens, and during generation only on the tokens of the current step. It is therefore refused on a
model that generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.site_patterns import sites_option
from adapterhub.anatomy.sites import Site
from adapterhub.interchange.translation import Translation
from adapterhub.methods.unipelt import UniPELT


def add_gated(options: Mapping[str, Any], sites: Iterable[Site], translation: Translation) -> None:
    """Add a gated part to the translation's one unipelt."""
    sites = list(sites)
    in_decoder = [site.id for site in sites if site.stack == "decoder"]
    if in_decoder and translation.anatomy.model.can_generate():
        translation.problems.append(
            f"use_gating: {in_decoder[0]} and {len(in_decoder) - 1} more sites of a decoder are "
            "gated by the mean over the sequence, which includes later tokens and changes during "
            "generation; only models that do not generate, such as classifiers, are supported"
        )
    added = {"gate": "sequence", **options, "sites": sites_option(translation.anatomy, sites)}
    for number, method in enumerate(translation.methods):
        if unipelt := method.get(UniPELT.name):
            if duplicates := sorted(options.keys() & unipelt.keys()):
                translation.problems.append(
                    f"use_gating: several parts have {', '.join(duplicates)}"
                )
            merged = {**unipelt, **added, "sites": [*unipelt["sites"], *added["sites"]]}
            translation.methods[number] = {UniPELT.name: merged}
            return
    translation.methods.append({UniPELT.name: added})
