"""The private names of JAX that we need, in one place to check when JAX changes; docs/versions.md lists them."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax._src.clusters import ClusterEnv as ClusterEnv
from jax._src.lib import _jax


def prefer(cluster: type[Any]) -> None:
    """Have JAX ask this cluster first: ranks may run below Slurm, Kubernetes or MPI, whose processes are not ours."""
    ClusterEnv._cluster_types.remove(cluster)
    ClusterEnv._cluster_types.insert(0, cluster)


def is_used() -> bool:
    """Return whether JAX has looked for its devices, after which no world can be joined."""
    return bool(xla_bridge.backends_are_initialized())


def place() -> tuple[int, int] | None:
    """Return this process's number in jax.distributed, and the number of processes; None before initialisation."""
    state = distributed.global_state
    return None if state.client is None else (state.process_id, state.num_processes)


def meet_on_cpus_at(address: str) -> None:
    """Have Gloo, which JAX uses between CPUs, listen on this address; it would look up the host's name."""

    def client() -> Any:
        ours = distributed.global_state.client
        if ours is None or jax.config.jax_cpu_collectives_implementation != "gloo":
            return xla_bridge.make_cpu_client()
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=ours, hostname=address))

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
