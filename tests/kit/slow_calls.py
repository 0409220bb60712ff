"""Slow calls that have no effect in a test, left out."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn.server

_TICK = 0.01  # seconds


@contextmanager
def left_out() -> Iterator[None]:
    """Do not wait for the disk or for a server's end, and do not read certificates.

    A flush to the disk matters after a power cut only: a killed process loses nothing that it has
    written. A test that is about flushing replaces `os.fsync` itself. Each client of a hub reads
    the certificates of all authorities, and the servers of the tests do without encryption.
    uvicorn looks ten times a second whether it is to end, and then waits as long once more. Where
    there is no accelerator, torch keeps each seed for later, with the stack of its caller. A server
    that ends lets the collector look through all objects again, which here are those of all tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None, raising=False)
        patch.setattr(uvicorn.server, "asyncio", _Asyncio())
        patch.setattr(gc, "unfreeze", lambda: None)
        if torch := sys.modules.get("torch"):
            for kind in (torch.cuda, torch.xpu, torch.mtia):
                if not kind.is_available():
                    patch.setattr(kind, "manual_seed_all", lambda seed: None, raising=False)
        yield


class _Asyncio:
    """asyncio with short pauses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, _TICK))
