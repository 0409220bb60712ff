"""Small adapters on a server: in a thread, over HTTP, beside vLLM and Ray."""

import asyncio
import socket
import sys
import threading
import time
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import uvicorn

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.inference.inputs import examples_of
from adapterhub.inference.open import AdapterSource, open_adapter
from adapterhub.ray_cluster import import_ray
from adapterhub.serving import Engine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.lifecycle import ENDPOINTS, HttpServer, make_app, open_service
from adapterhub.serving.http.request import Service
from adapterhub.serving.options import ServeOptions
from adapterhub.web.frame import Endpoint
from tests.kit import tiny_models

# Small adapters of several tasks and methods on one backbone, for the tests of serving.


TEXTS = (
    "the movie was good",
    "a plot",
    "the film is very very dull",
    "the actor was awful and the end was great",
    "fine",
    "a scene is bad a scene is bad a scene is bad a scene is bad",
)
CONTEXT = "the movie was very good and the end was poor"


@dataclass(frozen=True)
class TaskExample:
    """A task, the model that it needs, inputs, and the column of a second text."""

    task: str
    kind: str
    labels: tuple[str, ...] = ()
    inputs: tuple[Any, ...] = TEXTS
    pair: str | None = None


@contextmanager
def busy(engine: Engine) -> Iterator[threading.Event]:
    """Keep the compute thread busy until the event is set, or the block ends."""
    begun, free = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        free.wait(30)

    engine._between_batches(wait)
    assert begun.wait(30)
    try:
        yield free
    finally:
        free.set()


EXAMPLES = (
    TaskExample("classification", "classification", ("neg", "pos")),
    TaskExample("classification", "classification", ("a", "b", "c", "d", "e")),
    TaskExample("multi-label", "multi-label", ("good", "strong", "long")),
    TaskExample("regression", "regression"),
    TaskExample(
        "reranking", "regression", (), (("good film", CONTEXT), ("a plot", "a movie")), "pair"
    ),
    TaskExample("tagging", "tagging", ("O", "B-x", "I-x")),
    TaskExample("question-answering", "question-answering", (), (("the end was", CONTEXT),)),
    TaskExample("embedding", "embedding", (), (*TEXTS, (TEXTS[0], TEXTS[2]))),
)


def write_adapter(
    backbone: Path,
    folder: Path,
    method: str = "lora(rank=2)",
    example: TaskExample = EXAMPLES[0],
    seed: int = 1,
    **options: Any,
) -> str:
    """Save an adapter with random values; return its folder."""
    model = _loaded(str(backbone), example.kind, example.labels)
    adapter = ah.attach(model, method, name="served", **options)
    try:
        tiny_models.scramble(adapter, seed=seed)
        recipe = {"task": example.task, "data": {"pair": example.pair}}
        adapter.metadata.training = {"recipe": recipe}
        adapter.save(folder)
    finally:
        adapter.detach()
    return str(folder)


@lru_cache(16)
def _loaded(backbone: str, kind: str, labels: tuple[str, ...]) -> Any:
    """Load a model, which adapters leave as it was."""
    return load_backbone(backbone, task=kind, labels=labels)[0]


def expected_answers(folder: str, inputs: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return what `predict --json` prints for each input alone."""
    opened = open_adapter(folder)
    found = []
    for given in inputs:
        (example,), _ = examples_of(given, opened.task, opened.data)
        found.append(opened.task.printed(example, opened.predict(given)))
    return found


def same_answer(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    """Return whether two answers are equal, but for the last digits of their numbers."""
    if isinstance(one, float):
        return abs(one - other) <= tolerance
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_answer(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_answer, one, other))
    return bool(one == other)


# Adapters that write texts, and what each writes alone.


CAUSAL = TaskExample("causal-lm", "causal-lm")
SEQ2SEQ = TaskExample("seq2seq", "seq2seq")
METHODS = (
    "lora(rank=2)",
    "dora(rank=2)",
    "ia3",
    "pfeiffer(size=4)",
    "compacter(size=8, n=2)",
    "prefix(length=3)",
    "prompt(length=4)",
    "p-tuning(length=2)",
)
PROMPTS = (
    "the movie was good",
    "a plot",
    "the film is very very dull and the end was great",
    "the actor was awful",
    "a scene is bad a scene is bad a scene is bad a scene is bad",
)
LONG_PROMPT = "the movie was good and the plot was bad " * 4 + "the end"


def write_writers(
    backbone: Path, folder: Path, methods: tuple[str, ...] = METHODS, example: Any = CAUSAL
) -> list[str]:
    """Save an adapter of each method; return their folders."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            write_adapter(backbone, folder / f"writer-{n}", method, example, seed=n + 1)
            for n, method in enumerate(methods)
        ]


