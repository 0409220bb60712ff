"""Structural discovery: derive the row of an architecture without one from its modules.

Layers are the elements of a module list in which some have attention: a module with projections
named as query, key and value, or as those of latent attention. Lists apart from these are stacks
too, if all their elements have projections. The rest follows from names and sizes, with d the width
of a layer:

    attention output    heads -> d, in the same module as q, k and v or in its parent
    feed-forward        up (and gate): d -> inner, down: inner -> d
    norms               by the sublayer that contains them, the others by their order
    keyvalue            where attention is computed in a known way (projections.py)

A name alone is not enough: the sizes must fit too. A fused projection is split where the source of
the forward shows its layout. Of two networks the larger one is the feed-forward,
and of two attentions the first is `attn`; other projections keep their names (roles.py).
What is not found is no site, and methods say so: see `select_sites`.
"""

from adapterhub.anatomy.discovery.row import discover

__all__ = ["discover"]
