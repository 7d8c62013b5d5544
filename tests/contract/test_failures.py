"""A peer that dies, hangs or aborts becomes a CollectiveError on the others, which names it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable

import cloudpickle
import psutil
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", ["allreduce", "allgather", "broadcast_object"])
def test_killed_peer(size: int, operation: str) -> None:
    def fn() -> float:
        hvd.barrier()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: hvd.allreduce(torch.ones(1000)),
            "allgather": lambda: hvd.allgather(torch.ones(hvd.rank() + 1)),
            "broadcast_object": lambda: hvd.broadcast_object(1, root_rank=1),
        }
        start = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 \(on 127.0.0.1\) has ended without notice"):
            calls[operation]()
        seconds = time.monotonic() - start
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 \(on 127.0.0.1\) has ended without notice"):
            calls[operation]()
        return seconds

    with ranks(size) as world:
        outcomes = world.outcomes(fn)
    assert outcomes[1] == (False, "ended with exit code -9")
    for ok, seconds in outcomes[:1] + outcomes[2:]:
        assert ok, seconds
        assert seconds < 30


def test_hanging_peer() -> None:
    def fn() -> str:
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(3)
            return "slept"
        with pytest.raises(hvd.StalledError, match=r"'loss' has waited .* for rank 1 \(rank 1 last called"):
            hvd.allreduce(torch.ones(1), name="loss")
        return "timed out"

    with ranks(2, timeout=2.0) as world:
        assert world.run(fn) == ["timed out", "slept"]


def test_a_rank_that_lacks_memory_blames_no_peer() -> None:
    def fn() -> str:
        model = torch.nn.Embedding(1 << 16, 64, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.arange(10)).sum().backward()
        optimizer.step()
        limits = resource.getrlimit(resource.RLIMIT_AS)

        def leave_little(_: torch.Tensor) -> None:
            """Leave room for this rank's own work, but not for 16 MiB of each rank."""
            if hvd.rank() == 1:
                resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (40 << 20), limits[1]))

        model.weight.register_post_accumulate_grad_hook(leave_little)
        try:
            model(torch.arange(1 << 16)).sum().backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
            hvd.shutdown()
        return "no error"

    with ranks(2) as world:
        others, lacking = world.run(fn)
    assert lacking.startswith("RuntimeError: [enforce fail at alloc_cpu")
    assert others.startswith("CollectiveError: reducing gradients failed because a peer or the network did")
