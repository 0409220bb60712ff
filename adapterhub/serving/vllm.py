"""The vLLM plugin: it resolves adapters by reference, and serves each as a LoRA.

    export ADAPTERHUB_VLLM_ALLOW="polite,team-*" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
    vllm serve BACKBONE --enable-lora --max-lora-rank 16

vLLM requests an unknown model from the plugin, such as `polite@3`, and keeps the result under that
name until the name is unloaded. Its prefix cache identifies adapters by name alone. A name
therefore refers to the same bytes for as long as the server runs, even if its tag moves.

vLLM loads plugins in each of its processes, so nothing slow is imported unless adapters are named.
Interface:
https://docs.vllm.ai/en/latest/design/lora_resolver_plugins.html.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import AdapterhubError, ConfigError

ALLOW = "ADAPTERHUB_VLLM_ALLOW"
MAX_RANK = "ADAPTERHUB_VLLM_MAX_LORA_RANK"
MAX_LOST = "ADAPTERHUB_VLLM_MAX_LOST"
_IDS = 2**31 - 1  # some releases of vLLM keep ids in 32 bits
# vLLM shows and formats only the messages of its own loggers.
_LOG = logging.getLogger("vllm.adapterhub")


@dataclass(frozen=True)
class ResolverSettings:
    """Settings from the environment for the adapters that vLLM may request.

    Attributes:
        allow: patterns of references, such as polite, team-* or hf:acme/*.
        max_rank: vLLM's `--max-lora-rank`.
        max_lost: the largest share of an update that a conversion may lose.
    """

    allow: tuple[str, ...]
    max_rank: int = 16
    max_lost: float = 0.1

    @classmethod
    def from_environment(cls) -> ResolverSettings:
        """Read the settings.

        Raises:
            ConfigError: a setting is not a number, or is out of range.
        """
        allow = tuple(re.split(r"[,\s]+", os.environ.get(ALLOW, "").strip(", \t\n")))
        rank = _number(MAX_RANK, cls.max_rank)
        if rank != int(rank) or rank < 1:
            raise ConfigError(f"{MAX_RANK}={rank:g}", expected="vLLM's --max-lora-rank, such as 16")
        lost = _number(MAX_LOST, cls.max_lost)
        if not 0 <= lost <= 1:
            raise ConfigError(f"{MAX_LOST}={lost:g}", expected="a share from 0 to 1, such as 0.1")
        return cls(tuple(filter(None, allow)), int(rank), lost)


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "") or str(default)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r}", expected="a number") from None


def register() -> None:
    """Register the resolver with vLLM, if `ADAPTERHUB_VLLM_ALLOW` names adapters.

    Raises:
        ConfigError: a setting is not a number, or is out of range.
    """
    settings = ResolverSettings.from_environment()
    if not settings.allow:
        _LOG.debug("no adapters of adapterhub can be requested: %s is not set", ALLOW)
        return
    from vllm.lora.resolver import LoRAResolverRegistry

    LoRAResolverRegistry.register_resolver("adapterhub", resolver_of(settings))


def resolver_of(settings: ResolverSettings) -> Any:
    """Return a vLLM resolver with these settings."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver

    from adapterhub.serving.lora_cache import ConvertedAdapters

    adapters = ConvertedAdapters(settings.allow, settings.max_rank, settings.max_lost)

    class AdapterhubResolver(LoRAResolver):  # type: ignore[misc]
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            """Return the LoRA of a reference; log a line and return None if it is not found."""
            try:
                adapter = await asyncio.to_thread(adapters.find, base_model_name, lora_name)
            except AdapterhubError as error:
                _LOG.warning("no LoRA for %.100r: %s", lora_name, error)
                return None
            _LOG.info("%.100r is %s, sha256 %.12s", lora_name, adapter.reference, adapter.digest)
            for note in adapter.notes:
                _LOG.warning("%s: %s", adapter.reference, note)
            options = {"is_3d_lora_weight": True} if adapter.stacked else {}
            if not hasattr(LoRARequest, "is_3d_lora_weight"):  # before vLLM 0.24
                options = {}
            return LoRARequest(
                lora_name=lora_name,
                lora_int_id=int_id(adapter.digest),
                lora_path=str(adapter.folder),
                **options,
            )

    return AdapterhubResolver()


def int_id(digest: str) -> int:
    """Return a positive number for a digest, equal in every process."""
    return int(digest, 16) % _IDS + 1
