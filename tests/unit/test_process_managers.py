"""The commands of MPI's process managers, as functions of the layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.supervise.mpi import mpich, openmpi
from spark_hvd.runner.supervise.mpi.manager import MpiMissingError, counts_by_host, find, manager_env
from spark_hvd.runner.supervise.mpi.shim import FOLDER, LAUNCH
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.ports import PortRange

LAYOUT = WorldLayout.from_hosts(["b", "a", "b", "c", "a", "b"])
ADDRESS = Address("eth0", "192.0.2.1")


def test_ranks_are_counted_by_host_in_rank_order() -> None:
    assert counts_by_host(LAYOUT) == [(0, 3), (3, 2), (5, 1)]
    command = mpich.manager_command(LAYOUT, ADDRESS, None)
    assert Path(command[0]).name == "mpiexec.hydra"
    assert command[command.index("-hosts") + 1] == "host0:3,host1:2,host2:1"
    assert command[command.index("-n") + 1] == "6"
    assert command[command.index("-localhost") + 1] == "192.0.2.1"
    limited = mpich.manager_command(LAYOUT, ADDRESS, PortRange(5, 9))
    assert limited == ["env", "MPIEXEC_PORT_RANGE=5:9", *command]


def test_launch_lines_of_mpich_are_read_when_they_are_complete() -> None:
    lines = ["noise", "HYDRA_LAUNCH: /a/hydra_pmi_proxy --control-port 1:2 --proxy-id 0"]
    assert mpich.read_launch(lines, 2) is None
    lines += ["HYDRA_LAUNCH: /a/hydra_pmi_proxy --control-port 1:2 --proxy-id 1", "HYDRA_LAUNCH_END"]
    assert mpich.read_launch(lines, 2) == [
        ["--control-port", "1:2", "--proxy-id", "0"],
        ["--control-port", "1:2", "--proxy-id", "1"],
    ]


def test_launch_lines_of_open_mpi_may_come_in_any_order() -> None:
    lines = ["noise", LAUNCH + json.dumps(["host1", 'orted --daemonize -mca ess "env" -mca vpid 2'])]
    assert openmpi.read_launch(lines, 2) is None
    lines.append(
        LAUNCH + json.dumps(["host0", 'PATH=/usr/bin:$PATH ; export PATH ;  /usr/bin/orted -mca ess "env" -mca vpid 1'])
    )
    assert openmpi.read_launch(lines, 2) == [["-mca", "ess", "env", "-mca", "vpid", n] for n in "12"]


def test_what_ranks_are_told_of_interfaces_and_ports() -> None:
    assert mpich.rank_variables(None, None) == {}
    assert mpich.rank_variables("eth1", PortRange(5, 9)) == {
        "UCX_NET_DEVICES": "eth1",
        "UCX_TCP_PORT_RANGE": "5-9",
        "FI_TCP_IFACE": "eth1",
        "FI_TCP_PORT_LOW_RANGE": "5",
        "FI_TCP_PORT_HIGH_RANGE": "9",
    }
    assert openmpi.rank_variables("eth1", PortRange(5, 9)) == {
        "MPI4PY_MPIABI": "openmpi",
        "OMPI_MCA_btl_tcp_if_include": "eth1",
        "OMPI_MCA_btl_tcp_port_min_v4": "5",
        "OMPI_MCA_btl_tcp_port_range_v4": "5",
    }


def test_the_environment_of_another_launcher_is_dropped() -> None:
    env = manager_env({"PMI_RANK": "7", "OMPI_COMM_WORLD_RANK": "1", "HOME": "/h"}, "t")
    assert "PMI_RANK" not in env
    assert "OMPI_COMM_WORLD_RANK" not in env
    assert (env["HOME"], env[FOLDER]) == ("/h", "t")


def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpiMissingError, match=r"mpiexec\.hydra is neither.*pip install mpi4py mpich"):
        mpich.manager_command(LAYOUT, ADDRESS, None)
    with pytest.raises(MpiMissingError, match=r"orted is neither.*apt-get install openmpi-bin"):
        openmpi.manager_command(LAYOUT, ADDRESS, None)
    with pytest.raises(MpiMissingError, match="orted is neither"):
        openmpi.host_command([], None)
    with pytest.raises(MpiMissingError, match="nothing is neither"):
        find("nothing", "")
