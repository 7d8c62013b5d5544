"""``run`` and a fit on two hosts: where each rank is, and what the ranks do together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_hvd.estimators import Store
from spark_hvd.runner import run
from tests.multihost.standalone import Cluster
from tests.spark.estimator_support import estimator, frame, reference, same
from tests.spark.test_torch_estimator import mse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKENDS = ["gloo", "mpi"]


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_crosses_hosts(two_hosts: Cluster, backend: str) -> None:
    def fn() -> dict[str, Any]:
        import torch

        me, size = hvd().rank(), hvd().size()
        big = torch.full((16 << 20,), float(me + 1))  # 64 MiB
        return {
            "big": hvd().allreduce(big, op=hvd().Sum).unique().tolist(),
            "gathered": hvd().allgather(torch.full((me + 1,), me)).tolist(),
            "broadcast": hvd().broadcast(torch.tensor([me, me]), root_rank=2).tolist(),
            "exchanged": hvd().alltoall(torch.arange(size) + 10 * me).tolist(),
            "scattered": hvd().reducescatter(torch.ones(size), op=hvd().Sum).tolist(),
            "object": hvd().allgather_object({"rank": me}),
        }

    ranks = run(fn, num_proc=4, spark=two_hosts.session, backend=backend, start_timeout=60)
    for me, values in enumerate(ranks):
        assert values == {
            "big": [10.0],
            "gathered": [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
            "broadcast": [2, 2],
            "exchanged": [me, 10 + me, 20 + me, 30 + me],
            "scattered": [4.0],
            "object": [{"rank": rank} for rank in range(4)],
        }


@pytest.mark.parametrize("backend", BACKENDS)
def test_named_collectives_and_the_optimizer_cross_hosts(two_hosts: Cluster, backend: str) -> None:
    def fn() -> tuple[float, float, list[list[float]]]:
        import torch

        names = [f"gradient {index}" for index in range(20)]
        mine = names if hvd().rank() % 2 else names[::-1]  # each rank in its own order
        handles = {name: hvd().allreduce_async(torch.ones(100), op=hvd().Sum, name=name) for name in mine}
        totals = [float(hvd().synchronize(handles[name]).mean()) for name in names]
        torch.manual_seed(hvd().rank())
        model = torch.nn.Linear(4, 1)
        hvd().broadcast_parameters(model.state_dict(), root_rank=0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd().DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return min(totals), max(totals), [each.flatten().tolist() for each in model.parameters()]

    ranks = run(fn, num_proc=4, spark=two_hosts.session, backend=backend, start_timeout=60)
    assert {(least, most) for least, most, _ in ranks} == {(4.0, 4.0)}
    assert all(parameters == ranks[0][2] for _, _, parameters in ranks), "the same weights on all hosts"


def test_an_estimator_fits_on_hosts_that_share_a_folder(two_hosts: Cluster, tmp_path: Path) -> None:
    made = estimator(store=Store.create(tmp_path / "store"), run_id="hosts", epochs=3)
    fitted = made.fit(frame(two_hosts.session))
    assert [row["epoch"] for row in fitted.getHistory()] == [1, 2, 3]
    same(fitted.getModel(), reference(mse, epochs=3))
