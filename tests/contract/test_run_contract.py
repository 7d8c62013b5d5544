"""What both ``run`` and ``run_local`` promise: the same tests for both."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_hvd.runner import RankFailedError, RunTimeoutError, UnpicklableError, run, run_local
from spark_hvd.runner.config import Reporting
from spark_hvd.runner.outcome.rows import FailureKind
from tests.conftest import have_ended, ranks_alive, wait_until

Launcher = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["run_local", "run"])
def launch(request: pytest.FixtureRequest) -> Launcher:
    return launcher(request)


@pytest.fixture(scope="module", params=["run_local", pytest.param("run", marks=pytest.mark.slow)])
def launch_any(request: pytest.FixtureRequest) -> Launcher:
    """The same for what ranks do alone, and how the driver reads it: there, a run on Spark takes the same lines."""
    return launcher(request)


def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "run_local":
        return run_local
    spark = request.getfixturevalue("spark")
    return lambda *args, **kwargs: run(*args, spark=spark, **kwargs)


pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import tests; as for a notebook's __main__


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


def reduce_one() -> float:
    import torch

    return float(hvd().allreduce(torch.ones(1), op=hvd().Sum))


def test_values_come_back_in_rank_order(launch: Launcher) -> None:
    def fn(offset: int, *, factor: int) -> tuple[int, int, float]:
        return hvd().rank() * factor + offset, hvd().size(), reduce_one()

    assert launch(fn, args=(5,), kwargs={"factor": 10}, num_proc=2) == [(5, 2, 2.0), (15, 2, 2.0)]


def test_topology_and_environment(launch: Launcher) -> None:
    def fn() -> tuple[dict[str, int], dict[str, str | None]]:
        names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MINE", "HOME")
        return {name: getattr(hvd(), name)() for name in names}, {key: os.environ.get(key) for key in variables}

    (_, _), (topology, variables) = launch(fn, num_proc=2, env={"MINE": "yes", "HOME": None})
    assert topology == {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 1}
    assert variables == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MINE": "yes", "HOME": None,
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_share_the_cores(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> int:
        import torch

        return torch.get_num_threads()

    monkeypatch.delenv("OMP_NUM_THREADS")
    each = max(1, (os.cpu_count() or 1) // 2) if launch is run_local else 1  # Spark sets spark.task.cpus
    assert launch(fn, num_proc=2) == [each, each]
    assert launch(fn, num_proc=1, env={"OMP_NUM_THREADS": "3"}) == [3]


def test_init_and_shutdown_inside_fn(launch_any: Launcher) -> None:
    def fn() -> tuple[float, float]:
        hvd().init()
        first = reduce_one()
        hvd().shutdown()
        hvd().init()
        return first, reduce_one()

    assert launch_any(fn, num_proc=2) == [(2.0, 2.0), (2.0, 2.0)]


def test_plain_torch_distributed_works_inside_fn(launch_any: Launcher) -> None:
    def fn() -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert launch_any(fn, num_proc=2) == [2.0, 2.0]


def test_one_rank(launch_any: Launcher) -> None:
    assert launch_any(lambda: (hvd().rank(), hvd().size(), reduce_one()), num_proc=1) == [(0, 1, 1.0)]


def test_classes_of_the_calling_module_travel(launch_any: Launcher) -> None:
    assert [value.rank for value in launch_any(lambda: Value(hvd().rank()), num_proc=2)] == [0, 1]


class Value:
    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_output_arrives_live_with_its_rank(launch: Launcher, tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    seen = tmp_path / "seen"

    def fn() -> None:
        print(f"first of {hvd().rank()}")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from native code\n")
        wait_until(seen.exists, 60)
        print("no newline at the end", end="")

    def watch() -> None:
        wait_until(lambda: "[0] first of 0\n" in out.getvalue() and "[1] first of 1\n" in out.getvalue(), 60)
        seen.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    launch(fn, num_proc=2, reporting=Reporting(stdout=out, stderr=err))
    watcher.join()
    for rank in (0, 1):
        assert f"[{rank}] from native code\n" in out.getvalue()
        assert f"[{rank}] no newline at the end\n" in out.getvalue()
        assert f"[{rank}] to stderr\n" in err.getvalue()


def test_verbose_0_shows_nothing(launch: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: print("hello there"), num_proc=2, verbose=0)
    assert "hello there" not in "".join(capfd.readouterr())


def fail(rank: int, how: Callable[[], Any]) -> Callable[[], None]:
    """A function in which one rank fails while the others are in an all-reduce."""

    def fn() -> None:
        reduce_one()
        print(f"step 1 of rank {hvd().rank()}")
        if hvd().rank() == rank:
            how()
        reduce_one()

    return fn


def caught(launch: Launcher, fn: Callable[[], Any], **kwargs: Any) -> RankFailedError:
    with pytest.raises(RankFailedError) as info:
        launch(fn, num_proc=2, verbose=0, **kwargs)
    assert not ranks_alive(), "when the error is raised, every rank is gone"
    return info.value


def test_a_rank_that_raises_between_collectives(launch: Launcher) -> None:
    def raise_it() -> None:
        raise KeyError("no such feature")

    error = caught(launch, fail(1, raise_it))
    assert (error.rank, error.host, error.first.kind) == (1, "127.0.0.1", FailureKind.EXCEPTION)
    assert isinstance(error.__cause__, KeyError)
    assert 'raise KeyError("no such feature")' in str(error), "the user's own line is in the message"
    assert "step 1 of rank 1" in error.first.log_tail
    assert error.first.traceback.splitlines()[1].strip().startswith(f'File "{__file__}"'), "no frames of ours on top"
    assert [failure.kind for failure in error.failures[1:]] == [FailureKind.STOPPED]


def test_a_rank_that_raises_before_the_first_collective(launch_any: Launcher) -> None:
    def fn() -> None:
        if hvd().rank() == 0:
            raise ValueError("early")
        reduce_one()

    error = caught(launch_any, fn)
    assert (error.rank, error.first.error) == (0, "ValueError: early")


def test_a_rank_that_raises_while_others_are_inside_a_collective(launch_any: Launcher) -> None:
    def fn() -> None:
        if hvd().rank() == 0:
            time.sleep(0.5)  # by now rank 1 waits in its all-reduce
            raise ValueError("late")
        reduce_one()

    assert caught(launch_any, fn).first.error == "ValueError: late"


def test_every_rank_raises(launch: Launcher) -> None:
    def fn() -> None:
        raise ValueError(f"I am {hvd().rank()}")

    error = caught(launch, fn)
    assert error.first.error in ("ValueError: I am 0", "ValueError: I am 1")


def test_an_exception_that_cannot_be_pickled_still_shows_its_traceback(launch_any: Launcher) -> None:
    def raise_it() -> None:
        class Stubborn(Exception):
            def __reduce__(self) -> str:
                raise TypeError("no")

        raise Stubborn("odd one")

    error = caught(launch_any, fail(1, raise_it))
    assert (type(error.__cause__).__name__, str(error.__cause__)) == (
        "Stubborn",
        "odd one",
    )
    assert "Stubborn: odd one" in str(error)


def test_an_exception_that_cannot_say_what_it_is(launch_any: Launcher) -> None:
    def raise_it() -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise TypeError("no")

        raise Mute

    assert "Mute: <exception str() failed>" in caught(launch_any, fail(1, raise_it)).first.error


def test_a_rank_that_exits_with_a_code(launch: Launcher) -> None:
    error = caught(launch, fail(1, lambda: os._exit(7)))
    assert (error.rank, error.first.kind) == (1, FailureKind.EXIT)
    assert "exited with code 7" in str(error)


def test_sys_exit_in_fn(launch_any: Launcher) -> None:
    error = caught(launch_any, fail(0, lambda: sys.exit(3)))
    assert "sys.exit(3)" in error.first.error


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_rank_killed_by_a_signal(launch: Launcher, signum: int, name: str) -> None:
    error = caught(launch, fail(1, lambda: os.kill(os.getpid(), signum)))
    assert (error.rank, error.first.kind) == (1, FailureKind.SIGNAL)
    assert name in str(error)
    if name == "SIGSEGV":
        assert "test_run_contract.py" in error.first.traceback, "where it crashed, in Python"


def test_a_rank_that_hangs_is_ended_by_timeout_with_every_stack(launch: Launcher, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"

    def hang() -> None:
        hangs.touch()
        time.sleep(600)

    for timeout in (2, 20, 200):  # on a busy machine the first all-reduce takes longer than the shortest
        with pytest.raises(RunTimeoutError) as info:
            launch(fail(1, hang), num_proc=2, verbose=0, timeout=timeout)
        if hangs.exists():
            break
    stacks = {failure.rank: failure.traceback for failure in info.value.failures}
    assert "reduce_one" in stacks[0], "rank 0 waits in its all-reduce"
    assert "reduce_one" not in stacks[1], "rank 1 never entered it"
    assert "test_run_contract.py" in stacks[1]


def test_a_stopped_process_is_ended_by_timeout(launch_any: Launcher) -> None:
    with pytest.raises(RunTimeoutError):
        launch_any(fail(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)), num_proc=2, verbose=0, timeout=2)
    assert not ranks_alive()


def test_a_rank_that_returns_while_others_still_reduce(launch: Launcher) -> None:
    def fn() -> None:
        if hvd().rank() == 0:
            reduce_one()

    error = caught(launch, fn)
    assert error.rank == 0
    assert "rank 1 had already returned from fn" in str(error)


def test_grandchildren_go_with_their_rank(launch_any: Launcher) -> None:
    def fn() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    pids = launch_any(fn, num_proc=2)
    wait_until(lambda: have_ended(pids))


def test_fn_that_cannot_be_pickled(launch: Launcher) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match="closure variable 'lock'"):
        launch(lambda: lock, num_proc=2)


def test_a_value_that_cannot_be_pickled(launch_any: Launcher) -> None:
    error = caught(launch_any, lambda: {"lock": threading.Lock()} if hvd().rank() == 1 else 0)
    assert (error.rank, error.first.kind) == (1, FailureKind.RESULT)
    assert "value['lock']" in str(error)


def test_a_module_that_ranks_lack_is_named(launch_any: Launcher) -> None:
    import types

    module = types.ModuleType("only_on_the_driver")
    exec("def train(): return 1", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        assert cloudpickle.dumps(module.train)
        error = caught(launch_any, module.train)
    finally:
        del sys.modules[module.__name__]
    assert error.first.kind is FailureKind.SETUP
    assert "only_on_the_driver" in str(error)
    assert "--py-files" in str(error)


@pytest.mark.night
def test_values_of_200_mb(launch: Launcher) -> None:
    first, second = launch(lambda: bytes([hvd().rank()]) * 200_000_000, num_proc=2)
    assert (len(first), first[:1], len(second), second[-1:]) == (200_000_000, b"\0", 200_000_000, b"\1")


def test_much_output_is_neither_lost_nor_reordered(launch: Launcher) -> None:
    out = io.StringIO()

    def fn() -> None:
        for i in range(20_000):
            print(f"line {i}")

    launch(fn, num_proc=2, reporting=Reporting(stdout=out))
    for rank in (0, 1):
        lines = [line for line in out.getvalue().splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] line {i}" for i in range(20_000)]


def test_from_a_thread_and_several_at_once(launch: Launcher) -> None:
    values: dict[int, list[Any]] = {}

    def one(i: int) -> None:
        values[i] = launch(lambda: (i, hvd().rank(), reduce_one()), num_proc=2)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == {i: [(i, 0, 2.0), (i, 1, 2.0)] for i in range(3)}


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"num_proc": 0}, ValueError, "num_proc=0"),
        ({"num_proc": 1.5}, TypeError, "num_proc=1.5"),
        ({"num_proc": 1, "backend": "mpirun"}, ValueError, "backend='mpirun'"),
        ({"num_proc": 1, "timeout": -1}, ValueError, "timeout=-1"),
        ({"num_proc": 1, "env": {"A": 1}}, TypeError, r"env\['A'\]=1"),
    ],
)
def test_wrong_arguments(launch: Launcher, kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        launch(lambda: 1, **kwargs)


def test_the_next_run_works_after_all_that(launch: Launcher) -> None:
    assert launch(reduce_one, num_proc=2) == [2.0, 2.0]
