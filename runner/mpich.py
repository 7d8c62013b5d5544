"""MPICH's process manager without ssh: which programs to start where, as pure functions of the world's layout.

``mpiexec.hydra -launcher manual`` starts nothing on other hosts. It prints a command a host, and waits until what was
started so, its proxies, connect to it; each proxy then starts its ranks. (MPICH's wiki: "Using the Hydra Process
Manager", section on manual launching.)
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from spark_hvd.layout import WorldLayout
from spark_hvd.ports import PortRange
from spark_hvd.runner import mpi_shim

MPIEXEC = "mpiexec.hydra"
PROXY = "hydra_pmi_proxy"
_LAUNCH, _LAUNCH_END = "HYDRA_LAUNCH:", "HYDRA_LAUNCH_END"
_PYTHON, _SHIM = "SPARK_HVD_MPI_PYTHON", "SPARK_HVD_MPI_SHIM"
_THE_SHIM = str(Path(mpi_shim.__file__).resolve())


class MpiMissingError(RuntimeError):
    """MPICH is not installed on this host."""


def find(program: str) -> str:
    """The path of one of MPICH's programs: of the wheel ``mpich`` beside this Python, else of the system.

    Raises:
        MpiMissingError: There is none.
    """
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    path = shutil.which(program, path=os.pathsep.join(folders))
    if path is None:
        raise MpiMissingError(
            f"{program} of MPICH is neither beside {sys.executable} nor on the PATH. Install MPICH and mpi4py in that "
            "Python on every executor: pip install 'spark_hvd[mpi]' (wheels; no compiler and no system package needed)."
        )
    return path


def counts_by_host(layout: WorldLayout) -> list[tuple[int, int]]:
    """The first rank and the number of ranks of each host, in rank order.

    Raises:
        AssertionError: Ranks of a host are not numbered next to each other.
    """
    firsts = [info for info in layout.ranks if info.local_rank == 0]
    assert [info.rank for info in layout.ranks] == [
        first.rank + offset for first in firsts for offset in range(first.local_size)
    ]
    return [(first.rank, first.local_size) for first in firsts]


def mpiexec_command(layout: WorldLayout, ip: str) -> list[str]:
    """The command that rank 0's host runs.

    Hosts go by made-up names: MPICH only counts them, and a name that it could look up would only be able to fail.

    Args:
        layout: All ranks.
        ip: The address of rank 0's host, to which proxies connect.
    """
    counts = counts_by_host(layout)
    hosts = ",".join(f"host{number}:{count}" for number, (_, count) in enumerate(counts))
    # The variables are those of each host's proxy: Python may lie elsewhere on each.
    program = ["/bin/sh", "-c", f'exec "${_PYTHON}" -S -E "${_SHIM}"']
    size = str(len(layout.ranks))
    return [find(MPIEXEC), "-launcher", "manual", "-genvnone", "-localhost", ip, "-hosts", hosts, "-n", size, *program]


def guarded(command: Sequence[str]) -> list[str]:
    """A command whose program is killed when the process that starts it ends."""
    return [sys.executable, "-S", "-E", _THE_SHIM, "guard", *command]


def read_launch(lines: Sequence[str]) -> list[list[str]] | None:
    """The arguments of each host's proxy, host by host, out of mpiexec's output; None while it is incomplete."""
    if not any(line.startswith(_LAUNCH_END) for line in lines):
        return None
    return [shlex.split(line[len(_LAUNCH) :])[1:] for line in lines if line.startswith(_LAUNCH)]


def proxy_command(arguments: Sequence[str]) -> list[str]:
    """The command of this host's proxy.

    Args:
        arguments: As mpiexec printed them; the path of the program is this host's own.
    """
    return [find(PROXY), *arguments]


def manager_env(base: Mapping[str, str], token: str, ports: PortRange | None) -> dict[str, str]:
    """The environment of mpiexec and of proxies.

    Args:
        base: This process' environment; what another MPI launcher has left in it is dropped.
        token: Names the Unix sockets of this run's supervisors, and is secret.
        ports: Where mpiexec may listen.
    """
    env = {
        key: value for key, value in base.items() if not key.startswith(("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_"))
    }
    env |= {mpi_shim.TOKEN: token, _PYTHON: sys.executable, _SHIM: _THE_SHIM}
    if ports is not None:
        env["MPIEXEC_PORT_RANGE"] = f"{ports.low}:{ports.high}"
    return env


def rank_variables(interface: str | None, ports: PortRange | None) -> dict[str, str]:
    """What MPICH's own network layer (libfabric) reads in each rank.

    Args:
        interface: The one to use over TCP; None to leave the choice to it.
        ports: Where ranks may listen.
    """
    variables = {}
    if interface is not None:
        variables["FI_TCP_IFACE"] = interface
    if ports is not None:
        variables |= {"FI_TCP_PORT_LOW_RANGE": str(ports.low), "FI_TCP_PORT_HIGH_RANGE": str(ports.high)}
    return variables
