"""Faults that a seed draws, on two hosts: each run ends in time, either well or with an error that names what is lost.

``SPARK_HVD_NIGHT=200 pytest -m night tests/multihost/test_random_faults.py`` tries two hundred.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import Network, RunError, run
from tests.conftest import wait_until
from tests.daemons import command_line
from tests.multihost.hosts import Host, sh
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.night, pytest.mark.timeout(900)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
CASES = int(os.environ.get("SPARK_HVD_NIGHT", 20))
PORTS = "64000-64100"  # the kernel gives none of these to Spark's own connections
LIMIT = 60.0
"""Seconds after the fault, or after the program would have ended, in which a run has to end."""


@dataclass(frozen=True)
class Case:
    """A run of two ranks on two hosts, and a fault.

    Attributes:
        program: What ranks do for ``seconds``: "reduce", "reduce by name", "sleep", "sleep, then reduce", or rank 1
            returns "early".
        big: Bytes that each rank returns.
        blocked: The host that cannot reach the driver's hub, if any, so that the hub is in rank 0's task.
        fault: What happens to the host of rank ``lost``, ``after`` seconds.
        placed: Whether that is as soon as a task has begun, and not when both ranks have.
        mended_after: Seconds after which a fault that passes does so.
    """

    program: str
    seconds: float
    big: int
    blocked: int | None
    collective_timeout: float | None
    backend: str
    fault: str
    lost: int
    placed: bool
    after: float
    mended_after: float

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case."""
        draw = random.Random(seed)
        return cls(
            program=draw.choice(["reduce", "reduce by name", "sleep", "sleep, then reduce", "early"]),
            seconds=draw.choice([3.0, 12.0, 25.0]),
            big=draw.choice([1, 1, 30_000_000]),
            blocked=draw.choice([None, 0, 1]),
            collective_timeout=draw.choice([None, None, 3.0, 5.0]),
            backend=draw.choice(["gloo", "gloo", "gloo", "mpi"]),
            fault=draw.choice(sorted(FAULTS)),
            lost=draw.choice([0, 1]),
            placed=draw.choice([True, False, False]),
            after=draw.choice([0.0, 0.1, 0.5, 1.0, 2.0, 4.0]),
            mended_after=draw.choice([1.0, 3.0, 10.0, 20.0]),
        )


def program(kind: str, seconds: float, big: int, started: str) -> str:
    import torch

    import spark_hvd.torch as hvd

    Path(started, f"{hvd.rank()}@{socket.gethostname()}").touch()
    end, more = time.monotonic() + seconds, torch.ones(1)
    while float(more) > 0 and not (kind == "early" and hvd.rank() == 1):
        more = torch.tensor(float(time.monotonic() < end))
        if kind == "reduce":
            more = hvd.allreduce(more, op=hvd.Min)
        elif kind == "reduce by name":
            more = hvd.synchronize(hvd.allreduce_async(more, op=hvd.Min, name="more"))
        time.sleep(0.05)
    if kind == "sleep, then reduce":
        hvd.allreduce(more)
    return "x" * big


# -- faults: each returns what ends it, or None if it lasts


def cut(cluster: Cluster, victim: Host) -> None:
    cluster.net.cut(victim)


def cut_for_a_while(cluster: Cluster, victim: Host) -> Callable[[], None]:
    cluster.net.cut(victim)
    return lambda: [sh("ip", "link", "set", cable, "up") for cable in victim.cables] and None


def cut_all(cluster: Cluster, victim: Host) -> None:
    for host in cluster.net.hosts:
        cluster.net.cut(host)


def separate(cluster: Cluster, victim: Host) -> None:
    first, second = cluster.net.hosts
    cluster.net.block(first, second.address)
    cluster.net.block(second, first.address)


def kill_executor(cluster: Cluster, victim: Host) -> None:
    cluster.executor(victim).kill()


def kill_worker_and_executor(cluster: Cluster, victim: Host) -> None:
    executor = cluster.executor(victim)
    cluster.workers[victim.name].kill()
    executor.kill()


