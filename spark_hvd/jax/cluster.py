"""Makes the ranks of a run the processes of ``jax.distributed``: all of them meet at rank 0, once."""

from __future__ import annotations

import os
import socket
from typing import Any

import jax
import torch

from spark_hvd.collectives.execution import all_results
from spark_hvd.collectives.process_set import global_process_set
from spark_hvd.collectives.start import start_allgather
from spark_hvd.context import init as context
from spark_hvd.context.basics import rank, size
from spark_hvd.context.global_state import current, is_initialized, ordinal
from spark_hvd.jax import private
from spark_hvd.transport.rendezvous import own_address
from spark_hvd.world import launcher
from spark_hvd.world.errors import CollectiveError, StalledError
from spark_hvd.world.ports import PortRange, bound
from spark_hvd.world.words import count, ranks_text

_TIMEOUT = 300
"""Seconds; JAX's default."""
_NEXT = (
    "Call hvd.init() of spark_hvd.jax, or jax.distributed.initialize(), on every rank; or on none, if one rank should "
    "compute with JAX alone."
)

_held: list[socket.socket] = []
"""Sockets that hold the ports of coordinators, for as long as this process lives."""


def init(*, initialization_timeout: float = _TIMEOUT, **settings: Any) -> None:
    """Join the world that the launcher made, and make its ranks the processes of ``jax.distributed``.

    All ranks must call this before anything of JAX computes or looks for devices. Repeated calls do nothing.
    Afterwards, ``jax.devices()`` contains the devices of all ranks. Rank 0's JAX listens for the others on the network
    of the ranks, without a password. On a GPU, JAX sees only this rank's. A world of one needs no meeting.

    Args:
        initialization_timeout: Seconds within which the other ranks must call this, too.
        **settings: As for :func:`spark_hvd.torch.init`.

    Raises:
        RuntimeError: JAX has looked for devices already, jax.distributed was initialised for other processes, or the
            run is elastic.
        StalledError: A rank has not called this in time; the text names it.
        CollectiveError: A rank has ended without calling this, or the network failed.
        ValueError, TypeError: See :func:`spark_hvd.torch.init`.
    """
    context.init(**settings)
    _refuse_elastic()
    me = rank(), size()
    if (found := private.place()) is not None:
        if found != me:
            raise RuntimeError(
                f"jax.distributed was initialised as process {found[0]} of {found[1]}, but this is rank {me[0]} of "
                f"{me[1]}. Remove jax.distributed.initialize(), or call it without arguments"
            )
        return
    if me[1] == 1:
        return
    if private.is_used():
        raise RuntimeError(
            "hvd.init() comes too late on this rank: JAX has looked for its devices already, which jax.devices(), "
            "jnp.zeros() and other calls do, even in a module that fn imports. Call hvd.init() before them"
        )
    address = _meet(initialization_timeout, None)
    jax.distributed.initialize(  # the address is given, so that the driver's JAX_COORDINATOR_ADDRESS is not used
        address,
        cluster_detection_method=SparkHvdCluster.name,
        initialization_timeout=max(1, int(initialization_timeout)),
        coordinator_bind_address=address,
    )


class SparkHvdCluster(private.ClusterEnv):  # type: ignore[misc] # JAX's types are not looked at
    """Provides the arguments of ``jax.distributed.initialize()`` in a rank."""

    name = "spark_hvd"

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether this process is a rank."""
        return is_initialized()

    @classmethod
    def get_coordinator_address(cls, timeout_secs: float | None, override_coordinator_port: str | None) -> str:
        """Return where rank 0 listens, once all ranks have asked."""
        _refuse_elastic()
        address = _meet(_TIMEOUT if timeout_secs is None else timeout_secs, override_coordinator_port)
        os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)  # JAX would listen on all interfaces
        return address

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of ranks."""
        return size()

    @classmethod
    def get_process_id(cls) -> int:
        """Return this process's rank."""
        return rank()

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """Return which of the visible GPUs is this rank's; None if there is none."""
        return torch.cuda.current_device() if torch.cuda.is_available() else None


private.prefer(SparkHvdCluster)


def _refuse_elastic() -> None:
    if launcher.installed() is not None:
        raise RuntimeError(
            "JAX in an elastic run: jax.distributed cannot change its processes once it has started. Start "
            "the ranks with spark_hvd.run(fn, max_restarts=...), and let fn resume from a checkpoint"
        )


def _meet(timeout: float, port: str | None) -> str:
    """Wait until all ranks are about to initialise jax.distributed; return where its coordinator must listen.

    Raises:
        StalledError, CollectiveError: Some ranks do not arrive.
    """
    here = current()
    me, number = here.world.me.rank, ordinal("spark_hvd.jax")
    name = f"jax.distributed.initialize.{number}"
    host = own_address(here.world.endpoint) if size() > 1 else "127.0.0.1"
    # Its handler would keep SIGTERM from ending a rank whose peer has died; then JAX would end it and get the blame.
    jax.config.update("jax_enable_preemption_service", False)
    private.meet_on_cpus_at(host)
    if me == 0:
        here.kv.set(name, _hold(host, here.world.ports if port is None else PortRange.parse(port)))
    here.kv.set(f"{name}/{me}", "")
    try:
        start_allgather([torch.zeros(1, device="cpu")], name, global_process_set, all_results, urgent=True).wait(
            timeout
        )
    except TimeoutError:
        missing = [other for other in range(size()) if not here.kv.check([f"{name}/{other}"])]
        raise StalledError(
            f"jax.distributed was initialised on {count(size() - len(missing), 'rank')} of {size()}, but within "
            f"{timeout:g} s not on {ranks_text(missing)}. {_NEXT}"
        ) from None
    except CollectiveError as error:
        raise type(error)(f"jax.distributed was not initialised on all ranks: {error} {_NEXT}") from error
    return str(here.kv.get(name).decode())


def _hold(host: str, ports: PortRange | None) -> str:
    """Return an address with a port that no other process gets until JAX's coordinator listens there.

    The socket is bound exclusively, and shared from then on: gRPC, run by the same user, asks for a shared port. A
    socket that is bound but does not listen gets no connections.
    """

    def bind(port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        made.bind((host, port))
        return made

    held = bound(ports, bind)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    _held.append(held)
    return f"{f'[{host}]' if ':' in host else host}:{held.getsockname()[1]}"
