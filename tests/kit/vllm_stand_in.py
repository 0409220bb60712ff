"""A stand-in for vLLM, which needs a GPU: its plugin interface, and how its server resolves names.

The signatures are those of `vllm/lora/request.py`, `vllm/lora/resolver.py` and `resolve_lora` in
`vllm/entrypoints/openai/models/serving.py`, of 2025 and 2026.
"""

from __future__ import annotations

import asyncio
import sys
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar


@dataclass(eq=False)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        assert self.lora_path, "lora_path cannot be empty"


class LoRAResolver(ABC):
    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None: ...


@dataclass
class _LoRAResolverRegistry:
    resolvers: dict[str, LoRAResolver] = field(default_factory=dict)

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        self.resolvers[resolver_name] = resolver


class _Model:
    """An entry of vLLM's registry: a class that serves LoRA, or does not, and how at experts."""

    def __init__(self, lora: bool, stacked: bool = False) -> None:
        self.lora, self.stacked = lora, stacked

    def load_model_cls(self) -> type:
        return type("Model", (), {"supports_lora": self.lora, "is_3d_moe_weight": self.stacked})


class ModelRegistry:
    """The models of `vllm/model_executor/models/registry.py`."""

    models: ClassVar = {
        "LlamaForCausalLM": _Model(True),
        "GPT2LMHeadModel": _Model(False),
        "MixtralForCausalLM": _Model(True),
        "GptOssForCausalLM": _Model(True, stacked=True),
        "Qwen3_5MoeForCausalLM": _Model(True, stacked=True),
    }

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        return [*cls.models]


@contextmanager
def standing_in() -> Iterator[_LoRAResolverRegistry]:
    """Put the stand-in into `sys.modules`; yield its registry."""
    registry = _LoRAResolverRegistry()
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.lora")}
    modules["vllm.model_executor"] = types.ModuleType("vllm.model_executor")
    modules["vllm.model_executor.models"] = types.ModuleType("vllm.model_executor.models")
    modules["vllm.model_executor.models"].ModelRegistry = ModelRegistry
    modules["vllm.model_executor.models"].supports_lora = lambda model: model.supports_lora
    modules["vllm.lora.request"] = types.ModuleType("vllm.lora.request")
    modules["vllm.lora.request"].LoRARequest = LoRARequest
    modules["vllm.lora.resolver"] = types.ModuleType("vllm.lora.resolver")
    modules["vllm.lora.resolver"].LoRAResolver = LoRAResolver
    modules["vllm.lora.resolver"].LoRAResolverRegistry = registry
    modules["vllm"].__spec__ = ModuleSpec("vllm", None)  # it can be found
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield registry
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Server:
    """What vLLM's server does with the names of models that it does not know."""

    def __init__(self, base: str, registry: _LoRAResolverRegistry) -> None:
        self.base, self.registry = base, registry
        self.requests: dict[str, LoRARequest] = {}
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def resolve(self, name: str) -> LoRARequest | None:
        async with self.locks[name]:
            if name not in self.requests:
                for resolver in self.registry.resolvers.values():
                    if (found := await resolver.resolve_lora(self.base, name)) is not None:
                        self.requests[name] = found
                        break
            return self.requests.get(name)
