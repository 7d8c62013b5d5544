"""``run`` on imperfect hosts: names that resolve to the loopback or to nothing, and a second network."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import cloudpickle
import pytest

from spark_hvd.runner import run
from tests.multihost.hosts import Names, make_hosts
from tests.multihost.standalone import Cluster, make_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


@pytest.fixture(scope="module")
def odd(namespaces: None, running: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A host that resolves its own name to 127.0.1.1, and one that cannot resolve it; two networks."""
    running.close()
    names = [Names("loopback"), Names("nothing")]
    folder = tmp_path_factory.mktemp("odd")
    with make_hosts(2, names=names, two_networks=True) as net, make_cluster(net, folder) as cluster:
        yield cluster


def own_name_gives() -> list[str]:
    import socket

    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)})
    except socket.gaierror:
        return []


def test_ranks_meet_whatever_their_hosts_names_resolve_to(odd: Cluster) -> None:
    def fn() -> tuple[str, list[str], float, float]:
        import socket

        import torch
        import torch.distributed as dist

        by_name = hvd().synchronize(hvd().allreduce_async(torch.ones(4), op=hvd().Sum, name="x"))
        again = torch.ones(1)
        dist.all_reduce(again, group=dist.new_group([0, 1], backend="gloo"))  # created by user code, later
        return socket.gethostname(), own_name_gives(), float(by_name.mean()), float(again)

    ranks = run(fn, num_proc=2, spark=odd.session, start_timeout=60)
    resolved = {name: addresses for name, addresses, _, _ in ranks}
    assert resolved == {odd.net[0].name: ["127.0.1.1"], odd.net[1].name: []}
    assert [sums for _, _, *sums in ranks] == [[2.0, 2.0], [2.0, 2.0]]


def test_tensors_travel_on_the_network_that_spark_uses(odd: Cluster) -> None:
    def fn() -> dict[str, int]:
        import torch

        def sent() -> dict[str, int]:
            import psutil

            return {nic: counters.bytes_sent for nic, counters in psutil.net_io_counters(pernic=True).items()}

        before = sent()
        hvd().allreduce(torch.ones(4 << 20), op=hvd().Sum)  # 16 MiB
        return {nic: after - before[nic] for nic, after in sent().items()}

    for nics in run(fn, num_proc=2, spark=odd.session, start_timeout=60):
        assert nics["eth0"] > 8 << 20
        assert nics["eth1"] < 1 << 16


def test_ranks_meet_over_ipv6_alone(namespaces: None) -> None:
    program = [sys.executable, "-m", "tests.multihost.ipv6_program"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    for store_host, *sums in said["values"]:
        assert str(ip_address(store_host)) in said["hosts"]
        assert sums == [2.0, 2.0]
