"""Slow calls that have no effect in a test, left out."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def left_out() -> Iterator[None]:
    """Do not wait for the disk, and do not read certificates.

    A flush to the disk matters after a power cut only: a killed process loses nothing that it has
    written. A test that is about flushing replaces `os.fsync` itself. Each client of a hub reads
    the certificates of all authorities, and the servers of the tests do without encryption.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None, raising=False)
        yield
