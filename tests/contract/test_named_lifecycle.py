"""Worlds that begin and end: nothing is left behind, calls in flight end, partial worlds, and the cost of idling."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives.pending import rounds
from spark_hvd.collectives.process_set import queue_of
from tests.conftest import wait_until
from tests.contract.small_calls import by_coordinator, learn, mine
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


@pytest.mark.parametrize("end", ["killed", "left"])
def test_a_rank_that_goes_while_others_wait_in_memory(end: str) -> None:
    def fn() -> str:
        learn("gone")
        if hvd.rank() == 1:
            time.sleep(rounds.MEMORY_SECONDS / 2)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.shutdown()
            return ""
        began = time.monotonic()
        with pytest.raises(hvd.CollectiveError) as caught:
            hvd.allreduce(torch.ones(1), name="gone")
        assert time.monotonic() - began < 20
        with pytest.raises(hvd.CollectiveError):
            hvd.allreduce(torch.ones(1), name="gone")
        hvd.shutdown()
        return str(caught.value)

    with ranks(3) as three:
        outcomes = three.outcomes(fn)
    assert [outcomes[rank][0] for rank in (0, 2)] == [True, True], outcomes
    said = "has ended without notice" if end == "killed" else "has left the world"
    assert all(said in outcomes[rank][1] and "rank 1" in outcomes[rank][1] for rank in (0, 2))


def test_a_rank_that_never_calls_is_named_with_what_it_called_last(tmp_path: Path) -> None:
    def fn() -> str:
        for turn in range(2):
            hvd.init(stall_warning=None, stall_timeout=60.0)
            learn("wanted", "other")
            hvd.barrier()
            hvd.allreduce(torch.ones(1), name="other")
            hvd.init(stall_warning=None, stall_timeout=1.0)
            late = tmp_path / f"{turn}"
            if hvd.rank() == 0:
                handle = hvd.allreduce_async(torch.ones(1), name="wanted")  # nobody waits, but it is still late
                wait_until(handle.poll, 60)
                late.touch()
            wait_until(late.exists, 60)
            with pytest.raises(hvd.StalledError) as caught:
                handle.wait() if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name="wanted")
        return str(caught.value)

    with ranks(2) as world:
        first, second = world.run(fn)
    assert first == second
    said = r"allreduce 'wanted' has waited \d\.\d s for rank 1 \(rank 1 last called 'other', \d\.\d s ago\); ready: "
    assert re.match(said, first), first


def test_a_host_that_refuses_shared_memory_is_told_of_once_and_goes_by_sockets() -> None:
    def fn() -> tuple[list[str], bool]:
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("spark_hvd").addHandler(handler)
        if hvd.rank() == 1:
            os.memfd_create = refused
        parts = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
        for part in parts:
            if part.included():
                learn("small", process_set=part)
                decided = by_coordinator(part)
                result = hvd.allreduce(mine((2,)), name="small", op=hvd.Sum, process_set=part)
                assert result[0].item() == sum(rank + 1 for rank in part.ranks or [])
                assert by_coordinator(part) == decided + 1
        learn("small")
        return logged, any(queue_of(part).members.slots for part in parts if part.included())

    with ranks(3) as three:
        outcomes = three.run(fn)
    assert [has for _, has in outcomes] == [False] * 3
    assert [len(logged) for logged, _ in outcomes] == [0, 1, 0]
    assert "share no memory, and exchange all data by sockets: not here" in outcomes[1][0][0]


def refused(*_: Any) -> int:
    raise PermissionError("not here")
