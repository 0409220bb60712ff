"""Locations of an architecture's projections, sublayers and norms: sites, and one row per family.

This package reads modules and their names. It does not load checkpoints or compute anything.
"""

from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.family_file import register_family
from adapterhub.anatomy.sites import Anatomy, Site

__all__ = ["FAMILIES", "Anatomy", "Family", "Site", "Stack", "anatomy_of", "register_family"]
