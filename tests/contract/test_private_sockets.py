"""Who may reach the Unix sockets on a host: other users and containers may not, and cannot get in the way."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spark_hvd.runner.channel import private_sockets
from spark_hvd.runner.channel.address import Address
from spark_hvd.runner.channel.private_sockets import SocketFolder, is_ours
from spark_hvd.runner.config import PRELOAD
from spark_hvd.runner.supervise import processes
from spark_hvd.runner.supervise.mpi import launcher, mpich
from spark_hvd.runner.supervise.mpi.blame import Blame
from spark_hvd.runner.supervise.mpi.launcher import MpiLauncher, MpiPlan
from spark_hvd.runner.supervise.mpi.manager import SHIM_PROGRAM, manager_env
from spark_hvd.world.layout import WorldLayout
from tests.conftest import wait_until

THIS_PYTHON = processes.Interpreter(sys.executable, os.environ, sys.path)
NOBODY = 65534
STRANGERS = {
    "user": ["setpriv", f"--reuid={NOBODY}", "--clear-groups"],
    "processes": ["unshare", "--pid", "--fork", "--mount-proc"],
    "files": ["unshare", "--mount"],
    "users": ["unshare", "--user", "--map-root-user"],
}
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
LISTEN = """
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1]); s.listen(); print(flush=True)
print(s.accept()[0].recv(1 << 16))
"""
ASK = """
import json, os, socket, struct, sys
os.chdir(os.path.dirname(sys.argv[1]))
s = socket.socket(socket.AF_UNIX); s.connect(os.path.basename(sys.argv[1]))
answer, status = os.pipe()
body = json.dumps({"env": {}, "sys_path": [], "argv": [""], "cwd": "/"}).encode()
try:
    socket.send_fds(s, [struct.pack("!I", len(body))], [status] * 5)
    s.sendall(body)
except OSError:
    pass
