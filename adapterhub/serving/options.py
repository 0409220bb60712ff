"""Options of `adapterhub serve`, from flags or a YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adapterhub.config.options import from_dict, option, range_problems
from adapterhub.config.yaml import load_yaml, seconds_of, size_in_bytes
from adapterhub.errors import ConfigError
from adapterhub.registry.local import default_root
from adapterhub.web.connections import is_loopback_address

_TIMES = ("refresh", "deadline", "generation_time", "drain", "write_timeout")
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")
_SIZES = ("adapter_memory", "body")


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server: adapters, clients and limits."""

    adapters: tuple[str, ...] = option((), "references, or NAME=REFERENCE; none: the registry's")
    backbone: str | None = option(None, "the backbone of all adapters: a Hub id or folder")
    allow: tuple[str, ...] = option((), "patterns of adapters that clients may also use: team-*")
    registry: str | None = option(None, "folder, bucket or https URL")
    require_signature: bool = option(False, "refuse adapters that no trusted key has signed")
    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    tokens: str | None = option(None, "file of tokens (null: your own, if there are some)")
    metrics: Literal["open", "predict", "admin", "off"] = option(
        "admin", "role that may read /metrics if tokens are required; open: anyone, off: no one"
    )
    admin: bool = option(True, "serve paths that change something")
    allow_origin: tuple[str, ...] = option(
        (), "origins of pages whose browsers may ask: https://app.example.org"
    )
    try_page: bool = option(False, "serve a page at / to try adapters")
    batch_tokens: int | None = option(None, "most positions at once (null: by the device)", least=1)
    max_length: int | None = option(
        None, "longest input, in tokens (null: the backbone's limit)", least=1
    )
    queue_tokens: int = option(1 << 17, "most tokens that wait", least=1)
    adapter_memory: str = option("2GiB", "bytes of adapters that are kept in memory")
    refresh: str = option("10s", "interval between checks for new versions; off: never")
    deadline: str = option("30s", "time until a request must be computed")
    generation_time: str = option("5m", "time that a text may take from its first token on")
    drain: str = option("30s", "longest time to finish requests at shutdown")
    write_timeout: str = option("30s", "time after which a client that reads nothing is dropped")
    body: str = option("4MiB", "most bytes of a request")
    inputs: int = option(1024, "most inputs of a request", least=1)
    requests_per_minute: int = option(0, "of each token; 0: any number", least=0)
    metric_adapters: int = option(100, "most adapters with metrics of their own", least=0)
    threads: int | None = option(None, "threads of torch (null: its own choice)", least=1)
    device: str | None = option(None, "cpu, cuda or cuda:N (null: a GPU if there is one)")
    dtype: str | None = option(None, "fp32, bf16 or fp16 (null: as each adapter was trained)")
    quantize: str | None = option(None, "nf4, int8, ... (null: as each adapter was trained)")
    ray: bool = option(False, "compute in replicas on a Ray cluster")
    ray_address: str | None = option(None, "HOST:PORT of a running cluster (null: start Ray here)")
    workers: int | None = option(
        None, "replicas (null: one for each GPU, or every 4 CPUs)", least=1
    )
    log_requests: bool = option(True, "one line of JSON for each request")

    def seconds(self, name: str) -> float:
        """Return a time option in seconds; infinity if it is off."""
        text = getattr(self, name)
        return float("inf") if text == "off" else seconds_of(text) or 0.0

    def size(self, name: str) -> int:
        """Return a size option in bytes."""
        return size_in_bytes(getattr(self, name)) or 0

    @property
    def own_registry(self) -> str:
        """The registry: the option, `$ADAPTERHUB_REGISTRY`, or the user's own folder."""
        return self.registry or os.environ.get("ADAPTERHUB_REGISTRY") or str(default_root())

    @property
    def is_local(self) -> bool:
        """Whether the address is reachable from this machine only."""
        return is_loopback_address(self.host)


def read_serve_options(file: str | None, flags: Mapping[str, Any]) -> ServeOptions:
    """Read the options of a file, overridden by the given ones.

    Raises:
        ConfigError: the file cannot be read, or options are not valid.
    """
    data = load_yaml(file) if file else {}
    options = from_dict(ServeOptions, {**data, **flags})
    problems = [
        f"{name}: {getattr(options, name)!r} is not a time such as 30s or 5m"
        for name in _TIMES
        if not options.seconds(name) or (name != "refresh" and getattr(options, name) == "off")
    ]
    problems += [
        f"{name}: {getattr(options, name)!r} is not a size such as 2GiB"
        for name in _SIZES
        if not options.size(name)
    ]
    problems += [
        f"allow_origin: {each!r} is not an origin such as https://app.example.org"
        for each in options.allow_origin
        if not _ORIGIN.fullmatch(each)
    ]
    problems += range_problems(options)
    if problems:
        raise ConfigError("options of the server are not valid", offenders=problems)
    return options
