"""Pre-trained models: load one (quantized or not), read its weights, compute its identity.

Nothing here depends on adapters.
"""

from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.load import load_backbone

__all__ = ["fingerprint", "load_backbone"]
