"""The fork server: what its ranks share, and that a rank can be killed as soon as it exists."""

from __future__ import annotations

import errno
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest

import spark_hvd
import spark_hvd.torch as hvd
from spark_hvd.runner.config import IMPORTS, PRELOAD, RunConfig
from spark_hvd.runner.launch.arguments import adapted
from spark_hvd.runner.supervise.processes import (
    ForkServer,
    ForkServerError,
    Interpreter,
    fork_server,
    fork_server_of,
    outlives_runs,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_rank_that_has_just_been_forked_can_be_killed() -> None:
    """At that time it may not have created its own process group yet."""
    server = fork_server({}, os.getpid())
    for _ in range(50):
        process = server.spawn(dict(os.environ), 60.0)
        process.signal_group(signal.SIGKILL)
        try:
            wait([process.status_fd])
            assert os.read(process.status_fd, 256) == b'{"exitcode": -9}\n'
        finally:
            process.close()


def parent_of_a_rank(server: ForkServer) -> int:
    process = server.spawn(dict(os.environ), 60.0)
    parent = psutil.Process(process.pid).ppid()
    process.kill()
    process.close()
    return parent


@pytest.mark.slow
def test_what_is_started_for_another_python_is_what_that_one_finds() -> None:
    this, env = Interpreter(sys.executable, os.environ, sys.path), {PRELOAD: "no_such_module_of_another"}
    early = fork_server_of(this, {**env, "MINE": "here"}, os.getpid())
    assert early is not None
    other = Interpreter(sys.executable, {**os.environ, "PYTHONPATH": "/elsewhere"}, sys.path)
    elsewhere = fork_server_of(other, env, os.getpid())
    assert elsewhere is not None
    one = parent_of_a_rank(fork_server(env, os.getpid()))
    assert [parent_of_a_rank(early) == one, parent_of_a_rank(elsewhere) == one] == [True, False]
    early.close()
    elsewhere.close()


def test_here_the_server_of_a_run_is_a_fork_of_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each of pytest's processes would start servers that import torch once more."""
    importlib.import_module("torch._dynamo")  # sets a variable of torch's
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "TF2_BEHAVIOR"):  # set by Lightning, TensorFlow
        monkeypatch.setenv(name, "1")
    server = psutil.Process(parent_of_a_rank(fork_server({}, os.getpid())))
    parents = [" ".join(each.cmdline()) for each in server.parents()]
    assert "multiprocessing.forkserver" in parents[0], parents


def test_a_server_that_was_killed_has_a_successor() -> None:
    def run() -> int:
        server: int = spark_hvd.run_local(os.getppid, num_proc=1, env={"HOME": "/of/two/runs"}, verbose=0)[0]
        return server

    killed = psutil.Process(run())
    killed.kill()
    killed.wait(20)
    assert run() != killed.pid


def test_a_server_in_use_stays_open_whatever_other_runs_begin() -> None:
    servers = [fork_server({"HOME": f"/of/run/{number}"}, os.getpid()) for number in range(3)]
    process = servers[0].spawn(dict(os.environ), 60.0)
    server = psutil.Process(process.pid).parent()
    assert server is not None
    servers.clear()
    assert psutil.pid_exists(process.pid)
    process.kill()
    process.close()
    del process
    server.wait(20)


def test_which_outlive_their_runs() -> None:
    assert outlives_runs({})
    assert outlives_runs({"MINE": "here", PRELOAD: "json"})
    assert not outlives_runs({"LD_PRELOAD": None})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module that records the process that imported it, and runs the test parameter's code."""
    name = f"preloaded_{os.getpid()}_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(f"import os\n{request.param}\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def facts(module: str | None = None) -> dict[str, Any]:
    """Return, in the rank, the process from which it was forked, and what it sees."""
    import importlib
    import os

    imported = None if module is None else importlib.import_module(module).PID
    return {"server": os.getppid(), "me": os.getpid(), "imported": imported, "mine": os.environ.get("MINE")}


@pytest.mark.slow
def test_runs_whose_libraries_load_alike_share_a_server() -> None:
    def facts_with(**env: str | None) -> dict[str, Any]:
        return spark_hvd.run_local(facts, num_proc=1, env=env)[0]

    common, own, threads = facts_with(), facts_with(MINE="here"), facts_with(OMP_NUM_THREADS="3")
    assert (common["mine"], own["mine"]) == (None, "here")
    assert common["server"] == own["server"] != threads["server"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["", "raise OSError('broken')"], indirect=True)
