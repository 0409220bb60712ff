"""Backbones: how to load one, where its sites are, and who it is."""

from adapterhub.backbones.anatomy import Anatomy, Family, Site, Stack
from adapterhub.backbones.families import FAMILIES, anatomy_of
from adapterhub.backbones.fingerprint import fingerprint_of
from adapterhub.backbones.load import fingerprint, load_backbone

__all__ = [
    "FAMILIES",
    "Anatomy",
    "Family",
    "Site",
    "Stack",
    "anatomy_of",
    "fingerprint",
    "fingerprint_of",
    "load_backbone",
]