os.close(status)
print(os.read(answer, 100))
"""


def program(code: str, *arguments: str, by: list[str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    # The system's Python, which every user can run.
    return subprocess.Popen(
        [*(by or []), os.path.realpath(sys.executable), "-S", "-E", "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        **options,
    )


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest) -> list[str]:
    """A command prefix that runs a command as an untrusted user."""
    by = STRANGERS[request.param]
    try:
        tried = subprocess.run([*by, os.path.realpath(sys.executable), "-S", "-E", "-c", ""], capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"{by[0]} is not installed")
    if tried.returncode:
        pytest.skip(f"not permitted here: {' '.join(by)}: {tried.stderr.decode()}")
    return by


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A directory in which every user may create files."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The places that are searched for socket directories, in this order."""
    found = [tmp_path / name for name in ("first", "second", "third")]
    for path in found:
        path.mkdir()
    monkeypatch.setattr(private_sockets, "_PLACES", (str(found[0]), str(found[1])))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(found[2]))
    without_torch = tmp_path / "without_torch"  # so that fork servers start at once
    without_torch.mkdir()
    for name in ("torch", "pandas"):
        (without_torch / f"{name}.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(without_torch))
    monkeypatch.delenv(PRELOAD, raising=False)
    monkeypatch.setattr(processes, "_start", inspect.unwrap(processes._start))
    return found


def is_end_ours(folder: Path, by: list[str]) -> bool:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        os.chmod(folder / "socket", 0o777)
        listener.listen()
        other = program(CONNECT, str(folder / "socket"), by=by)
        connection, _ = listener.accept()
        with connection:
            ours = is_ours(connection)
    other.communicate(timeout=20)
    return ours


def test_our_own_process_is_known(open_folder: Path) -> None:
    assert is_end_ours(open_folder, [])


def test_a_stranger_is_known(open_folder: Path, stranger: list[str]) -> None:
    assert not is_end_ours(open_folder, stranger)


def test_the_fork_server_forks_nothing_for_strangers(stranger: list[str], places: list[Path]) -> None:
    server = processes.ForkServer(processes._connect({"A": "B"}, os.getpid()))
    server.spawn(dict(os.environ), 60.0).kill()
    path = str(places[0] / f"spark_hvd-{os.geteuid()}" / processes._name(THIS_PYTHON, {"A": "B"}, os.getpid()))
    said, _ = program(ASK, path, by=stranger, stderr=subprocess.DEVNULL).communicate(timeout=20)
    assert b"pid" not in said
    own, _ = program(ASK, path).communicate(timeout=20)
    assert b"pid" in own, "what was tried is what works from here"
    server.close()
    wait_until(lambda: list(places[0].iterdir()) == [])


def test_the_last_rank_has_ended_before_its_fork_server_does(places: list[Path]) -> None:
    server = processes.ForkServer(processes._connect({"A": "B"}, os.getpid()))
    rank = server.spawn(dict(os.environ), 60.0)
    server.close()
    assert os.read(rank.status_fd, 256) == b'{"exitcode": -9}\n'
    rank.close()
    wait_until(lambda: list(places[0].iterdir()) == [])


def test_the_fork_server_survives_what_is_no_request(places: list[Path]) -> None:
    server = processes.ForkServer(processes._connect({"A": "B"}, os.getpid()))
    path = places[0] / f"spark_hvd-{os.geteuid()}"
    for length, fds in itertools.product((0, 1, 9, 1 << 30), (0, 4, 5)):
        with SocketFolder(str(path)) as folder, open(os.devnull) as file:
            (name,) = os.listdir(path)
            odd = folder.connect(name)
            assert odd is not None
            socket.send_fds(odd, [struct.pack("!I", length)], [file.fileno()] * fds)
            with contextlib.suppress(OSError):
                odd.sendall(b"[1, 2, 3]"[:length])
        odd.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert odd.recv(1) == b"", (length, fds)
        odd.close()
        rank = server.spawn(dict(os.environ), 60.0)
        rank.kill()
        rank.close()
    server.close()
    wait_until(lambda: list(places[0].iterdir()) == [])


def test_the_shim_of_mpi_tells_strangers_nothing(open_folder: Path, stranger: list[str]) -> None:
    other = program(LISTEN, str(open_folder / "0"), by=stranger)
    assert other.stdout is not None
    other.stdout.readline()
    os.chmod(open_folder / "0", 0o777)
    env = manager_env(os.environ, str(open_folder)) | {"PMI_RANK": "0", "PMI_SECRET": "x"}
    shim = subprocess.run(SHIM_PROGRAM, env=env, stderr=subprocess.PIPE, text=True, timeout=20)
    assert shim.returncode == 1
    assert f"{open_folder}/0 is another user's, or in another container" in shim.stderr
    assert other.communicate(timeout=20)[0].strip() == b"b''"


def test_supervisors_of_a_host_share_a_directory_that_goes_with_them(places: list[Path]) -> None:
    layout = WorldLayout.from_hosts(["h"] * 3)
    plan = MpiPlan(layout, "mpich", "token", Address("127.0.0.1", None), None)
    link: Any = SimpleNamespace()
    first, second = (MpiLauncher(plan, layout.ranks[rank], link, lambda *_: None) for rank in (1, 2))
    (folder,) = places[0].iterdir()
    assert plan.token not in folder.name, "it is read by everybody"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match=r"rank 1's supervisor cannot listen .* another process listens there: '.*/1'"):
        MpiLauncher(plan, layout.ranks[1], link, lambda *_: None)
    first.close(0)
    second.close(0)
    assert list(places[0].iterdir()) == []


