"""`adapterhub push`; tests/registry/test_hub.py tests the upload."""

from __future__ import annotations
