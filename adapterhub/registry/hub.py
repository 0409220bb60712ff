"""The Hugging Face Hub, or a hub of one's own that speaks its protocol."""

from __future__ import annotations


class HubStore:
    """A store on a hub."""

    def __init__(self, endpoint: str | None = None) -> None:
        self.endpoint = endpoint
