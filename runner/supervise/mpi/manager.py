"""What MPI's process managers have in common: a program on rank 0's host, and one a host that it asks for.

Neither needs ssh here. The first program says what is to be started on each host, and the supervisors there start it.
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
# What the managers are told to start for each rank. The variables are those of each host's own part of the manager,
# which passes its environment on: Python may lie elsewhere on each host.
SHIM_PROGRAM = ["/bin/sh", "-c", f'exec "${_PYTHON}" -S -E "${_SHIM}"']
_OTHERS = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_", "PRTE_", "MPI_LOCAL")


class MpiMissingError(RuntimeError):
    """A program of MPI is not installed on this host."""


class ProcessManager(Protocol):
    """One MPI's. Pure but for looking programs up; the modules ``mpich`` and ``openmpi`` are such."""

    def manager_command(self, layout: WorldLayout, address: Address, ports: PortRange | None) -> list[str]:
        """The command that rank 0's host runs.

        ``address`` is that of rank 0's host, to which the other hosts' parts connect; it may listen on ``ports``, None:
        any.

        Raises:
            MpiMissingError: It is not installed here.
        """

    def read_launch(self, lines: Sequence[str], hosts: int) -> list[list[str]] | None:
        """The arguments of each host's part, host by host, out of what the manager printed; None while incomplete."""

    def host_command(self, arguments: Sequence[str], interface: str | None) -> list[str]:
        """The command of a host's part; where the program lies is this host's own affair.

        Raises:
            MpiMissingError: It is not installed here.
        """

    def rank_variables(self, interface: str | None, ports: PortRange | None) -> dict[str, str]:
        """What MPI reads from each rank's environment.

        Without an interface, MPI chooses, which knows of InfiniBand and the like. Ranks may listen on ``ports``; None:
        any.
        """


def counts_by_host(layout: WorldLayout) -> list[tuple[int, int]]:
    """The first rank and the number of ranks of each host, in rank order."""
    firsts = [info for info in layout.ranks if info.local_rank == 0]
    assert [info.rank for info in layout.ranks] == [
        first.rank + offset for first in firsts for offset in range(first.local_size)
    ]
    return [(first.rank, first.local_size) for first in firsts]


def host_list(layout: WorldLayout) -> str:
    """Hosts with their numbers of ranks, as both managers take them.

    They go by made-up names: the managers only count them, and what can be looked up can fail to be.
    """
    return ",".join(f"host{number}:{count}" for number, (_, count) in enumerate(counts_by_host(layout)))


def find(program: str, remedy: str) -> str:
    """The path of a program: beside this Python, where wheels put theirs, else of the system.

    Raises:
        MpiMissingError: There is none.
    """
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(folders))
    if path is None:
        raise MpiMissingError(f"{program} is neither beside {sys.executable} nor on the PATH. {remedy}")
    return path


def guarded(command: Sequence[str]) -> list[str]:
    """A command whose program is killed when the process that starts it ends."""
    return [*shim("guard"), *command]


def shim(role: str) -> list[str]:
    """A command that runs the shim in one of its other roles."""
    return [sys.executable, "-S", "-E", _THE_SHIM, role]


def manager_env(base: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of the manager's programs. What another MPI launcher has left in ``base`` is dropped."""
    env = {key: value for key, value in base.items() if not key.startswith(_OTHERS)}
    return env | {mpi_shim.FOLDER: folder, _PYTHON: sys.executable, _SHIM: _THE_SHIM}
