"""Where an architecture's projections, sublayers and norms are: sites, and one row a family. Reads
modules and their names; loads no checkpoint and computes nothing."""

from adapterhub.anatomy.families import FAMILIES, anatomy_of
from adapterhub.anatomy.sites import Anatomy, Family, Site, Stack

__all__ = ["FAMILIES", "Anatomy", "Family", "Site", "Stack", "anatomy_of"]
