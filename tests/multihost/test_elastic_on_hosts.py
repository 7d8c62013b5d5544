"""Elastic runs on several hosts: they continue without a host that is cut off, and take it back when it returns."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_hvd.runner import run_elastic
from tests.conftest import wait_until
from tests.elastic_jobs import Job, Line, Result, read, train
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GOES_ON = 20.0
"""Seconds within which survivors of a vanished host train again: 7 of silence, and many for a busy machine."""


@pytest.fixture
def cluster(two_slots: Cluster) -> Iterator[Cluster]:
    two_slots.make_whole()
    yield two_slots
    two_slots.session.sparkContext.cancelAllJobs()


def last(log: Path) -> Line:
    lines = read(log)
    assert lines
    return lines[-1]


def test_a_host_that_is_cut_off_is_gone_on_without_and_taken_in_again(cluster: Cluster, tmp_path: Path) -> None:
    log, until = tmp_path / "log", tmp_path / "until"
    job = Job(pause=0.05, log=str(log), until=str(until))
    outcome: list[list[Result] | BaseException] = []

    def body() -> None:
        try:
            outcome.append(
                run_elastic(train, [job], num_proc=2, min_num_proc=1, spark=cluster.session, rejoin_timeout=15)
            )
        except BaseException as error:
            outcome.append(error)

    training = threading.Thread(target=body)
    training.start()
    try:
        wait_until(lambda: len({line.rank for line in read(log) if line.size == 2}) == 2, 90.0)
        victim = cluster.net.hosts[1]
        before = last(log)
        cluster.net.cut(victim)
        wait_until(lambda: last(log).size == 1 and last(log).step > before.step + 5, 60.0)
        alone = next(line for line in read(log) if line.size == 1)
        print(f"went on alone after {alone.time - before.time:.1f} s")
        assert alone.time - before.time < GOES_ON
        cluster.net.mend(victim)
        wait_until(lambda: last(log).size == 2, 90.0)
    finally:
        until.touch()
        training.join(120)
        if training.is_alive():
            faulthandler.dump_traceback(all_threads=True)
    assert len(outcome) == 1
    results = outcome[0]
    if isinstance(results, BaseException):
        raise results
    assert [result.size for result in results] == [2, 2]
    assert results[0].weights == results[1].weights
    assert results[0].worlds[0][1] == 2
    assert 1 in {size for _, size in results[0].worlds}


def test_a_run_ends_with_its_last_rank_also_while_a_host_is_cut_off(cluster: Cluster, tmp_path: Path) -> None:
    log, until = tmp_path / "log", tmp_path / "until"
    job = Job(pause=0.05, log=str(log), until=str(until))
    returned = []

    def fn() -> tuple[Result, bytes, float]:
        return train(job), bytes(5 << 20), time.time()  # more than one message of the hub

    def body() -> None:
        values = run_elastic(fn, num_proc=2, min_num_proc=1, spark=cluster.session, rejoin_timeout=15, timeout=100)
        returned.append((time.time(), values))

    training = threading.Thread(target=body)
    training.start()
    try:
        wait_until(lambda: len({line.rank for line in read(log) if line.size == 2}) == 2, 90.0)
        cluster.net.cut(cluster.net.hosts[1])
        wait_until(lambda: last(log).size == 1, 60.0)
    finally:
        until.touch()
        training.join(100)
        cluster.net.mend(cluster.net.hosts[1])
    ((now, [(result, data, ended)]),) = returned
    print(f"returned {now - ended:.2f} s after the rank")
    assert result.size == 1
    assert len(data) == 5 << 20
    assert now - ended < 12, "seconds; two on a machine that is not busy, and more than 15 if it waits for the host"
