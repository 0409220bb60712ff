"""Ray clusters: connect to one, and divide its CPUs and GPUs among workers."""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import ConfigError

CPUS = 4  # per worker, if the number of workers is not given
CONNECTING = 10.0  # seconds
# Environment variables that Ray reads on import. They disable usage reports and the printing of
# worker deaths, which are handled or raised here.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


@dataclass(frozen=True)
class WorkerShare:
    """The resources of a node that a worker gets; `node` is Ray's id."""

    node: str
    cpus: int
    gpus: int = 0


def share_out(nodes: Iterable[Mapping[str, Any]], workers: int | None) -> list[WorkerShare]:
    """Divide the CPUs and GPUs of `ray.nodes()` among workers.

    By default, each GPU gets one worker; without GPUs, every `CPUS` CPUs of a node get one.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs for the workers.
    """
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    cpus = {node: int(resources.get("CPU", 0)) for node, resources in alive.items()}
    gpus = {node: int(resources.get("GPU", 0)) for node, resources in alive.items()}
    units, name, each = (gpus, "GPUs", 1) if any(gpus.values()) else (cpus, "CPUs", CPUS)
    counts = {node: max(count // each, min(count, 1)) for node, count in units.items()}
    most, wanted = sum(units.values()), sum(counts.values()) if workers is None else workers
    if not 1 <= wanted <= most:
        raise ConfigError(
            f"{wanted} workers on a Ray cluster with {most} {name}",
            expected=f"from one worker to one for each of its {name}",
            hint=f"--workers {most}" if most else "ray start on machines with CPUs or GPUs",
        )
    if workers is not None:
        counts = dict.fromkeys(units, 0)
        for _ in range(workers):
            counts[max(units, key=lambda node: units[node] / (counts[node] + 1))] += 1
    return [
        WorkerShare(node, cpus[node] // count, int(units is gpus))
        for node, count in counts.items()
        for _ in range(count)
    ]


def import_ray() -> Any:
    """Return the module ray.

    Raises:
        ConfigError: ray is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed", hint='pip install "adapterhub[ray]"'
        ) from error
    return ray


def import_serve() -> tuple[Any, Any]:
    """Return the modules ray and ray.serve.

    Raises:
        ConfigError: they or their dependencies are not installed.
    """
    try:
        ray = import_ray()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray import serve
    except (ImportError, ConfigError) as error:
        raise ConfigError(
            "serve --ray needs Ray Serve, which is not installed",
            hint='pip install "adapterhub[serve,ray-serve]"',
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray, serve


def connect_ray(ray: Any, address: str | None) -> None:
    """Connect to a cluster at HOST:PORT, by default at RAY_ADDRESS, or start Ray on this machine.

    Raises:
        ConfigError: the address does not respond.
    """
    chosen = address or os.environ.get("RAY_ADDRESS", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if match := re.fullmatch(r"([^:/]+):(\d+)", chosen):
                # Ray itself retries for five minutes.
                socket.create_connection((match[1], int(match[2])), CONNECTING).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster at {chosen or 'this machine'}: {str(error).splitlines()[0]}",
                expected="--ray-address HOST:PORT of a running cluster, or none to start Ray here",
                hint="ray start --head, which prints the address",
            ) from error
