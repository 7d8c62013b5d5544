"""Several ranks in each Spark task, on the requested interfaces and ports."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import Network, RankFailedError, run
from spark_hvd.runner.outcome.rows import FailureKind
from tests.ranks import quiet_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def place() -> dict[str, Any]:
    import torch

    import spark_hvd.torch as hvd

    hvd.allreduce(torch.ones(1))
    listening = [
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    return {
        "ranks": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "grandparent": psutil.Process().parent().ppid(),  # the fork server was started by one Spark worker
        "listening": listening,
        "gloo": os.environ["GLOO_SOCKET_IFNAME"],
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
        "store": (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    }


def test_two_ranks_in_each_of_two_tasks(spark: SparkSession) -> None:
    found = run(place, num_proc=4, procs_per_task=2, spark=spark)
    assert [each["ranks"] for each in found] == [(rank, 4, rank, 4, 0, 1) for rank in range(4)]


def test_as_many_tasks_as_there_are_slots(spark: SparkSession) -> None:
    assert len(run(place, procs_per_task=2, spark=spark)) == 4


def test_a_failing_rank_stops_those_of_its_own_task(spark: SparkSession) -> None:
    def fail(second: int) -> None:
        import spark_hvd.torch as hvd

        if hvd.rank() == second:
            raise ValueError("on purpose")
        while True:
            hvd.barrier()

    with pytest.raises(RankFailedError, match="on purpose") as caught:
        run(fail, [1], num_proc=2, procs_per_task=2, spark=spark)
    assert caught.value.rank == 1
    assert caught.value.failures[1].kind is FailureKind.STOPPED or caught.value.failures[1].echo


def test_interfaces_and_ports(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", quiet_port())) as taken:  # Gloo's own ports are above these
        low = taken.getsockname()[1]
        ports = f"{low}-{low + 30}"
        found = run(place, num_proc=2, spark=spark, network=Network(interfaces=["127.0.0.0/8"], ports=ports))
    assert {each["gloo"] for each in found} == {"lo"}
    assert {each["nccl"] for each in found} == {"=lo"}
    host, port = found[0]["store"]
    assert host == "127.0.0.1"
    assert low < port <= low + 30
    inside = [place for place in found[0]["listening"] if low <= place[1] <= low + 30]
    assert len(inside) == 3, found[0]  # the store, and the coordinator's two sockets; Gloo has its own ports
    assert len(found[0]["listening"]) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_proc": 3, "procs_per_task": 2}, "procs_per_task=2 with num_proc=3"),
        ({"num_proc": 2, "procs_per_task": 0}, "procs_per_task=0"),
        ({"num_proc": 2, "ports": "9-1"}, 'ports="9-1"'),
        ({"num_proc": 2, "interfaces": ["10.0/8"]}, "interfaces="),
        ({"num_proc": 2, "mpi": "mpich"}, 'expected backend="mpi"'),
    ],
)
def test_bad_arguments_start_nothing(spark: SparkSession, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(place, spark=spark, **options)


def test_an_interface_that_no_host_has(spark: SparkSession) -> None:
    with pytest.raises(RankFailedError, match=r"interfaces=\['ib7'\]: host .* it has lo \(127\.0\.0\.1\)") as caught:
        run(place, num_proc=2, spark=spark, network=Network(interfaces=["ib7"]))
    assert caught.value.first.kind is FailureKind.SETUP