def kill_rank(cluster: Cluster, victim: Host) -> None:
    for process in cluster.ranks(victim):
        process.kill()


def kill_task(cluster: Cluster, victim: Host) -> None:
    daemon = cluster.executor(victim).pid
    for process in cluster.processes(victim):
        if "pyspark" in command_line(process) and "python" in process.name() and process.ppid() != daemon:
            process.kill()


def suspend(processes: list[psutil.Process]) -> Callable[[], None]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()

    def resume() -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    return resume


def suspend_rank(cluster: Cluster, victim: Host) -> Callable[[], None]:
    return suspend(cluster.ranks(victim))


def suspend_host(cluster: Cluster, victim: Host) -> Callable[[], None]:
    worker = cluster.workers[victim.name].pid
    return suspend([process for process in cluster.processes(victim) if process.pid != worker])


FAULTS: dict[str, Callable[[Cluster, Host], Callable[[], None] | None]] = {
    fault.__name__: fault
    for fault in (cut, cut_for_a_while, cut_all, separate, kill_executor, kill_worker_and_executor, kill_rank)
} | {fault.__name__: fault for fault in (kill_task, suspend_rank, suspend_host)}


# -- runs


class Running:
    """A run in a thread of its own."""

    def __init__(self, cluster: Cluster, case: Case, started: Path) -> None:
        self.outcome: list[Any] | BaseException | None = None
        # If no packets of the other rank arrive, this time decides.
        timeout = case.collective_timeout or (5.0 if case.fault == "separate" else None)
        network = Network(ports=PORTS, collective_timeout=timeout)
        options: dict[str, Any] = {"num_proc": 2, "spark": cluster.session, "start_timeout": 30, "network": network}

        def body() -> None:
            try:
                given = case.program, case.seconds, case.big, str(started)
                self.outcome = run(program, given, backend=case.backend, **options)
            except BaseException as error:
                self.outcome = error

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()


@pytest.fixture
def cluster(two_slots: Cluster) -> Iterator[Cluster]:
    two_slots.make_whole(240)  # Spark takes two minutes to notice hosts that were cut off
    yield two_slots
    two_slots.session.sparkContext.cancelAllJobs()
    for host in two_slots.net.hosts:
        two_slots.net.mend(host)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_run_ends_in_time_whatever_happens(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    case = Case.of(seed)
    if case.blocked is not None:
        cluster.net.block(cluster.net[case.blocked], cluster.net.driver, PORTS)
    running = Running(cluster, case, tmp_path)
    hosts = {host.name: host for host in cluster.net.hosts}

    def have_begun() -> bool:
        tasks = any("forkserver" in command_line(each) for host in hosts.values() for each in cluster.processes(host))
        return not running.thread.is_alive() or (tasks if case.placed else len(list(tmp_path.iterdir())) == 2)

    wait_until(have_begun, 90)
    time.sleep(case.after)
    ranks = {int(rank): hosts[name] for rank, name in (note.name.split("@") for note in tmp_path.iterdir())}
    assert case.placed or len(ranks) == 2, running.outcome
    victim = ranks.get(case.lost, cluster.net[case.lost])
    undo = None
    with contextlib.suppress(StopIteration):  # the executor has not come up again, or has ended
        undo = FAULTS[case.fault](cluster, victim)
    if undo is not None:
        time.sleep(case.mended_after)
        undo()
    running.thread.join(case.seconds + LIMIT)
    assert not running.thread.is_alive(), f"{case} still runs"
    outcome = running.outcome
    print(f"{case}: {outcome if isinstance(outcome, BaseException) else 'ended well'}")
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, RunError), outcome
        assert "on " in str(outcome) or case.fault == "kill_task", outcome  # the host of a rank
        assert "\tat " not in str(outcome), "the JVM's stack"
    else:
        assert outcome == ["x" * case.big] * 2
    for host in cluster.net.hosts:
        cluster.net.mend(host)
    wait_until(lambda: not any(cluster.ranks(host) for host in cluster.net.hosts), LIMIT)
