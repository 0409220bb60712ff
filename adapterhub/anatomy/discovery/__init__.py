"""Structural discovery: derive a missing row from the modules of an architecture.

Layers are the elements of a module list if some elements have attention: a module whose projections
are named as query, key and value, or as projections of latent attention. Separate lists are also
stacks, if all their elements have projections. The rest follows from names and sizes, with d the
width of a layer:

    attention output    heads -> d, in the same module as q, k and v or in its parent
    feed-forward        up (and gate): d -> inner, down: inner -> d
    norms               by the sublayer that contains them, the others by their order
    keyvalue            where attention is computed in a known way (projections.py)

A name alone is not enough: the sizes must also fit. A fused projection is split if the source of
the forward shows its layout. The larger of two networks is the feed-forward network, and the first
of two attentions is `attn`. Other projections keep their names (roles.py). A module that is not
recognized is not a site, and methods that need it raise an error: see `select_sites`.
"""

from adapterhub.anatomy.discovery.row import discover

__all__ = ["discover"]
