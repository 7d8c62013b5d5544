"""How ranks that an MPI process manager started form a world: their places, and rank 0's key-value store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

import psutil

from spark_hvd.transport.rendezvous import own_address
from spark_hvd.transport.torch_private import HashStore, Store, TCPStore
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.layout import Endpoint, World, WorldLayout

if TYPE_CHECKING:
    from spark_hvd.transport.mpi.library import MPI

_STORE_SECONDS = 300.0
_LAST_WORDS_SECONDS = 0.5
"""mpiexec loses output that it has not forwarded when a process aborts, and with it the traceback."""
_LOOPBACK = "127.0.0.1"


def is_mpi_communicator(comm: object) -> TypeGuard[MPI.Intracomm]:
    """Return whether this is a communicator of mpi4py; loads nothing."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(comm, module.Comm)


def world_of(comm: MPI.Intracomm | None = None, master: str | None = None) -> tuple[World, Store]:
    """Return the world formed by a communicator's ranks, and the store that rank 0 serves; collective over it.

    ``comm`` is MPI_COMM_WORLD by default. ``master`` is the address at which others reach rank 0; None: rank 0 finds
    one.

    Raises:
        ImportError: There is no mpi4py, or no MPI library.
        ValueError: `comm` is not an intracommunicator that includes this process.
        CollectiveError: Rank 0 could not serve a store, or it could not be reached.
    """
    from spark_hvd.transport.mpi.library import MPI

    given = MPI.COMM_WORLD if comm is None else comm
    if given == MPI.COMM_NULL or given.Is_inter():
        raise ValueError(f"comm={comm!r}: expected an MPI intracommunicator that this process is in.")
    own = given.Dup()
    shared = own.Split_type(MPI.COMM_TYPE_SHARED)
    node = _all_gather(shared, own.rank)[0]
    shared.Free()
    places = _all_gather(own, [MPI.Get_processor_name(), node])
    layout = WorldLayout.of_ranks([host for host, _ in places], [node for _, node in places])
    me = layout.ranks[own.rank]
    if own.size == 1:
        return World(me, None, mpi=own), HashStore()
    store, mine = None, None
    if own.rank == 0:
        with contextlib.suppress(OSError):
            others = [host for host, its_node in places if its_node != node]
            store, mine = _serve(master or _address(others), own.size)
    meeting = _all_gather(own, mine)[0]
    if meeting is None:
        raise CollectiveError(
            f"rank 0, on {places[0][0]}, cannot serve a key-value store there; set MASTER_ADDR to one of its addresses "
            "that the other ranks can reach."
        )
    endpoint, secret = Endpoint(*meeting[:2]), bytes.fromhex(meeting[2])
    if store is None:
        try:
            store = TCPStore(endpoint.host, endpoint.port, own.size, False, timedelta(seconds=_STORE_SECONDS), False)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {own.rank} cannot reach rank 0 at {endpoint.host}:{endpoint.port}: {error}. Set MASTER_ADDR to "
                "an address of rank 0's host that the other ranks can reach."
            ) from error
    return World(me, endpoint, secret=secret, mpi=own), store


def _all_gather(comm: MPI.Comm, fact: Any) -> list[Any]:
    """Gather each rank's fact in rank order, as JSON: mpi4py's own exchange of objects unpickles what it receives."""
    from spark_hvd.transport.mpi.library import MPI

    mine = json.dumps(fact).encode()
    counts = array("i", [0] * comm.size)
    comm.Allgather([array("i", [len(mine)]), MPI.INT], [counts, MPI.INT])
    all_bytes = bytearray(sum(counts))
    comm.Allgatherv([mine, MPI.BYTE], [all_bytes, counts, MPI.BYTE])
    facts, start = [], 0
    for count in counts:
        facts.append(json.loads(all_bytes[start : start + count]))
        start += count
    return facts


def ranks_of(comm: MPI.Intracomm, parent: MPI.Intracomm | None, size: int) -> list[int]:
    """Return the ranks of a communicator in a world formed by MPI, in the communicator's order.

    ``parent`` is the communicator of the world, which has ``size`` ranks; None: MPI_COMM_WORLD.

    Raises:
        ValueError: Some of its ranks are not in the world, or MPI did not form the world.
    """
    from spark_hvd.transport.mpi.library import MPI

    mine, theirs = (MPI.COMM_WORLD if parent is None else parent).Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(theirs, list(range(theirs.size)), mine)
    fits = mine.size == size and MPI.UNDEFINED not in ranks
    mine.Free()
    theirs.Free()
    if not fits:
        raise ValueError(f"comm={comm!r} has ranks that are not in this world; call hvd.shutdown() before hvd.init().")
    return list(ranks)


def part_of(parent: MPI.Intracomm | None, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of some ranks of another; each of them must call this.

    ``ranks`` are numbers in ``parent``, in their new order. ``parent`` None means MPI_COMM_WORLD.
    """
    from spark_hvd.transport.mpi import endpoint as mpi_endpoint
    from spark_hvd.transport.mpi.library import MPI

    return mpi_endpoint.part_of(MPI.COMM_WORLD if parent is None else parent, ranks, f"part {ranks}")


def _serve(host: str, size: int) -> tuple[Store, tuple[str, int, str]]:
    """Return the store, and what the others need to know: host, port, and the world's secret."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, size, True, timedelta(seconds=_STORE_SECONDS), False, master_listen_fd=listener.detach()
    )
    return store, (host, port, os.urandom(32).hex())


def _address(others: Sequence[str]) -> str:
    """Return an address of this host that those other hosts can reach."""
    if not others:
        return _LOOPBACK
    for host in others:
        with contextlib.suppress(OSError):  # a name that cannot be resolved here
            address = own_address(Endpoint(host, 1))
            if not _is_loopback(address):
                return address
    addresses = [
        each.address
        for name, each_addresses in psutil.net_if_addrs().items()
        for each in each_addresses
        if each.family == socket.AF_INET and psutil.net_if_stats()[name].isup and not _is_loopback(each.address)
    ]
    if not addresses:
        raise OSError("this host has only its loopback address")
    return addresses[0]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def abort_on_exceptions() -> None:
    """Let an uncaught exception end all processes of the program, as it would end a program of one process.

    Otherwise the process would wait in MPI_Finalize for others that wait for it. Call this again whenever the default
    process group has been made: torch then installs a hook of its own before ours, which keeps what we print.
    """
    from spark_hvd.transport.mpi.library import MPI

    previous = sys.excepthook
    if MPI.COMM_WORLD.size == 1 or getattr(previous, "aborts_mpi", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        outermost = sys.excepthook is hook
        previous(kind, error, trace)
        if outermost and not MPI.Is_finalized():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            time.sleep(_LAST_WORDS_SECONDS)
            MPI.COMM_WORLD.Abort(1)

    hook.aborts_mpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook
