"""The common parts of MPI's process managers: a manager on rank 0's host, and a proxy on each host.

Ours need no ssh: the manager prints what it would start on each host, and the supervisor there starts it.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.supervise.mpi import shim as mpi_shim
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.ports import PortRange

_PYTHON, _SHIM = "SPARK_HVD_MPI_PYTHON", "SPARK_HVD_MPI_SHIM"
_THE_SHIM = str(Path(mpi_shim.__file__).resolve())
# The managers start this for each rank. Each host's proxy sets the variables, because Python's path may differ by host.
SHIM_PROGRAM = ["/bin/sh", "-c", f'exec "${_PYTHON}" -S -E "${_SHIM}"']
_OTHERS = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_", "PRTE_", "MPI_LOCAL")


class MpiMissingError(RuntimeError):
    """A program of MPI is not installed on this host."""


class ProcessManager(Protocol):
    """The process manager of one MPI, implemented by the modules ``mpich`` and ``openmpi``.

    The functions have no effects; some look up programs.
    """

    def manager_command(self, layout: WorldLayout, address: Address, ports: PortRange | None) -> list[str]:
        """Return the command of the manager, which rank 0's host runs.

        The proxies connect to ``address``, that of rank 0's host. The manager listens on ``ports``; None means any.

        Raises:
            MpiMissingError: It is not installed here.
        """

    def read_launch(self, lines: Sequence[str], hosts: int) -> list[list[str]] | None:
        """Parse what the manager printed into each host's arguments for its proxy; None while incomplete."""

    def host_command(self, arguments: Sequence[str], interface: str | None) -> list[str]:
        """Return the command of this host's proxy, with the path of its program on this host.

        Raises:
            MpiMissingError: It is not installed here.
        """

    def rank_variables(self, interface: str | None, ports: PortRange | None) -> dict[str, str]:
        """Return the variables that MPI reads from each rank's environment.

        Without an interface, MPI chooses the network, which may be InfiniBand. Ranks listen on ``ports``; None means
        any.
        """


def counts_by_host(layout: WorldLayout) -> list[tuple[int, int]]:
    """Return the first rank and the number of ranks of each host, in rank order."""
    firsts = [info for info in layout.ranks if info.local_rank == 0]
    assert [info.rank for info in layout.ranks] == [
        first.rank + offset for first in firsts for offset in range(first.local_size)
    ]
    return [(first.rank, first.local_size) for first in firsts]


def host_list(layout: WorldLayout) -> str:
    """Return the hosts with their numbers of ranks, in the form that both managers take.

    The names are made up. The managers only count hosts, and looking up real names could fail.
    """
    return ",".join(f"host{number}:{count}" for number, (_, count) in enumerate(counts_by_host(layout)))


def find(program: str, remedy: str) -> str:
    """Find a program next to this Python, where wheels put theirs, or else on the PATH.

    Raises:
        MpiMissingError: It is in neither place.
    """
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(folders))
    if path is None:
        raise MpiMissingError(f"{program} is neither next to {sys.executable} nor on the PATH. {remedy}")
    return path


def guarded(command: Sequence[str]) -> list[str]:
    """Wrap a command so that its program is killed when the process that starts it ends."""
    return [*shim("guard"), *command]


def shim(role: str) -> list[str]:
    """Return a command that runs the shim as "guard" or "agent"."""
    return [sys.executable, "-S", "-E", _THE_SHIM, role]


def manager_env(base: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment of the manager's programs: ``base`` without the variables of another MPI launcher."""
    env = {key: value for key, value in base.items() if not key.startswith(_OTHERS)}
    return env | {mpi_shim.FOLDER: folder, _PYTHON: sys.executable, _SHIM: _THE_SHIM}
