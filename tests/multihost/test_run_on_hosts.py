"""``run`` on two hosts: who sits where, and what the ranks do together."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

from spark_hvd.runner import run
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKENDS = ["gloo"]


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_a_host_are_neighbours(two_hosts: Cluster, backend: str) -> None:
    def fn() -> tuple[str, list[int], float]:
        import socket

        import torch

        place = [hvd().local_rank(), hvd().local_size(), hvd().cross_rank(), hvd().cross_size()]
        total = float(hvd().allreduce(torch.tensor([float(hvd().rank())]), op=hvd().Sum))
        return socket.gethostname(), place, total

    ranks = run(fn, num_proc=4, spark=two_hosts.session, backend=backend, start_timeout=60)
    names = [name for name, _, _ in ranks]
    assert names[0] == names[1] != names[2] == names[3]
    assert set(names) == {host.name for host in two_hosts.net.hosts}
    assert [place for _, place, _ in ranks] == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    assert {total for _, _, total in ranks} == {6.0}
