"""The parts of MPI that need no MPI: backoff, variables of process managers, and messages without mpi4py."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spark_hvd.runner.channel.private_sockets import SocketFolder
from spark_hvd.runner.supervise.mpi.launcher import sweep_folders, sweep_segments
from spark_hvd.transport.mpi.backoff import PollingBackoff
from spark_hvd.transport.mpi.start import is_mpi_communicator
from spark_hvd.world.env import MpiEnv, read_mpi_cuda, read_mpi_env


def test_backoff_asks_at_once_while_bytes_move() -> None:
    backoff = PollingBackoff()
    now = 100.0
    for _ in range(1000):  # ten seconds of calls that take a millisecond each
        assert backoff.after(now, now + 1e-3) == 0.0
        now += 1e-2


def test_backoff_of_a_waiter() -> None:
    backoff = PollingBackoff()
    now, pauses = 100.0, []
    while now < 100.2:
        pauses.append((now - 100.0, backoff.after(now, now + 1e-6)))
        now += 1e-6 + pauses[-1][1]
    spinning = [at for at, pause in pauses if pause == 0.0]
    assert 2e-4 < max(spinning) < 5e-4  # a small collective ends before the first sleep
    sleeps = [pause for _, pause in pauses if pause > 0.0]
    assert sleeps == sorted(sleeps)
    assert (sleeps[0], sleeps[-1]) == (pytest.approx(2e-5), pytest.approx(1e-3))
    # it is awake again as soon as something moves
    assert backoff.after(now, now + 1e-4) == 0.0
    assert backoff.after(now + 1e-4, now + 1.01e-4) == 0.0


def test_backoff_without_patience() -> None:
    backoff = PollingBackoff(patience=0.0)
    assert backoff.after(5.0, 5.000_001) > 0.0
    assert backoff.after(6.0, 6.001) == 0.0
    assert backoff.after(6.001, 6.001_001) > 0.0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, MpiEnv(1, 4, None)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
            MpiEnv(0, 2, "10.0.0.1"),
        ),
        ({"PMI_RANK": "0"}, None),  # not from a process manager that counts
    ],
)
def test_process_managers(env: dict[str, str], expected: MpiEnv | None) -> None:
    assert read_mpi_env(env) == expected


def test_a_rank_out_of_range() -> None:
    with pytest.raises(ValueError, match="PMI_RANK='4' in the environment is not a whole number from 0 to 3"):
        read_mpi_env({"PMI_RANK": "4", "PMI_SIZE": "4"})


def test_cuda_can_be_told() -> None:
    assert read_mpi_cuda({}) is None
    assert read_mpi_cuda({"SPARK_HVD_MPI_CUDA": "1"}) is True
    assert read_mpi_cuda({"SPARK_HVD_MPI_CUDA": "0"}) is False


def test_nothing_is_an_mpi_communicator_without_mpi4py() -> None:
    assert not is_mpi_communicator([0, 1])
    assert not is_mpi_communicator(None)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "spark_hvd.transport.mpi.library", raising=False)
    with pytest.raises(ImportError, match="pip install mpi4py mpich"):
        importlib.import_module("spark_hvd.transport.mpi.library")


HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 4096)
print("held", flush=True)
sys.stdin.read()
"""


def test_shared_memory_that_nobody_uses_goes(tmp_path: Path) -> None:
    old, mine, used, other = (tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2", "mpich_shm_3", "others"))
    old.write_bytes(bytes(4096))
    since = old.stat().st_ctime + 1e-6
    while mine.write_bytes(bytes(4096)) and mine.stat().st_ctime < since:
        pass
    for path in (used, other):
        path.write_bytes(bytes(4096))
    command = [sys.executable, "-c", HOLDER, str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        sweep_segments(since, str(tmp_path))
        assert {*tmp_path.iterdir()} == {old, used, other}
        holder.communicate()
    sweep_segments(since, str(tmp_path))
    assert {*tmp_path.iterdir()} == {old, other}


def test_folders_of_supervisors_that_were_killed_go(tmp_path: Path) -> None:
    with SocketFolder(str(tmp_path / "spark_hvd-mpi-dead")) as folder:
        folder.listen("0", socket.SOCK_SEQPACKET).close()
    with SocketFolder(str(tmp_path / "spark_hvd-mpi-live")) as folder:
        listener = folder.listen("0", socket.SOCK_SEQPACKET)
    with listener:
        sweep_folders(str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["spark_hvd-mpi-live"]
