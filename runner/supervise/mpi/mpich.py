"""MPICH's process manager, Hydra, without ssh.

``mpiexec.hydra -launcher manual`` starts nothing on other hosts. It prints the command of a proxy for each host, and
waits until the proxies connect to it; each proxy then starts its ranks. (MPICH's wiki: "Using the Hydra Process
Manager", on manual launching.)
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.supervise.mpi.manager import SHIM_PROGRAM, find, host_list
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.ports import PortRange

_LAUNCH, _LAUNCH_END = "HYDRA_LAUNCH:", "HYDRA_LAUNCH_END"
_REMEDY = (
    "Install MPICH and mpi4py in that Python on every executor: pip install mpi4py mpich (wheels; no compiler and "
    "no system package needed)."
)


def manager_command(layout: WorldLayout, address: Address, ports: PortRange | None) -> list[str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    limits = [] if ports is None else ["env", f"MPIEXEC_PORT_RANGE={ports.low}:{ports.high}"]
    where = ["-localhost", address.ip, "-hosts", host_list(layout), "-n", str(len(layout.ranks))]
    return [*limits, find("mpiexec.hydra", _REMEDY), "-launcher", "manual", "-genvnone", *where, *SHIM_PROGRAM]


def read_launch(lines: Sequence[str], hosts: int) -> list[list[str]] | None:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    if not any(line.startswith(_LAUNCH_END) for line in lines):
        return None
    return [shlex.split(line[len(_LAUNCH) :])[1:] for line in lines if line.startswith(_LAUNCH)]


def host_command(arguments: Sequence[str], interface: str | None) -> list[str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    return [find("hydra_pmi_proxy", _REMEDY), *arguments]


def rank_variables(interface: str | None, ports: PortRange | None) -> dict[str, str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`.

    The variables are for UCX, which MPICH's wheel uses, and for libfabric, which other builds use.
    """
    variables = {} if interface is None else {"UCX_NET_DEVICES": interface, "FI_TCP_IFACE": interface}
    if ports is not None:
        variables["UCX_TCP_PORT_RANGE"] = str(ports)
        variables |= {"FI_TCP_PORT_LOW_RANGE": str(ports.low), "FI_TCP_PORT_HIGH_RANGE": str(ports.high)}
    return variables