def written_alone(folder: str, prompt: Any, tokens: int) -> list[int]:
    """Return the tokens that `generate` writes for one prompt, with the adapter active."""
    known = (folder, str(prompt), tokens)
    if known not in _WRITTEN:
        if folder not in _OPENED:
            _OPENED[folder] = open_adapter(folder)
        opened = _OPENED[folder]
        _WRITTEN[known] = tokens_alone(opened.model, opened.tokenizer, prompt, tokens)
    return _WRITTEN[known]


@torch.no_grad()
def tokens_alone(model: Any, tokenizer: Any, prompt: Any, tokens: int) -> list[int]:
    """Return the tokens that `generate` writes for one prompt with what is active."""
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)
    first = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return list(ids[0, first:].tolist())


_OPENED: dict[str, Any] = {}
_WRITTEN: dict[Any, list[int]] = {}


# A server of small adapters over HTTP, in a thread of this process, for clients of all kinds.


BACKBONE = "the-backbone"
PAIRS = ((CONTEXT, "the movie was good"), ("a plot", "the end was poor"))
NAMED: Mapping[str, TaskExample] = {
    **{("many" if n == 1 else e.task): e for n, e in enumerate(EXAMPLES)},
    "entailment": TaskExample(
        "classification",
        "classification",
        ("entailment", "neutral", "contradiction"),
        PAIRS,
        "pair",
    ),
    "masked": TaskExample("masked-lm", "masked-lm", (), ("the [MASK] was good", "a [MASK] [MASK]")),
    "choices": TaskExample("multiple-choice", "multiple-choice", (), (("a plot", "good", "bad"),)),
}
"""An adapter for each form of answers of an encoder, by the name that clients use."""


def write_named(backbone: Path, folder: Path) -> dict[str, str]:
    """Save the adapters; return the folder of each."""
    folders = {}
    for seed, (name, example) in enumerate(NAMED.items()):
        torch.manual_seed(seed)  # heads are new
        folders[name] = write_adapter(backbone, folder / name, example=example, seed=seed)
    return folders


def write_wordy(
    backbone: Path, folder: Path, example: TaskExample, method: str = "lora(rank=2)", least: int = 3
) -> str:
    """Save an adapter that writes some words about the first text; return its folder.

    Most random ones repeat a word, or write numbers that no token of the tokenizer has.
    """
    for seed in range(40):
        torch.manual_seed(seed)
        saved = write_adapter(backbone, folder / f"{seed}", method, example, seed=seed)
        (answer,) = expected_answers(saved, TEXTS[:1])
        words = answer["generated"].split()
        if len({*words}) >= least:
            return saved
    raise AssertionError(f"no adapter writes {least} words")


def service_of(engine: Engine, folders: Mapping[str, str], **more: str) -> Service:
    """Return a service of folders, of references and of the engine's backbone."""
    references = {name: AdapterSource(reference) for name, reference in more.items()}
    named = {name: AdapterSource(folder) for name, folder in folders.items()}
    allowed = AllowedAdapters({BACKBONE: None, **named, **references}, folders=frozenset(folders))
    return Service(engine, allowed, backbone=BACKBONE)


@contextmanager
def running(service: Service, endpoints: Sequence[Endpoint] = ()) -> Iterator[str]:
    """Serve on a free port of the loopback; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(service, endpoints or (*ENDPOINTS, *operations()))
    config = uvicorn.Config(app, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@contextmanager
def started(**given: Any) -> Iterator[tuple[str, HttpServer, list[Exception]]]:
    """Run a server with options; yield its address, itself, and the error that it ended with."""
    options = ServeOptions(port=0, **given)
    addresses: list[str] = []
    errors: list[Exception] = []
    ready = threading.Event()

    def say(address: str) -> None:
        addresses.append(address)
        ready.set()

    server = HttpServer(open_service(options), options, say)

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        yield addresses[0] if addresses else "", server, errors
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


# A stand-in for vLLM, which needs a GPU: its plugin interface, and how its server resolves names.
#
# The signatures are those of `vllm/lora/request.py`, `vllm/lora/resolver.py` and `resolve_lora` in
# `vllm/entrypoints/openai/models/serving.py`, of 2025 and 2026.


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
    contents = {
        "vllm": {}, "vllm.lora": {}, "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.lora.resolver": {"LoRAResolver": LoRAResolver, "LoRAResolverRegistry": registry},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {
            "ModelRegistry": ModelRegistry, "supports_lora": lambda model: model.supports_lora,
        },
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, content in contents.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            module.__spec__ = ModuleSpec(name, None)  # it can be found
            patch.setitem(sys.modules, name, module)
        yield registry


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


# A real local Ray of two nodes with a CPU each.


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start them; yield their address."""
    ray = import_ray()
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, include_dashboard=False)
        nodes.add_node(num_cpus=1)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()
