"""Hierarchical all-reduce between real hosts: the sums are correct, and each host's link carries them once."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

from spark_hvd.runner import run
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sums(levels: bool) -> dict[str, Any]:
    """Return a rank's named and bucket sums, and the bytes on its host's link, in multiples of the sums' bytes."""
    from pathlib import Path

    import torch

    import spark_hvd.torch as hvd
    from spark_hvd.context.global_state import current

    def sent() -> int:
        return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

    numel = 4 << 20
    me, size = hvd.rank(), hvd.size()
    hvd.barrier()
    before = sent()
    total = hvd.allreduce(torch.full((numel,), me + 1.0), op=hvd.Sum)
    hvd.barrier()
    by_name = (sent() - before) / (4 * numel)
    params = [torch.nn.Parameter(torch.zeros(numel // 2)) for _ in range(2)]
    named = [(str(number), param) for number, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, op=hvd.Sum)
    for param in params:
        param.grad = torch.full_like(param, me + 1.0)
    hvd.barrier()
    before = sent()
    optimizer.step()
    hvd.barrier()
    buckets = (sent() - before) / (4 * numel)
    assert (current().queue.members.sliced is not None) is levels
    assert total.unique().tolist() == [size * (size + 1) / 2]
    assert {value for param in params for value in param.unique().tolist()} == {-size * (size + 1) / 2}
    return {"local": (hvd.local_rank(), hvd.local_size()), "by name": by_name, "buckets": buckets}


@pytest.mark.parametrize("size", [4, 3], ids=["2 and 2 ranks", "2 and 1 ranks"])
def test_a_link_carries_what_hosts_sum_and_not_what_ranks_do(two_hosts: Cluster, size: int) -> None:
    found = run(sums, (True,), num_proc=size, spark=two_hosts.session, start_timeout=60)
    assert sorted(rank["local"][1] for rank in found) == ([2, 2, 2, 2] if size == 4 else [1, 2, 2])
    off = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}
    flat = run(sums, (False,), num_proc=size, spark=two_hosts.session, start_timeout=60, env=off)
    for way in ("by name", "buckets"):
        # 2 (n - 1) / n of the bytes, with n hosts or n ranks, and headers.
        assert max(rank[way] for rank in found) < 1.2, (way, found)
        assert max(rank[way] for rank in flat) > 1.25, (way, flat)
