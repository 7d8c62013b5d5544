"""How ranks that a launcher started find each other: through a key-value store that all of them can reach."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from spark_hvd.transport.torch_private import PrefixStore, Store, TCPStore, default_group_store
from spark_hvd.world.env import LaunchEnv, read_launch_env
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.layout import Endpoint, World, WorldLayout


@contextmanager
def meeting(rank: int, size: int) -> Iterator[None]:
    """Turn torch's errors into a CollectiveError if ranks do not find each other."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} of {size} could not meet the other ranks: {error}. Check that all {size} ranks were started "
            "and that their hosts can reach each other; for gloo, GLOO_SOCKET_IFNAME names the network interface."
        ) from error


def all_gather_facts(fact: Any, kv: Store, rank: int, size: int) -> list[Any]:
    """Publish a fact and collect those of all ranks, in rank order.

    The fact is anything that JSON can carry; ``kv`` must not have been used for this before.

    Raises:
        CollectiveError: A rank did not publish its fact within the store's timeout.
    """
    with meeting(rank, size):
        kv.set(f"fact/{rank}", json.dumps(fact))
        return [json.loads(text) for text in kv.multi_get([f"fact/{other}" for other in range(size)])]


def launched_world(env: LaunchEnv) -> tuple[World, Store]:
    """Return the world that torchrun's variables describe, and the store that torchrun or rank 0 serves.

    Raises:
        CollectiveError: The other ranks could not be reached.
    """
    hosts_store = env.rank == 0 and not env.store_is_hosted
    with meeting(env.rank, env.size):
        store = TCPStore(
            env.endpoint.host, env.endpoint.port, env.size, hosts_store, wait_for_workers=False, multi_tenant=True
        )
    kv = PrefixStore(f"spark_hvd/launch/{env.generation}", store)
    layout = _layout(kv, env.rank, env.size, env.host, env.node)
    return World(layout.ranks[env.rank], env.endpoint, env.generation), kv


def adopted_world(prefix: str) -> tuple[World, WorldLayout, Store]:
    """Return the world of the default process group that the user initialised, and its store.

    ``prefix`` is for keys that have not been used before.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    kv = PrefixStore(prefix, default_group_store())
    env = read_launch_env()
    host = socket.gethostname()
    layout = _layout(kv, rank, size, host, host if env is None else env.node)
    return World(layout.ranks[rank], None if env is None else env.endpoint), layout, kv


def _layout(kv: Store, rank: int, size: int, host: str, node: str) -> WorldLayout:
    places = all_gather_facts([host, node], PrefixStore("places", kv), rank, size)
    return WorldLayout.of_ranks([place[0] for place in places], [place[1] for place in places])


def own_address(endpoint: Endpoint | None) -> str:
    """Return this host's address on the network through which it reaches an endpoint."""
    if endpoint is None:
        return socket.gethostbyname(socket.gethostname())
    family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: this only chooses the route
        return str(probe.getsockname()[0])
