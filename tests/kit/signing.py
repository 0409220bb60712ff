"""Keys and signed adapters for tests."""

from __future__ import annotations

import pytest

from adapterhub.files.signature import PrivateKey
from adapterhub.registry.trust import require_signatures, trust_key


def new_key() -> PrivateKey:
    """Create a key; without the package cryptography the test is skipped."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return PrivateKey(ed25519.Ed25519PrivateKey.generate())


def require(key: PrivateKey) -> None:
    """Trust a key, and require signatures of all adapters."""
    trust_key(key.public)
    require_signatures(True)
