"""Each supervisor's part in launching MPI.

    rank 0's supervisor      runs mpiexec, which prints a command for each host; the hub passes it to that host
    a host's first           runs the host's proxy, which connects to mpiexec and starts a shim for each rank
    every supervisor         takes its rank's connection from the shim, and at the end sends it the exit code

Supervisors also end these processes: each shim with its rank, then the proxies, then mpiexec.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.private_sockets import SocketFolder, is_ours
from spark_hvd.runner.supervise.mpi import mpich, openmpi
from spark_hvd.runner.supervise.mpi.blame import Blame
from spark_hvd.runner.supervise.mpi.manager import MpiMissingError, ProcessManager, counts_by_host, guarded, manager_env
from spark_hvd.runner.supervise.mpi.shim import LAUNCH
from spark_hvd.world.layout import RankInfo, WorldLayout
from spark_hvd.world.ports import PortRange

SHARED_MEMORY = "/dev/shm"
_SEGMENT = "mpich_shm_"
"""Prefix of MPICH's shared memory. MPICH removes the name only once all ranks of a host have mapped the memory."""
FOLDER = "spark_hvd-mpi-"
"""Prefix of the folders in which the supervisors of a host listen."""


def sweep_segments(since: float, folder: str = SHARED_MEMORY) -> None:
    """Delete shared memory of MPICH that this user made since ``since`` and that no process has open or mapped.

    ``since`` is the beginning of the run, in seconds since the epoch. Errors are ignored, because left-over memory does
    no harm except that it takes room.
    """
    with contextlib.suppress(OSError):
        made = {
            entry.path
            for entry in os.scandir(folder)
            if entry.name.startswith(_SEGMENT)
            and (info := entry.stat(follow_symlinks=False)).st_uid == os.geteuid()
            and info.st_ctime >= since
        }
        if made:
            for path in made - _in_use():
                os.unlink(path)


