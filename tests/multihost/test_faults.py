"""Hosts that vanish, processes that are killed and ports that are blocked while ranks run on two hosts."""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_hvd.runner import ClusterError, ExecutorLostError, Network, RankFailedError, RunError, run
from spark_hvd.runner.channel.liveness import HUB_PATIENCE
from tests.conftest import wait_until
from tests.multihost.hosts import Host
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


def note_start(folder: str) -> None:
    Path(folder, f"{hvd().rank()}@{socket.gethostname()}").touch()


def reduce_for_ever(started: str) -> None:
    import torch

    while True:
        hvd().allreduce(torch.ones(10_000), op=hvd().Sum)
        note_start(started)
        time.sleep(0.05)


def reduce_by_name_for_ever(started: str) -> None:
    import torch

    while True:
        hvd().synchronize(hvd().allreduce_async(torch.ones(10_000), name="gradient"))
        note_start(started)
        time.sleep(0.05)


class Background:
    """A run in its own thread: the error with which it ends, and when."""

    def __init__(self, cluster: Cluster, fn: Callable[..., Any], *args: Any, network: Network | None = None) -> None:
        self.error: BaseException | None = None
        self.values: list[Any] | None = None
        self.ended = 0.0

        def body() -> None:
            try:
                self.values = run(fn, args, num_proc=2, spark=cluster.session, start_timeout=60, network=network)
            except BaseException as error:
                self.error = error
            self.ended = time.monotonic()

        self._thread = threading.Thread(target=body)
        self._thread.start()

    def join(self, timeout: float) -> RunError:
        """Wait for the end and return the error."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            pytest.fail(f"still running after {timeout} s")
        assert isinstance(self.error, RunError), self.error
        return self.error


@pytest.fixture
def cluster(two_slots: Cluster) -> Iterator[Cluster]:
    two_slots.make_whole()
    yield two_slots
    two_slots.session.sparkContext.cancelAllJobs()  # left by a test that has failed


def wait_started(cluster: Cluster, folder: Path) -> dict[int, Host]:
    """Wait until both ranks have recorded their start; return the host of each."""
    notes = wait_until(lambda: len(found := sorted(folder.iterdir())) == 2 and found, 60.0)
    hosts = {host.name: host for host in cluster.net.hosts}
    return {int(rank): hosts[name] for rank, name in (note.name.split("@") for note in notes)}


def test_a_lost_host_is_named_where_collectives_fail_first(cluster: Cluster, tmp_path: Path) -> None:
    network = Network(collective_timeout=5)  # less than the hub waits
    training = Background(cluster, reduce_by_name_for_ever, str(tmp_path), network=network)
    victim = wait_started(cluster, tmp_path)[1]
    cluster.net.cut(victim)
    cut = time.monotonic()
    error = training.join(60)
    print(f"noticed after {training.ended - cut:.1f} s: {error}")
    assert isinstance(error, ExecutorLostError)
    assert f"rank 1 on {victim.address} (last heard" in str(error)
    assert training.ended - cut < HUB_PATIENCE, "before its ranks end themselves"


def test_a_network_that_comes_back_in_time_ends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    def fn(started: str) -> int:
        import torch

        end = time.monotonic() + 12
        more, steps = torch.ones(1), 0
        while float(more) > 0:
            more = torch.tensor(float(time.monotonic() < end))
            hvd().allreduce_(more, op=hvd().Min, name="more")
            steps += 1
            note_start(started)
            time.sleep(0.05)
        return steps

    training = Background(cluster, fn, str(tmp_path))
    victim = wait_started(cluster, tmp_path)[1]
    cluster.net.cut(victim)
    time.sleep(2)  # TCP repeats what was lost after 3 seconds, and then after 6
    cluster.net.mend(victim)
    training._thread.join(60)
    assert training.values is not None, training.error


def test_a_driver_that_is_suspended_ends_nothing(cluster: Cluster) -> None:
    def fn() -> float:
        import torch

        end, total = time.monotonic() + 14, 0.0
        while time.monotonic() < end:
            time.sleep(0.1)
        total += float(hvd().allreduce(torch.ones(1), op=hvd().Sum))
        return total

    me = os.getpid()
    naps = subprocess.Popen(["sh", "-c", f"sleep 4; kill -STOP {me}; sleep 9; kill -CONT {me}"])
    assert run(fn, num_proc=2, spark=cluster.session, start_timeout=60) == [2.0, 2.0]
    assert naps.wait() == 0


def test_a_killed_executor_is_named(cluster: Cluster, tmp_path: Path) -> None:
    training = Background(cluster, reduce_for_ever, str(tmp_path))
    victim = wait_started(cluster, tmp_path)[1]
    cluster.executor(victim).kill()
    killed = time.monotonic()
    error = training.join(60)
    print(f"noticed after {training.ended - killed:.1f} s: {error}")
    assert isinstance(error, ExecutorLostError)
    assert f"rank 1 on {victim.address}" in str(error)
    wait_until(lambda: not any(cluster.ranks(host) for host in cluster.net.hosts))


def test_a_killed_worker_and_executor_are_named(cluster: Cluster, tmp_path: Path) -> None:
    training = Background(cluster, reduce_for_ever, str(tmp_path))
    victim = wait_started(cluster, tmp_path)[1]
    executor = cluster.executor(victim)
    cluster.workers[victim.name].kill()
    executor.kill()
    killed = time.monotonic()
    error = training.join(60)
    print(f"noticed after {training.ended - killed:.1f} s: {error}")
    assert isinstance(error, ExecutorLostError)
    assert f"rank 1 on {victim.address}" in str(error)
    wait_until(lambda: not any(cluster.ranks(host) for host in cluster.net.hosts))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_cannot_reach_the_hub_trains_all_the_same(cluster: Cluster, tmp_path: Path, lost: int) -> None:
    ports = "64000-64100"  # the kernel gives none of these to Spark's own connections
    cluster.net.block(cluster.net[0], cluster.net.driver, ports)
    training = Background(cluster, reduce_for_ever, str(tmp_path), network=Network(ports=ports))
    victim = wait_started(cluster, tmp_path)[lost]  # they have connected through rank 0, which has the hub now
    cluster.net.cut(victim)
    cut = time.monotonic()
    error = training.join(60)
    print(f"noticed after {training.ended - cut:.1f} s: {error}")
    assert isinstance(error, ExecutorLostError)
    assert f"rank {lost} on {victim.address}" in str(error)
    assert training.ended - cut < HUB_PATIENCE


def test_ranks_that_cannot_reach_each_other_fail_in_time(cluster: Cluster) -> None:
    first, second = cluster.net.hosts
    cluster.net.block(first, second.address)
    cluster.net.block(second, first.address)
    started = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run(lambda: None, num_proc=2, spark=cluster.session, start_timeout=15)
    print(f"noticed after {time.monotonic() - started:.1f} s: {caught.value}")
    assert time.monotonic() - started < 15 + 45, "start_timeout, and the slot of a host that an earlier test cut off"
    assert f"rank 1 of 2 failed on host {caught.value.host}" in str(caught.value)
    assert f"rank 1 on host {caught.value.host}" in str(caught.value)
    assert "cannot reach the store of rank 0" in str(caught.value)


def test_a_rank_that_can_reach_nobody_is_named(cluster: Cluster) -> None:
    first, second = cluster.net.hosts
    ports = "64000-64100"
    for host, other in ((first, second), (second, first)):
        cluster.net.block(host, cluster.net.driver, ports)
        cluster.net.block(host, other.address)
    with pytest.raises(ClusterError) as caught:
        run(lambda: None, num_proc=2, spark=cluster.session, start_timeout=60, network=Network(ports=ports))
    assert re.match(r"rank 1 on (\S+) can reach neither the driver nor rank 0 on ", str(caught.value)), caught.value


def test_a_host_that_is_cut_off_before_the_run_is_named(cluster: Cluster) -> None:
    victim = cluster.net[1]
    cluster.net.cut(victim)
    started = time.monotonic()
    with pytest.raises(ExecutorLostError) as caught:
        run(lambda: None, num_proc=2, spark=cluster.session, start_timeout=60)
    print(f"noticed after {time.monotonic() - started:.1f} s: {caught.value}")
    assert victim.address in str(caught.value)
    assert time.monotonic() - started < 60, "start_timeout"


# Last, since a connection that was cut for so long takes long to recover.
def test_a_host_whose_cable_is_pulled_is_named_in_time_and_ends_its_own_ranks(cluster: Cluster, tmp_path: Path) -> None:
    training = Background(cluster, reduce_for_ever, str(tmp_path))
    victim = wait_started(cluster, tmp_path)[1]
    other = next(host for host in cluster.net.hosts if host is not victim)
    cluster.net.cut(victim)
    cut = time.monotonic()
    error = training.join(60)
    print(f"noticed after {training.ended - cut:.1f} s: {error}")
    assert isinstance(error, ExecutorLostError)
    assert f"rank 1 on {victim.address} (last heard" in str(error)
    assert training.ended - cut < HUB_PATIENCE, "before its ranks end themselves"
    wait_until(lambda: not cluster.ranks(other), HUB_PATIENCE / 2)
    assert len(cluster.ranks(victim)) == 1, "nobody can tell them to stop"
    wait_until(lambda: not cluster.ranks(victim), HUB_PATIENCE + 10)
    print(f"isolated ranks ended after {time.monotonic() - cut:.1f} s")
