"""Open MPI's process manager (releases 4.x) without ssh.

``mpirun`` starts its daemon on each host through a launch agent (``plm_rsh_agent``), normally ssh. Our agent is the
shim: it prints the command and the host, and the supervisors start the daemon. (Open MPI's FAQ, "Running jobs under
rsh/ssh".)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import PurePath

from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.supervise.mpi.manager import SHIM_PROGRAM, find, host_list, shim
from spark_hvd.runner.supervise.mpi.shim import LAUNCH
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.ports import PortRange

_INTERFACE = "oob_tcp_if_include"
_REMEDY = (
    "Install Open MPI 4 on every executor's host (Debian and Ubuntu: apt-get install openmpi-bin), or leave mpi= out "
    "to use MPICH's wheel: pip install mpi4py mpich."
)


def manager_command(layout: WorldLayout, address: Address, ports: PortRange | None) -> list[str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": " ".join(map(shlex.quote, shim("agent"))),
        "plm_rsh_no_tree_spawn": "1",  # mpirun asks for every daemon; no daemon asks for another
    }
    if address.interface is not None:
        settings[_INTERFACE] = address.interface
    if ports is not None:
        settings["oob_tcp_dynamic_ipv4_ports"] = str(ports)
    options = [text for name, value in settings.items() for text in ("--mca", name, value)]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    where = ["--host", host_list(layout), "-np", str(len(layout.ranks)), "--map-by", "slot", "--bind-to", "none"]
    return [_find("mpirun"), *options, *where, *SHIM_PROGRAM]


def read_launch(lines: Sequence[str], hosts: int) -> list[list[str]] | None:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    asked = dict(json.loads(line[len(LAUNCH) :]) for line in lines if line.startswith(LAUNCH))
    if len(asked) < hosts:
        return None
    commands = [shlex.split(asked[f"host{number}"]) for number in range(hosts)]
    return [_arguments(command) for command in commands]


def _arguments(command: Sequence[str]) -> list[str]:
    """Return the daemon's arguments from a shell command that first sets up paths."""
    daemon = next(place for place, word in enumerate(command) if PurePath(word).name.startswith("orted"))
    # The daemon must remain the supervisor's child.
    return [word for word in command[daemon + 1 :] if word != "--daemonize"]


def host_command(arguments: Sequence[str], interface: str | None) -> list[str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    own = list(arguments)
    if interface is not None and _INTERFACE in own:  # the interface may have another name on rank 0's host
        own[own.index(_INTERFACE) + 1] = interface
    return [_find("orted"), *own]


def rank_variables(interface: str | None, ports: PortRange | None) -> dict[str, str]:
    """See :class:`spark_hvd.runner.supervise.mpi.manager.ProcessManager`."""
    variables = {"MPI4PY_MPIABI": "openmpi"}  # the library that mpi4py's wheel should load
    if interface is not None:
        variables["OMPI_MCA_btl_tcp_if_include"] = interface
    if ports is not None:
        variables["OMPI_MCA_btl_tcp_port_min_v4"] = str(ports.low)
        variables["OMPI_MCA_btl_tcp_port_range_v4"] = str(ports.high - ports.low + 1)
    return variables


def _find(program: str) -> str:
    """Find a program next to Open MPI's daemon: other MPIs have an mpirun, too, and Debian adds second names."""
    folder = PurePath(find("orted", _REMEDY)).parent
    names = [f"{program}.openmpi", program]
    return next(path for name in names if (path := shutil.which(name, path=str(folder))) is not None)