def sweep_folders(place: str) -> None:
    """Delete this user's folders in which no supervisor listens any longer."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(FOLDER) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError), SocketFolder(entry.path) as left:
                    left.tidy()


def _in_use() -> set[str]:
    """Return the files that this user's processes have mapped or open."""
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            with open(f"/proc/{pid}/maps") as maps:
                found.update(line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


MANAGERS: dict[str, ProcessManager] = {"mpich": mpich, "openmpi": openmpi}

_END_SECONDS = 2.0
_SHIM_SECONDS = 10.0  # for a shim that has connected to send its variables
_LINES_KEPT = 40


@dataclass(frozen=True, slots=True)
class MpiPlan:
    """How MPI starts in a run.

    ``token`` is a secret from which the name of the directory is made in which a host's supervisors listen, so that
    nobody else can create that directory first.
    """

    layout: WorldLayout
    kind: str
    token: str = field(repr=False)
    address: Address
    ports: PortRange | None

    @property
    def manager(self) -> ProcessManager:
        """The process manager of this MPI."""
        return MANAGERS[self.kind]

    @property
    def folder(self) -> str:
        """The name of the directory in which this host's supervisors listen."""
        return f"{FOLDER}{hashlib.sha256(self.token.encode()).hexdigest()[:24]}"


class MpiLauncher:
    """One supervisor's part in launching MPI. The supervisor polls its files, and everything runs in its thread.

    ``on_failed`` is called if MPI cannot start or continue, with the reason, and how likely that is the cause.

    Raises:
        MpiMissingError: The programs of MPI are not installed here.
        OSError: There is no place to listen for the shims, or mpiexec cannot be started.
    """

    def __init__(self, plan: MpiPlan, me: RankInfo, link: Link, on_failed: Callable[[str, Blame], None]) -> None:
        self.handlers: dict[int, Callable[[], None]] = {}
        """The function to call when a file descriptor can be read."""
        self.variables: dict[str, str] | None = None
        """The variables that MPI_Init needs in the rank, except PMI_FD; None until the rank's shim has sent them."""
        self._plan, self._me, self._link, self._on_failed = plan, me, link, on_failed
        self._fds: list[int] = []
        self._shim: socket.socket | None = None
        self._programs: list[_Program] = []
        self._launched = False
        self._began = time.time()
        try:
            with SocketFolder.named(plan.folder) as folder:
                self._folder = folder.path
                self._listener = folder.listen(str(me.rank), socket.SOCK_SEQPACKET)
            sweep_folders(os.path.dirname(self._folder))  # supervisors that were killed leave some
        except OSError as error:
            raise OSError(f"rank {me.rank}'s supervisor cannot listen for MPI's process manager: {error}") from error
        self.handlers[self._listener.fileno()] = self._take_shim
        try:
            if me.rank == 0:
                command = plan.manager.manager_command(plan.layout, plan.address, plan.ports)
                self._start("mpiexec", command, self._on_launch_line)
        except (MpiMissingError, OSError):
            self.close(1)
            raise

    def start_proxy(self, arguments: Sequence[str]) -> None:
        """Run this host's proxy with the arguments that mpiexec has printed."""
        plan = self._plan
        try:
            command = plan.manager.host_command(arguments, plan.address.interface)
            self._start("MPI's proxy", command, lambda _: None)
        except MpiMissingError as error:
            self._on_failed(str(error), Blame.CAUSE)
        except OSError as error:
            self._on_failed(f"MPI's proxy cannot be started on host {self._me.host}: {error}", Blame.CAUSE)

    def send_fds(self, rank: socket.socket) -> None:
        """Send the rank its connection to the process manager; the variables must have been sent before."""
        if self._fds:
            socket.send_fds(rank, [b"\0"], self._fds)
            self._close_fds()

    def close(self, exit_code: int) -> None:
        """End the process manager's processes on this host, after the rank has ended."""
        self._listener.close()
        with contextlib.suppress(OSError), SocketFolder(self._folder) as folder:
            folder.tidy()
        if self._shim is not None:
            with contextlib.suppress(OSError):
                self._shim.send(str(exit_code).encode())
            self._shim.close()
        self._close_fds()
        for program in reversed(self._programs):  # the proxy before mpiexec, which waits for it
            program.end()
        sweep_segments(self._began)  # memory that other ranks still use stays until the last of them ends
        self.handlers.clear()

    def _start(self, name: str, command: Sequence[str], on_line: Callable[[list[str]], None]) -> None:
        env = manager_env(os.environ, self._folder)
        program = _Program(name, guarded(command), env)
        self._programs.append(program)

        def read() -> None:
            if program.read():
                on_line(program.lines)
            else:
                del self.handlers[program.fd]
                self._on_failed(f"{name} on host {self._me.host} {program.ending()}", program.blame)

        self.handlers[program.fd] = read

    def _on_launch_line(self, lines: Sequence[str]) -> None:
        hosts = counts_by_host(self._plan.layout)
        proxies = None if self._launched else self._plan.manager.read_launch(lines, len(hosts))
        if proxies is None:
            return
        self._launched = True
        for (first, _), arguments in zip(hosts, proxies, strict=True):
            self._link.send("relay", to=first, body={"type": "proxy", "arguments": arguments})

    def _take_shim(self) -> None:
        shim, _ = self._listener.accept()
        if not is_ours(shim) or self._shim is not None:
            shim.close()
            return
        shim.settimeout(_SHIM_SECONDS)
        try:
            text, self._fds, _, _ = socket.recv_fds(shim, 1 << 16, 1)
            self.variables = json.loads(text)
        except (OSError, ValueError):  # not a shim: those send everything in one message
            self._close_fds()
            shim.close()
            return
        self._shim = shim
        self.handlers[shim.fileno()] = self._shim_ended

    def _shim_ended(self) -> None:
        assert self._shim is not None
        del self.handlers[self._shim.fileno()]
        # The manager kills all shims when one rank has ended; that rank's own supervisor reports the cause.
        self._on_failed("MPI's process manager has ended this rank's part", Blame.FOLLOWED)

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class _Program:
    """Runs mpiexec or a proxy."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdout is not None
        self.fd = self._process.stdout.fileno()
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT) if name != "mpiexec" else deque()

    @property
    def lines(self) -> list[str]:
        """The lines that the program has printed."""
        return list(self._lines)

    @property
    def blame(self) -> Blame:
        """How likely its end is the cause of a failure; it exits with 0 even if a rank has died elsewhere."""
        code = self._process.poll()
        if code == 0:
            return Blame.FOLLOWED
        return Blame.CAUSE if code is not None and code < 0 else Blame.FAILED

    def read(self) -> bool:
        """Read the program's output, and return False once it has ended."""
        data = os.read(self.fd, 1 << 16)
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(line.decode(errors="replace") for line in whole)
        return bool(data)

    def ending(self) -> str:
        """Say how the program ended and what it printed last."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        printed = [line for line in self.lines if not line.startswith(("HYDRA_LAUNCH", LAUNCH))][-5:]
        return how + (f": {' / '.join(printed)}" if printed else "")

    def end(self) -> None:
        """Wait two seconds for the program to end, then kill it; it ignores SIGTERM."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
