"""Runs over MPI: the world that functions see, and what happens to the others when a part of it dies."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from spark_hvd.runner import Network, RankFailedError, run_local
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.runner.supervise.mpi.shim import FOLDER
from tests.conftest import wait_until
from tests.ranks import ranks

pytestmark = pytest.mark.usefixtures("no_leaks", "no_mpi_left")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MANAGERS = ["mpiexec.hydra", "hydra_pmi_proxy", "mpirun.openmpi", "orted", "mpi/shim.py"]
needs_open_mpi = pytest.mark.skipif(
    shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed: apt-get install openmpi-bin"
)


def managers() -> list[psutil.Process]:
    """Return the MPI process managers that our runs have started: below this process, or without a parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            names = {Path(word).name for word in process.cmdline()[:5]}
            ours = names & set(MANAGERS) and FOLDER in process.environ()
            if ours and (process.ppid() == 1 or psutil.Process() in process.parents()):
                found.append(process)
    return found


@pytest.fixture
def no_mpi_left() -> Any:
    yield
    wait_until(lambda: not managers())


def world() -> dict[str, Any]:
    import torch
    from mpi4py import MPI

    import spark_hvd.torch as hvd

    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((2, 3), float(hvd.rank()))).sum().backward()
    optimizer.step()
    return {
        "hvd": (hvd.rank(), hvd.size()),
        "mpi": (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size),
        "sum": hvd.allreduce(torch.arange(3.0) + hvd.rank(), op=hvd.Sum).tolist(),
        "large": float(hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum).sum()),
        "objects": MPI.COMM_WORLD.allgather(hvd.rank()),
        "weights": model.weight.tolist(),
        "asked": (hvd.mpi_enabled(), hvd.mpi_built(), hvd.mpi_threads_supported()),
        "library": MPI.Get_library_version(),
    }


def check_worlds(worlds: list[dict[str, Any]], library: str) -> None:
    size = len(worlds)
    for rank, found in enumerate(worlds):
        assert found["hvd"] == found["mpi"] == (rank, size)
        assert found["sum"] == [size * each + sum(range(size)) for each in range(3)]
        assert found["large"] == size << 20
        assert found["objects"] == list(range(size))
        assert found["weights"] == worlds[0]["weights"]
        assert found["asked"] == (True, True, True)
        assert library in found["library"]


def test_functions_see_the_world_that_mpi_sees() -> None:
    check_worlds(run_local(world, num_proc=3, backend="mpi"), "MPICH")


@needs_open_mpi
def test_open_mpi() -> None:
    check_worlds(run_local(world, num_proc=3, backend="mpi", network=Network(mpi="openmpi")), "Open MPI")


def listening() -> set[str]:
    import torch

    import spark_hvd.torch as hvd

    hvd.allreduce(torch.ones(1))
    mine = [each for each in psutil.net_connections("tcp") if each.pid == os.getpid()]  # before psutil 6, too
    return {each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_host_stay_on_loopback() -> None:
    assert run_local(listening, num_proc=2, backend="mpi") == [{"127.0.0.1"}] * 2


def test_a_world_of_one() -> None:
    check_worlds(run_local(world, num_proc=1, backend="mpi"), "MPICH")


def inside(ending: Callable[[], None]) -> None:
    """Rank 1 ends this way, while rank 0 is inside an MPI collective."""
    import torch

    import spark_hvd.torch as hvd

    hvd.allreduce(torch.ones(1), name="first")
    if hvd.rank() == 1:
        time.sleep(0.3)
        ending()
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def fail() -> None:
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    ("ending", "kind", "text"),
    [
        (kill_self, FailureKind.SIGNAL, "was killed by SIGKILL"),
        (leave, FailureKind.EXIT, "exited with code 7"),
        (fail, FailureKind.EXCEPTION, "KeyError: 'on purpose'"),
    ],
)
def test_a_rank_that_dies_inside_mpi_ends_the_run_at_once(
    ending: Callable[[], None], kind: FailureKind, text: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=text) as caught:
        run_local(inside, [ending], num_proc=2, backend="mpi")
    assert time.monotonic() - started < 60
    assert (caught.value.rank, caught.value.first.kind) == (1, kind)


def kill_manager(name: str) -> None:
    import torch

    import spark_hvd.torch as hvd

    hvd.allreduce(torch.ones(1), name="first")
    if hvd.rank() == 1:
        for process in psutil.Process(int(os.environ["SUPERVISOR"])).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if Path(process.exe()).name == name:
                    process.kill()
    time.sleep(60)


@pytest.mark.parametrize(
    ("name", "text"), [("hydra_pmi_proxy", "MPI's proxy on host"), ("mpiexec.hydra", "mpiexec on host")]
)
def test_a_process_manager_that_is_killed_ends_the_run(name: str, text: str) -> None:
    env = {"SUPERVISOR": str(os.getpid())}
    with pytest.raises(RankFailedError, match=f"{text} .* was killed by SIGKILL") as caught:
        run_local(kill_manager, [name], num_proc=2, backend="mpi", env=env)
    assert caught.value.first.kind is FailureKind.MPI


def test_a_manager_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RankFailedError, match=r"orted is neither .* apt-get install openmpi-bin") as caught:
        run_local(world, num_proc=2, backend="mpi", network=Network(mpi="openmpi"))
    assert caught.value.first.kind is FailureKind.SETUP


def test_mpi4py_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailedError, match=r"no mpi4py here.*pip install mpi4py mpich"):
        run_local(world, num_proc=2, backend="mpi")


def test_an_mpi_library_that_no_launcher_of_its_own_has_started_is_named() -> None:
    def fn() -> str:
        from spark_hvd.transport.mpi import backend

        with pytest.raises(RuntimeError) as caught:
            backend.use(None, 0, 2)
        return str(caught.value)

    with ranks(1, join=False) as world:
        (said,) = world.run(fn)
    assert re.search(r"rank 0 of 2 .* rank 0 of 1 for MPI. mpi4py has loaded MPICH [0-9.]+\. .*mpi='openmpi'", said)