def test_a_proxy_that_the_system_does_not_start_is_named(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = WorldLayout.from_hosts(["h"] * 2)
    plan = MpiPlan(layout, "mpich", "token", Address("127.0.0.1", None), None)
    monkeypatch.setattr(mpich, "host_command", lambda arguments, interface: ["proxy"])
    monkeypatch.setattr(launcher, "guarded", lambda command: ["/no/such/program", *command])
    link: Any = SimpleNamespace()
    failed: list[tuple[str, Blame]] = []
    started = MpiLauncher(plan, layout.ranks[1], link, lambda *why: failed.append(why))
    started.start_proxy([])
    started.close(0)
    ((error, blame),) = failed
    assert error.startswith("MPI's proxy cannot be started on host h: [Errno 2]")
    assert blame is Blame.CAUSE


def test_a_directory_that_is_not_ours_alone_is_passed_over(places: list[Path], tmp_path: Path) -> None:
    (places[0] / "ours").symlink_to(tmp_path)
    (places[1] / "ours").mkdir()
    (places[1] / "ours").chmod(0o770)
    with SocketFolder.named("ours") as folder:
        assert folder.path == str(places[2] / "ours")
    (places[1] / "ours").chmod(0o700)
    with SocketFolder.named("ours") as folder:
        assert folder.path == str(places[1] / "ours")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_where_others_have_taken_every_place_a_run_has_a_fork_server_of_its_own(
    places: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    for place in places:
        taken = place / f"spark_hvd-{os.geteuid()}"
        taken.mkdir(0o700)
        os.chown(taken, NOBODY, NOBODY)
    server = processes.ForkServer(processes._connect({}, os.getpid()))
    rank = server.spawn(dict(os.environ), 60.0)
    program = psutil.Process(psutil.Process(rank.pid).ppid())
    rank.kill()
    rank.close()
    assert f"it is one of user {NOBODY} with mode 0700: remove it" in caplog.text
    server.close()
    wait_until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)


def test_nobody_reads_the_names_of_sockets(places: list[Path]) -> None:
    """A fork server's name is derived from values of variables, so anyone who knows it can guess them."""
    with SocketFolder.named("ours") as folder, folder.listen("a-secret-name") as listener:
        listed = Path("/proc/net/unix").read_text()
        connection = folder.connect("a-secret-name")
        assert connection is not None
        connection.close()
        folder.tidy()
        assert os.listdir(folder.path) == ["a-secret-name"], "it lives"
    assert "/proc/self/fd/" in listed
    assert "a-secret-name" not in listed
    assert listener.fileno() == -1


def test_servers_are_shared_and_leave_nothing(places: list[Path]) -> None:
    """The process that started a server may end before the others arrive; it had Spark's parameters."""
    anchor = program("import time; time.sleep(600)")
    folder = places[0] / f"spark_hvd-{os.geteuid()}"

    def own() -> tuple[processes.ForkServer, psutil.Process]:
        server = processes.ForkServer(processes._connect({}, anchor.pid))
        rank = server.spawn(dict(os.environ), 60.0)
        program = psutil.Process(psutil.Process(rank.pid).ppid())
        rank.kill()
        rank.close()
        return server, program

    starter = os.fork()
    if starter == 0:
        own()
        os._exit(0)
    assert os.waitpid(starter, 0)[1] == 0
    (name,) = os.listdir(folder)
    (first, program_of_first), (second, program_of_second) = own(), own()
    assert program_of_first == program_of_second
    program_of_first.send_signal(signal.SIGKILL)
    wait_until(lambda: not first.alive)
    (folder / "of-another-server").touch()
    third, program_of_third = own()
    assert program_of_third != program_of_first
    assert os.listdir(folder) == [name], "what is dead has been removed"
    anchor.kill()
    anchor.wait()
    wait_until(lambda: not folder.exists())
    for server in (first, second, third):
        server.close()


def test_a_server_s_command_line_tells_nothing_of_its_environment(places: list[Path]) -> None:
    """Every user may read it."""
    anchor = program("import time; time.sleep(600)")
    connection = processes._connect({"PASSWORD": "hunter2"}, anchor.pid)
    name = processes._name(THIS_PYTHON, {"PASSWORD": "hunter2"}, anchor.pid)

    def commands() -> list[list[str]]:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # other servers end meanwhile
                found.append(child.cmdline())  # empty for a moment after the program was executed
        return [command for command in found if str(anchor.pid) in command]

    (command,) = wait_until(commands)
    assert name not in json.dumps(command)
    anchor.kill()
    anchor.wait()
    connection.close()
    wait_until(lambda: list(places[0].iterdir()) == [])
