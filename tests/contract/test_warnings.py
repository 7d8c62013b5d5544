"""The warnings that a rank gets, once each."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import cloudpickle
import torch

import spark_hvd.torch as hvd
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def warnings() -> list[str]:
    """Collect the warnings that this process logs from now on."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spark_hvd").addHandler(handler)
    return logged


def in_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="mine")
    thread.start()
    thread.join()
    return results[0]


def test_unnamed_calls_of_two_threads() -> None:
    def start() -> Any:
        return hvd.allreduce_async(torch.ones(1), op=hvd.Sum)

    def fn() -> list[list[str]]:
        logged, stages = warnings(), []
        for _ in range(2):  # one after the other
            assert start().wait() == 2
            assert in_thread(lambda: start().wait()) == 2
        stages.append(list(logged))
        for _ in range(2):
            handles = []
            if hvd.rank() == 0:
                handles = [start(), in_thread(start)]
            hvd.barrier()  # so the other rank has answered none of them
            handles = handles or [start(), start()]
            assert [handle.wait() for handle in handles] == [2, 2]
            stages.append(list(logged))
        return stages

    with ranks(2) as world:
        (alone, once, twice), other = world.run(fn)
    assert other == [[], [], []]
    assert alone == []
    assert len(once) == 1
    assert once[0].startswith("allreduce was called without a name in thread 'mine', while another thread's call is")
    assert twice == once


def test_values_that_a_world_keeps() -> None:
    def fn() -> list[str]:
        logged = warnings()
        hvd.init(cache_capacity=1024, shared_memory=True, fusion_threshold=1)
        assert logged == []
        hvd.init(cache_capacity=16)
        hvd.init(cache_capacity=16, shared_memory=False)
        hvd.shutdown()
        hvd.init(cache_capacity=8, shared_memory=True)
        return logged

    with ranks(2) as world:
        (first, second), other = world.run(fn)
    assert other == []
    assert first == (
        "hvd.init(cache_capacity=16): this world was joined already, and keeps what it was joined with; only process "
        "sets and worlds that come later have the new value. To have it here, start the ranks with "
        "HOROVOD_CACHE_CAPACITY=16 in their environment, or call hvd.shutdown() and hvd.init(cache_capacity=16) on "
        "every rank."
    )
    assert second.startswith("hvd.init(shared_memory=False): ")
    assert "SPARK_HVD_SHARED_MEMORY=0" in second
