"""Whether all ranks have the same MPI: libraries that differ fail in ways that nobody would guess the reason of."""

from __future__ import annotations

import sys
from collections import defaultdict

from spark_hvd.transport.rendezvous import all_gather_facts
from spark_hvd.transport.torch_private import PrefixStore, Store
from spark_hvd.world.layout import RankInfo


class MpiMismatchError(RuntimeError):
    """A host has another MPI than rank 0's, or none."""


def library_version() -> str:
    """The MPI library that mpi4py has loaded, by name and version; MPI is not initialised by this.

    Raises:
        MpiMismatchError: mpi4py or its library cannot be imported.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        first = MPI.Get_library_version().splitlines()[0]
    except (ImportError, RuntimeError) as error:
        raise MpiMismatchError(
            f"mpi4py cannot be used by {sys.executable}: {error}. Install it with an MPI library in that Python on "
            "every executor: pip install mpi4py mpich."
        ) from error
    return " ".join(first.strip("\0 ").split())


def check_same_mpi(me: RankInfo, kv: Store) -> None:
    """Compare the MPI libraries of all ranks; every rank calls this.

    Raises:
        MpiMismatchError: They differ, or a rank has none; raised on every rank, naming hosts and versions.
    """
    try:
        mine, fault = library_version(), None
    except MpiMismatchError as error:
        mine, fault = "none", error
    found = all_gather_facts([mine, me.host], PrefixStore("mpi", kv), me.rank, me.size)
    if fault is not None:
        raise fault
    hosts = defaultdict(set)
    for version, host in found:
        hosts[version].add(host)
    if len(hosts) > 1:
        listed = "; ".join(f"{version} on {', '.join(sorted(names))}" for version, names in sorted(hosts.items()))
        raise MpiMismatchError(
            f"the hosts have different MPI libraries: {listed}. Install the same on all, for instance from one "
            "environment that is shipped with the application (spark.archives)."
        )
