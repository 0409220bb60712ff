"""A real local Ray of two nodes with a CPU each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapterhub.ray_cluster import import_ray


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
