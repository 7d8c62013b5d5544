"""Rank processes for tests of the core, without the runner. They join over a TCPStore, or MPI starts them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Listener, Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle

from tests.forked import fork

SECONDS = 60.0


def wait_until(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Poll ``condition`` until it is true. Fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = f"not true within {timeout} s: {condition}"
            # pytest's own is no Exception: the code under test does not catch it. Most ranks have no pytest.
            raise sys.modules["pytest"].fail.Exception(text) if "pytest" in sys.modules else AssertionError(text)
        time.sleep(0.02)
    return value


def left_in(folder: str, before: set[str]) -> set[str]:
    """Return the new files that stay in a folder. Tests in other processes may briefly have some there."""
    left, deadline = {*os.listdir(folder)} - before, time.monotonic() + 10
    while left := {name for name in left if os.path.isfile(os.path.join(folder, name))}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


class RankError(AssertionError):
    """Ranks raised errors. The text has the traceback of each."""


class Ranks:
    """A world of real processes that stays up between calls.

    Functions are pickled by value if their module is registered with cloudpickle.register_pickle_by_value.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout: float = SECONDS,
        join: bool = True,
        hosts: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        """Fork the processes from a server that has loaded torch, in a tenth of a second instead of seconds.

        They have the environment that the first world found, and end without their exit handlers.

        Args:
            size: Size of the world.
            timeout: Seconds until a collective fails, and until a call of run() does.
            join: Whether the ranks join a world of spark_hvd at the start. Otherwise they only have the environment.
            hosts: The host name of each rank, equal for ranks of one host; by default the same for all.
            preload: Modules that take seconds to import, and that the ranks have loaded.
        """
        self.size = size
        self._timeout = timeout
        listener = socket.create_server(("127.0.0.1", 0 if join else quiet_port()))
        port = listener.getsockname()[1]
        if not join:
            listener.close()
        calls, self._pipes = [], []
        for rank in range(size):
            ours, theirs = Pipe()
            given = listener if join and rank == 0 else None
            calls.append((rank, size, port, given, join, timeout, hosts, theirs))
            self._pipes.append(ours)
        self.processes = start_ranks(_serve, calls, preload)
        listener.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(*args) on every rank, and return the results in rank order.

        Raises:
            RankError: A rank raised an error, ended, or took too long.
        """
        outcomes = self.outcomes(fn, *args)
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Do the same as run(), but return a rank's failure as (False, traceback) in the list."""
        call = cloudpickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return [self._outcome(rank) for rank in range(self.size)]

    def _outcome(self, rank: int) -> tuple[bool, Any]:
        try:
            if not self._pipes[rank].poll(self._timeout + 10):
                return False, f"no answer after {self._timeout + 10} s"
            answer: tuple[bool, Any] = cloudpickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, f"ended with exit code {self._exit_code(rank)}"
        return answer

    def _exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(5)
        return self.processes[rank].exitcode

    def close(self) -> None:
        """End the processes, by force if a rank hangs."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


class MpiRanks(Ranks):
    """The same as Ranks, but started by mpiexec. A world that they join uses MPI."""

    def __init__(
        self, size: int, *, timeout: float = SECONDS, join: bool = True, options: tuple[str, ...] = (), **env: str
    ) -> None:
        """Start the processes.

        Args:
            size: Size of the world.
            timeout: Seconds until a collective fails, and until a call of run() does.
            join: Whether the ranks join a world of spark_hvd at the start.
            options: More options of mpiexec.
            env: More environment variables.
        """
        self.size = size
        self._timeout = timeout
        with tempfile.TemporaryDirectory(prefix="spark_hvd-mpi") as folder, Listener(f"{folder}/socket") as listener:
            program = [sys.executable, "-m", "tests.mpi_rank", str(listener.address), str(timeout), str(int(join))]
            self.mpiexec = mpiexec(size, *program, options=options, **env)
            connections = {}
            for _ in range(size):
                connection = listener.accept()
                connections[connection.recv()] = connection
        self._pipes = [connections[rank] for rank in range(size)]

    def _exit_code(self, rank: int) -> int | None:
        return self.mpiexec.wait(10)

    def close(self) -> None:
        """End the processes, by force if a rank hangs."""
        for pipe in self._pipes:
            pipe.close()
        try:
            self.mpiexec.wait(10)
        except subprocess.TimeoutExpired:
            self.mpiexec.terminate()
            self.mpiexec.wait(10)


class LastingWorld:
    """Ranks that serve many tests. They start when first needed; a test that fails costs them their life.

    ``begin`` is called on each rank that starts. The options are those of :class:`Ranks`.
    """

    def __init__(self, size: int, begin: Callable[[], object] | None = None, **options: Any) -> None:
        self.size = size
        self._begin, self._options = begin, options
        self._ranks: Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(*args) on every rank; results in rank order."""
        if self._ranks is None:
            self._ranks = Ranks(self.size, **self._options)
            if self._begin is not None:
                self._ranks.run(self._begin)
        try:
            return self._ranks.run(fn, *args)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            for process in self._ranks.processes:
                process.kill()  # they may wait for one another, and have answers left to give
            self._ranks.close()
            self._ranks = None


