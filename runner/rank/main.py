"""The rank process: joins the world, runs fn once, reports its outcome, stays until all ranks have ended."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from spark_hvd.runner.channel.frames import STACKS_SIGNAL, recv_frame, send_frame
from spark_hvd.runner.outcome.cause import is_echo
from spark_hvd.runner.outcome.payload import dump_exception, dump_result
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    from spark_hvd.runner.rank.elastic import ElasticRank

_OURS = re.compile(r"spark_hvd\.runner\.|runpy$")
"""Modules whose frames above fn, or above a script, are no part of the user's program."""


def run_rank(control: socket.socket, stacks_fd: int) -> NoReturn:
    """Run one rank and exit; the only caller is the fork server's child.

    Frames in: ``job`` (payload: the pickled call), ``go``. Frames out: ``ready``, ``joined``, ``outcome``.
    """
    frame = recv_frame(control)
    if frame is None:  # the supervisor is gone
        end_process(1)
    job, payload = frame
    # Crashes and STACKS_SIGNAL leave the Python stacks where the supervisor reads them.
    faulthandler.enable(stacks_fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, stacks_fd, all_threads=True)
    world: _Rank | ElasticRank = _elastic_rank(control, job) if job.get("elastic") else _Rank(control, job)
    try:
        value = world.run(payload)
    except SystemExit as left:
        code = _exit_code(left)
        _send_failure(control, "exit", f"fn called sys.exit({left.code!r}) instead of returning", left)
        _linger(world)
        end_process(code)
    except SetupError as error:
        _send_failure(control, "setup", str(error), error.cause)
    except BaseException as error:
        _send_failure(control, "exception", _one_line(error), error)
    else:
        try:
            data = dump_result(value, world.rank)
        except Exception as error:
            _send_failure(control, "result", str(error), None)
        else:
            send_frame(control, {"type": "outcome", "ok": True}, data)
    world.leave()
    _linger(world)
    end_process(0)