def test_modules_are_imported_before_ranks_are_forked(module: str) -> None:
    ran = spark_hvd.run_local
    if "OSError" in Path(sys.path[0], f"{module}.py").read_text():
        with pytest.raises(spark_hvd.runner.RankFailedError, match="broken"):  # type: ignore[attr-defined]
            ran(facts, (module,), num_proc=1, env={PRELOAD: module})
        return
    one, two = ran(facts, (module,), num_proc=2, env={PRELOAD: f"no_such_module,{module}"})
    assert one["imported"] == two["imported"] == one["server"]


def test_a_server_that_is_there_imports_what_a_run_names() -> None:
    def has() -> tuple[int, bool]:
        return os.getppid(), "wsgiref" in sys.modules

    [(before, there)] = spark_hvd.run_local(has, num_proc=1)
    assert not there
    assert spark_hvd.run_local(has, num_proc=2, env={IMPORTS: "no_such_module,wsgiref"}) == [(before, True)] * 2


@pytest.mark.night
@pytest.mark.parametrize("module", ["import tensorflow\ntensorflow.constant(1.0) + 1"], indirect=True)
def test_a_server_that_has_computed_by_tensorflow_begins_again(module: str) -> None:
    """A process that is forked afterwards hangs in its first operation."""

    def computed() -> float:
        import tensorflow

        return float(tensorflow.constant(2.0) + 1)

    def both(name: str) -> tuple[dict[str, Any], float]:
        return facts(name), computed()

    ((seen, value),) = spark_hvd.run_local(both, (module,), num_proc=1, env={PRELOAD: module}, timeout=60)
    assert seen["imported"] == seen["me"]
    assert value == 3.0


def test_tensorflow_is_imported_before_where_the_driver_trains_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorflow", "keras", "spark_hvd.tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    assert adapted(RunConfig(num_proc=2)).env == {}
    backend = "torch"
    keras = SimpleNamespace(config=SimpleNamespace(backend=lambda: backend))
    monkeypatch.setitem(sys.modules, "keras", keras)
    assert adapted(RunConfig(num_proc=2)).env == {}
    backend = "tensorflow"
    assert adapted(RunConfig(env={"A": "b"})).env == {PRELOAD: "tensorflow", "A": "b"}
    assert adapted(RunConfig(env={PRELOAD: None})).env == {PRELOAD: None}


def hold(count: int) -> list[int]:
    """Open this many files; the process may have no more than its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 256)), hard))
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


def test_ranks_of_a_program_with_many_open_files() -> None:
    held = hold(1100)
    try:
        assert spark_hvd.run_local(os.getpgrp, num_proc=2, verbose=0) != []
    finally:
        for fd in held:
            os.close(fd)


def test_nothing_stays_open_where_there_is_no_room_for_a_ranks_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server({}, os.getpid())
    before, left = os.listdir("/proc/self/fd"), iter(range(3))
    pipe = os.pipe

    def scarce() -> tuple[int, int]:
        if next(left) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    monkeypatch.setattr(os, "pipe", scarce)
    with pytest.raises(ForkServerError, match="Too many open files"):
        server.spawn(dict(os.environ), 60.0)
    assert os.listdir("/proc/self/fd") == before


def test_product_and_tests_wait_for_any_number_of_files() -> None:
    """`select.select` refuses descriptors from 1,024 on, which a driver with many files has."""
    root = Path(__file__).parents[2]
    files = [path for room in ("spark_hvd", "runner", "estimators", "tests") for path in (root / room).rglob("*.py")]
    assert [
        str(path)
        for path in files
        if re.search(r"\bselect\.select[(]|import select[ ]as|from select[ ]", path.read_text())
    ] == []


def killed_with_its_server() -> str:
    """The first ranks' fork server is killed before the first commit."""

    @hvd.elastic.run
    def train(state: Any) -> int:
        if hvd.generation() == 0:
            hvd.barrier()
            if hvd.rank() == 0:
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()  # for the kernel to kill this process too
            hvd.barrier()
        return os.getppid()

    return f"{train(hvd.elastic.ObjectState(step=0))} {hvd.generation()}"


def test_an_elastic_run_starts_a_new_server_and_blames_nobody() -> None:
    env: dict[str, str | None] = {"HOME": "/of/an/elastic/run"}  # a server of its own
    first, second = spark_hvd.run_elastic_local(
        killed_with_its_server, num_proc=2, host_failure_limit=1, env=env, verbose=0
    )
    assert first == second
    assert int(first.split()[1]) > 0


FEW = """
import resource, os
import spark_hvd
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while len(os.listdir("/proc/self/fd")) < 50:
    held.append(os.open(os.devnull, os.O_RDONLY))
try:
    spark_hvd.run_local(os.getpid, num_proc=1)
except OSError as error:
    print(error)
"""


def test_too_few_open_files_are_a_sentence_and_no_abort() -> None:
    ran = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "the driver's channel to its ranks needs 24 more open files" in ran.stdout
    assert "ulimit -n 65536" in ran.stdout