def mpiexec(size: int, *program: str, options: tuple[str, ...] = (), **settings: Any) -> subprocess.Popen[str]:
    """Start a program with MPICH's mpiexec, on loopback.

    Args:
        size: Number of processes.
        program: Command and arguments.
        options: More options of mpiexec.
        settings: Environment variables, if in capitals; otherwise arguments of Popen.
    """
    root = str(Path(__file__).resolve().parents[1])
    env = {name: settings.pop(name) for name in list(settings) if name.isupper()}
    command = str(Path(sys.executable).with_name("mpiexec.hydra"))
    return subprocess.Popen(
        [command, "-iface", "lo", *options, "-n", str(size), *program],
        env={**os.environ, "PYTHONPATH": root, **env},
        cwd=root,
        text=True,
        **settings,
    )


def start_ranks(
    serve: Callable[..., None], calls: Sequence[tuple[Any, ...]], preload: Sequence[str] = ()
) -> list[ForkServerProcess]:
    """Start a process for each call of ``serve``.

    Args:
        serve: The function that ranks run; it must belong to a module.
        calls: Arguments of each call. Their sockets and pipes are closed here.
        preload: Modules that the processes have loaded; see :func:`tests.forked.fork`.
    """
    processes = [fork(serve, *call, preload=preload) for call in calls]
    for call in calls:
        _close_all(call)
    return processes


def _close_all(call: tuple[Any, ...]) -> None:
    for each in call:
        if isinstance(each, (Connection, socket.socket)):
            each.close()


def quiet_port() -> int:
    # Rank 0 binds it seconds later, so it must lie below the range from which the kernel serves everyone else.
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port among 100")


@contextlib.contextmanager
def ranks(size: int, *, mpi: bool = False, **options: Any) -> Iterator[Ranks]:
    """Run rank processes for the duration of a with statement; see :class:`Ranks` and :class:`MpiRanks`."""
    world = MpiRanks(size, **options) if mpi else Ranks(size, **options)
    try:
        yield world
    finally:
        world.close()


def _serve(
    rank: int,
    size: int,
    port: int,
    listener: socket.socket | None,
    join: bool,
    timeout: float,
    hosts: Sequence[str],
    pipe: Connection,
) -> None:
    launch = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if join:
        _join(rank, size, port, listener, timeout, hosts or ["127.0.0.1"] * size)
    else:
        os.environ.update({name: str(value) for name, value in launch.items()})
    serve(pipe)


def serve(pipe: Connection) -> None:
    """Run the functions that come over a pipe until it is closed."""
    while True:
        try:
            fn, args = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, fn(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))


def _join(
    rank: int, size: int, port: int, listener: socket.socket | None, timeout: float, hosts: Sequence[str]
) -> None:
    from spark_hvd.context import init as context
    from spark_hvd.transport.torch_private import TCPStore
    from spark_hvd.world.layout import Endpoint, World, WorldLayout

    fd = listener.detach() if listener is not None else None
    kv = TCPStore(
        "127.0.0.1", port, size, rank == 0, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=fd
    )
    me = WorldLayout.from_hosts(hosts).of_process(rank)
    # NCCL refuses ranks that share a GPU.
    backend = "gloo" if os.environ.get("SPARK_HVD_TEST_DEVICE") == "cuda" else None
    context.join(World(me, Endpoint("127.0.0.1", port)), kv, timeout=timeout, backend=backend)
