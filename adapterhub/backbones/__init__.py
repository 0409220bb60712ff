"""Pre-trained models: load one (quantized or not), read its weights, compute its identity. Knows no
adapter."""

from adapterhub.backbones.fingerprint import fingerprint_of
from adapterhub.backbones.load import fingerprint, load_backbone

__all__ = ["fingerprint", "fingerprint_of", "load_backbone"]