class SetupError(Exception):
    """The rank could not get as far as calling fn."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


class _Rank:
    def __init__(self, control: socket.socket, job: dict[str, Any]) -> None:
        self._control = control
        self._job = job
        self.rank: int = job["rank_info"]["rank"]
        self._kv: Any = None
        self._ended_well = False

    def run(self, payload: bytes) -> Any:
        check_torch()
        fn, args, kwargs = unpickle_call(payload)
        if not self._join():
            sys.exit(1)  # the supervisor closed: another rank has failed before we could meet
        from spark_hvd.runner.rank.reporting import Reporting

        reporting = Reporting(lambda vitals: send_frame(self._control, {"type": "vitals", "vitals": vitals}))
        if self._job["watched"]:
            reporting.start()
        try:
            value = call(fn, args, kwargs)
        finally:
            reporting.stop()
        self._ended_well = True
        return value

    def leave(self) -> None:
        """Leave the world as soon as fn has returned: peers that still wait for this rank must hear of it.

        A rank whose fn failed stays until it is killed instead, so that no peer reports its absence as an error.
        """
        if self._ended_well:
            from spark_hvd.context import init as context

            context.shutdown()

    def linger(self) -> None:
        """Stay until the supervisor closes: rank 0 holds the store that others may still use."""
        while recv_frame(self._control) is not None:
            pass

    def _join(self) -> bool:
        """Meet the other ranks in rank 0's store; False when the run was stopped before."""
        from spark_hvd.context import init as context
        from spark_hvd.runner.rank.preflight import SECONDS, UnreachableError, check_hosts, connect
        from spark_hvd.runner.rank.same_mpi import MpiMismatchError, check_same_mpi
        from spark_hvd.transport.kv import TCPStore
        from spark_hvd.world.layout import RankInfo
        from spark_hvd.world.ports import PortRange, listen
        from spark_hvd.world.world import Endpoint, World

        me, ip = RankInfo(**self._job["rank_info"]), self._job["ip"]
        ports = None if self._job["ports"] is None else PortRange.parse(self._job["ports"])
        timeout = timedelta(seconds=self._job["join_timeout"])
        store = None
        if me.rank == 0:
            # The store takes over a socket that is bound already, so the published port cannot be lost to a race,
            # and it listens on this address only.
            listener = listen(ip, ports)
            store = ip, listener.getsockname()[1]
            self._kv = TCPStore(
                *store, me.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        send_frame(self._control, {"type": "ready", "store": store})
        go = recv_frame(self._control)
        if go is None:
            return False
        host, port = go[0]["store"]
        mpi = go[0]["mpi"]
        if mpi is not None:
            os.environ.update(mpi)
            if "PMI_FD" in mpi:
                _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                os.environ["PMI_FD"] = str(fds[0])
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        patience = min(SECONDS, self._job["join_timeout"] / 2)  # less than the supervisor's, so that it is our words
        try:
            if self._kv is None:
                connect(host, port, "the store of rank 0", f"rank {me.rank} on host {me.host} ({ip})", patience)
                self._kv = TCPStore(host, port, me.size, False, timeout)
            check_hosts(me, ip, self._kv, ports if mpi is not None else None, patience)
            if mpi is not None:
                check_same_mpi(me, self._kv)
        except (UnreachableError, MpiMismatchError) as error:
            raise SetupError(str(error), error) from error
        context.join(
            World(
                me,
                Endpoint(host, port),
                self._job["generation"],
                secret=bytes.fromhex(self._job["secret"]),
                ports=ports,
            ),
            self._kv,
            timeout=self._job["collective_timeout"],
            backend=self._settle_gpu(me),
        )
        send_frame(self._control, {"type": "joined"})
        return True

    def _settle_gpu(self, me: RankInfo) -> str | None:
        """Take this rank's GPU, and return the backend that suits those of all ranks."""
        from spark_hvd.runner.rank.gpus import GpuError, GpuShare
        from spark_hvd.runner.rank.own_gpu import settle

        try:
            return settle(me, GpuShare(**self._job["gpus"]), self._kv, self._job["backend"])
        except GpuError as error:
            raise SetupError(str(error), error) from error


def _elastic_rank(control: socket.socket, job: dict[str, Any]) -> ElasticRank:
    try:
        check_torch()
    except SetupError as error:
        _send_failure(control, "setup", str(error), error.cause)
        end_process(1)
    from spark_hvd.runner.rank.elastic import ElasticRank

    return ElasticRank(control, job)


def check_torch() -> None:
    """Import torch, with as many threads as this rank's environment says.

    Raises:
        SetupError: there is none, or it cannot be loaded.
    """
    try:
        import torch
    except Exception as error:  # OSError where a shared library is missing, and others of broken installs
        raise SetupError(
            f"torch cannot be imported by {sys.executable} (Python {sys.version.split()[0]}): {_one_line(error)}. "
            "Install it in that Python on every executor, or point PYSPARK_PYTHON at one that has it.",
            error,
        ) from error
    # The fork server read OMP_NUM_THREADS when it started; this rank's environment may say otherwise.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


def unpickle_call(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Fn with its arguments.

    Raises:
        SetupError: something that it needs is missing here.
    """
    try:
        fn, args, kwargs = pickle.loads(payload)
    except Exception as error:
        raise SetupError(
            f"fn could not be unpickled by {sys.executable} (Python {sys.version.split()[0]}): {_one_line(error)}. "
            "If a module of yours is missing there, ship it with spark-submit --py-files or spark.addArtifact.",
            error,
        ) from error
    return fn, args, kwargs


def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call fn. A process that it forks, and that comes out of it, ends here as a program does: it is not the rank."""
    rank = os.getpid()
    try:
        return fn(*args, **kwargs)
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    if isinstance(error, SystemExit):
        end_process(_exit_code(error))
    if error is not None:
        sys.stderr.write(_format(error))
    end_process(int(error is not None))


def _exit_code(left: SystemExit) -> int:
    """What the process is to end with; prints a text, as Python does."""
    if isinstance(left.code, str):
        print(left.code, file=sys.stderr)
    return left.code if isinstance(left.code, int) else int(left.code is not None)


def _send_failure(control: socket.socket, kind: str, error: str, exception: BaseException | None) -> None:
    text = "" if exception is None else _format(exception)
    send_frame(
        control,
        {
            "type": "outcome",
            "ok": False,
            "kind": kind,
            "error": error,
            "traceback": text,
            "echo": exception is not None and is_echo(exception),
        },
        b"" if exception is None else dump_exception(exception),
    )


def _format(error: BaseException) -> str:
    """The traceback as the user would see it in a program of his own: from fn on, without our frames above it."""
    trace = error.__traceback__
    while trace is not None and _OURS.match(trace.tb_frame.f_globals.get("__name__") or ""):
        trace = trace.tb_next
    if trace is None:
        trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace))


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _linger(world: _Rank | ElasticRank) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    world.linger()


def end_process(code: int) -> NoReturn:
    """End as a forked process does (see multiprocessing): exit handlers run, the torn-down interpreter is spared.

    Taking torch apart object by object costs a third of a second, in which the caller would wait for nothing.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
