"""Processes that ranks depend on are killed while they train on a cluster: runs continue, or end cleanly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import run_elastic
from tests.conftest import fork_servers, wait_until
from tests.daemons import command_line
from tests.elastic_jobs import Job, checked, read, train
from tests.spark.elastic_cluster import ElasticCluster, Progress, directed, elastic_cluster

pytestmark = [pytest.mark.night, pytest.mark.timeout(1800), pytest.mark.usefixtures("no_leaks")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticCluster]:
    with elastic_cluster(tmp_path_factory.mktemp("chaos")) as cluster:
        yield cluster


def fork_server(hosts: ElasticCluster) -> psutil.Process:
    """Return the executor's fork server, whose command line names the executor; its parent may have been killed."""
    anchor = str(hosts.executor(HOST).pid)
    return next(each for each in fork_servers() if anchor in command_line(each).split())


def python_daemon(hosts: ElasticCluster) -> psutil.Process:
    return next(each for each in hosts.executor(HOST).children() if "python" in command_line(each))


def python_worker(hosts: ElasticCluster) -> psutil.Process:
    return next(each for each in python_daemon(hosts).children() if command_line(each))  # the last may be a zombie


def executor(hosts: ElasticCluster) -> psutil.Process:
    return hosts.executor(HOST)


SUPPORTING = [fork_server, python_worker, executor]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("which", SUPPORTING)
def test_ranks_go_on_when_what_supports_them_is_killed(
    hosts: ElasticCluster, tmp_path: Path, which: Callable[[ElasticCluster], psutil.Process], times: int
) -> None:
    hosts.provide(h2=1, h3=1)
    progress = Progress(tmp_path)
    job = Job(epochs=0, pause=0.02, log=str(progress.log), until=str(progress.until))

    def script(progress: Progress) -> None:
        generation = 0
        for _ in range(times):
            steady = progress.wait(lambda line, least=generation: line.size == 2 and line.generation >= least, 300)  # type: ignore[misc]
            progress.wait(lambda line, step=steady.step: line.step >= step + 5 and line.size == 2, 300)  # type: ignore[misc]
            generation = read(progress.log)[-1].generation + 1
            which(hosts).kill()
            progress.wait(lambda line, least=generation: line.size == 2 and line.generation >= least, 300)  # type: ignore[misc]

    options = {"min_num_proc": 1, "host_failure_limit": 9, "timeout": 1200, "verbose": 0}
    with directed(progress, script):
        results = run_elastic(train, [job], num_proc=2, spark=hosts.session, **options)
    first = checked(results)
    assert first.generation >= times
    ranks = {line.process for line in read(progress.log)}
    wait_until(lambda: not any(map(lives, ranks)), 60)


def test_ranks_go_on_as_they_are_when_the_daemon_of_their_task_is_killed(hosts: ElasticCluster, tmp_path: Path) -> None:
    hosts.provide(h2=1, h3=1)
    progress = Progress(tmp_path)
    job = Job(epochs=0, pause=0.02, log=str(progress.log), until=str(progress.until))

    def script(progress: Progress) -> None:
        steady = progress.wait(lambda line: line.size == 2 and line.host == HOST and line.step >= 5, 300)
        python_daemon(hosts).kill()
        progress.wait(lambda line: line.host == HOST and line.step >= steady.step + 50, 300)

    with directed(progress, script):
        results = run_elastic(train, [job], num_proc=2, spark=hosts.session, timeout=1200, verbose=0)
    assert checked(results).generation == 0
    ranks = {line.process for line in read(progress.log)}
    assert len(ranks) == 2
    wait_until(lambda: not any(map(lives, ranks)), 60)
    hosts.kill_workers()  # Spark would continue with the workers, which have no daemon any more


def lives(pid: int) -> bool:
    """Return whether such a process exists and is not a zombie."""
    try:
        return command_line(psutil.Process(pid)) != ""
    except psutil.NoSuchProcess:
        return False


def test_a_driver_that_is_killed_while_ranks_train_leaves_nothing(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from spark_hvd.runner import run_elastic
        from tests.conftest import LOCAL_CLUSTER, start_session
        from tests.elastic_jobs import Job, train
        session = start_session(LOCAL_CLUSTER)
        job = Job(epochs=0, pause=0.02, log={str(progress.log)!r}, until={str(progress.until)!r})
        run_elastic(train, [job], num_proc=2, spark=session, verbose=0)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, str(tmp_path / "program.py")], cwd=ROOT) as driver:
        try:
            progress.wait(lambda line: line.size == 2 and line.step >= 5, 300)
            started = psutil.Process(driver.pid).children(recursive=True)
            assert [each for each in started if "supervise.forkserver" in command_line(each)]
        finally:
            driver.kill()
    wait_until(lambda: not any(map(command_line, started)), 300)
