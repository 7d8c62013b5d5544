"""Worlds that come and go: nothing is left behind, what is under way ends, parts of a world, and what idling costs."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.night
@pytest.mark.parametrize("worlds", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_many_worlds_leave_nothing(worlds: int) -> None:
    def fn() -> tuple[Any, Any]:
        import gc
        import os
        import threading
        import time

        def count() -> tuple[int, int, int]:
            gc.collect()
            time.sleep(0.5)
            return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

        counts = []
        for number in range(worlds):
            hvd.shutdown()
            hvd.init()
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="a").tolist() == [2, 2]
            hvd.barrier()
            if number in (9, worlds - 1):
                counts.append(count())
        return counts[0], counts[1]

    with ranks(2) as world:
        for early, late in world.run(fn):
            assert all(after <= before + 4 for before, after in zip(early, late, strict=True)), (early, late)


def test_shutdown_with_work_in_flight() -> None:
    def fn() -> int:
        import time

        hvd.barrier()
        handles = [hvd.allreduce_async(torch.ones(100_000), name=f"x{number}", op=hvd.Sum) for number in range(20)]
        lonely = hvd.allreduce_async(torch.ones(1), name=f"only on {hvd.rank()}")
        handles[-1].wait()
        began = time.monotonic()
        hvd.shutdown()
        assert time.monotonic() - began < 30
        with pytest.raises(hvd.CollectiveError, match=r"shutdown|has left the world"):
            lonely.wait(10)
        done = 0
        for handle in handles:
            try:
                done += int(bool((handle.wait(10) == 2).all()))
            except hvd.CollectiveError:
                continue
        return done

    with ranks(2) as world:
        assert all(done >= 1 for done in world.run(fn))


def test_a_part_of_the_world_and_stale_sets() -> None:
    def fn() -> tuple[int, int, float]:
        both = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[both])
        if both.included():
            assert float(hvd.allreduce(torch.tensor(float(hvd.rank())), process_set=both)) == 1.0
        hvd.barrier()
        hvd.init(comm=[0, 1] if hvd.rank() < 2 else [2])
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(torch.ones(1), process_set=both)
        return hvd.rank(), hvd.size(), float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))

    with ranks(3) as world:
        assert world.run(fn) == [(0, 2, 2.0), (1, 2, 2.0), (0, 1, 1.0)]


def test_an_idle_engine_uses_no_cpu() -> None:
    def fn() -> dict[str, float]:
        import os
        import time

        def busy() -> dict[str, int]:
            found = {}
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/comm") as name, open(f"/proc/self/task/{task}/schedstat") as stat:
                    found[f"{task} {name.read().strip()}"] = int(stat.read().split()[0])
            return found

        hvd.allreduce(torch.ones(1))
        time.sleep(0.2)
        before = busy()
        time.sleep(3)
        after = busy()
        return {name: (after[name] - before[name]) / 1e9 for name in after if name in before}

    with ranks(2) as world:
        for seconds in world.run(fn):
            ours = {name: used for name, used in seconds.items() if "gloo" not in name}  # torch's own threads
            assert sum(ours.values()) < 0.03, seconds
