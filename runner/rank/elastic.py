"""The process of an elastic rank: runs fn once, and takes it from world to world as its agent says.

A second thread listens to the agent. It is the only one that reads, because it must be able to end collectives in which
the training thread waits for a lost rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import MutableMapping
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

from spark_hvd.context import init as context
from spark_hvd.context import leave
from spark_hvd.context.global_state import global_state, refuse_fork
from spark_hvd.elastic.kv import reach_store
from spark_hvd.runner.channel.frames import NOTICES, recv_frame, send_frame
from spark_hvd.runner.rank.gpus import GpuError
from spark_hvd.runner.rank.own_gpu import settle, take
from spark_hvd.runner.rank.process import RandomState, SetupFailure, call, end_process, unpickle_call
from spark_hvd.runner.rank.reporting import VitalsSender
from spark_hvd.runner.rank.spec import RankSpec
from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.transport.torch_private import TCPStore
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.launcher import ElasticLauncher
from spark_hvd.world.layout import Endpoint, RankInfo, World
from spark_hvd.world.ports import listen


def outlive_nccl(env: MutableMapping[str, str]) -> None:
    """Let torch abort NCCL's communicators, rather than this process, when a peer is lost; a user's setting wins.

    By default, torch's watchdog ends the process (SIGABRT), perhaps before the agent has reported the loss. The
    surviving ranks would then end with the lost one.
    """
    if "NCCL_ASYNC_ERROR_HANDLING" not in env:  # torch's old name for the variable
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


class ElasticRank(ElasticLauncher):
    """An elastic rank, which is the launcher that ``hvd.elastic`` calls."""

    def __init__(self, control: socket.socket, spec: RankSpec) -> None:
        self._control = control
        self._spec = spec
        self._sending = threading.Lock()  # the threads that train and that report must not mix their frames
        # Guards the attributes below, which the listener sets and the training thread waits for.
        self._changed = threading.Condition()
        self._me = spec.me
        self._generation = -1
        self._assigned: dict[str, Any] | None = None
        self._store: tuple[str, int] | None = None  # the address of rank 0's store, where all ranks meet
        self._kv: Any = None
        self.world_failure: str | None = None
        self.update_wanted = self._finish = self._dismissed = self._closed = self._silent = False
        self._reporting: VitalsSender | None = None
        self._pid = os.getpid()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listener = threading.Thread(target=self._listen, name="spark_hvd-agent", daemon=True)

    @property
    def rank(self) -> int:
        """This rank's number in its last generation; before the first, its initial number."""
        return self._me.rank

    def run(self, payload: bytes | memoryview) -> Any:
        """Call fn, and return what it returns."""
        outlive_nccl(os.environ)
        fn, args, kwargs = unpickle_call(payload, RandomState(self._spec.seed, self._spec.stream))
        try:
            take(self._local(self._me), self._spec.gpus)
        except GpuError as error:
            raise SetupFailure(str(error), error) from error
        context.expect(self._me)
        elastic_launcher.install(self)
        self._listener.start()
        for signum in NOTICES:
            signal.signal(signum, self._notice)
        self._reporting = reporting = VitalsSender(self._send)
        reporting.start()
        try:
            return call(fn, args, kwargs)
        finally:
            reporting.stop()
            with self._sending:
                self._silent = True  # the next frame must be the outcome

    def leave(self) -> None:
        """Leave the last world."""
        leave.shutdown()

    def linger(self) -> None:
        """Wait until the agent has taken the outcome."""
        self._listener.join()

    # ---- calls by hvd.elastic -------------------------------------------------------------------------------------

    def enter(self) -> None:
        self._send("entered")
        with self._changed:
            self._changed.wait_for(lambda: self._assigned is not None or self._dismissed or self._closed)
            if self._assigned is None:
                end_process(0)
            assigned, self._assigned = self._assigned, None
        me, generation = self._me, assigned["generation"]
        ports = self._spec.ports
        seconds = self._spec.join_timeout / 2
        self._kv, store = None, None
        if me.rank == 0:
            listener = listen(self._spec.ip, ports)
            store = self._spec.ip, listener.getsockname()[1]
            self._kv = TCPStore(
                *store, None, True, timedelta(seconds=seconds), False, master_listen_fd=listener.detach()
            )
        self._send("ready", generation=generation, store=store)
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self.world_failure is not None or self._closed)
            if self._store is None:
                raise CollectiveError(f"generation {generation} ended before its ranks had met: {self.world_failure}")
            host, port = self._store
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        try:
            self._meet(me, World(me, Endpoint(host, port), generation, self._spec.secret, ports), seconds)
        except CollectiveError as error:
            if self.world_failure is None:  # nobody else knows yet that the generation has failed
                self.broken(str(error))
            raise
        # LOCAL_RANK stays the same, because other libraries choose the GPU by it.
        os.environ |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.size), "LOCAL_WORLD_SIZE": str(me.local_size)}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(generation)
        self._send("joined", generation=generation)

    def _meet(self, me: RankInfo, world: World, seconds: float) -> None:
        assert world.endpoint is not None
        if self._kv is None:
            self._kv = reach_store(world.endpoint, world.generation, seconds)
        registry = ConnectionRegistry(world.generation, world.endpoint, me.size)
        with global_state.register_connections(registry).establishing():
            backend = settle(me, self._spec.gpus, self._kv, self._spec.backend, self._local(me))
        context.join(world, self._kv, timeout=self._spec.collective_timeout, backend=backend)

    def broken(self, error: str) -> None:
        self._send("broken", generation=self._generation, error=error)

    def yielded(self) -> None:
        self._send("yielded", generation=self._generation)

    def committed(self, commits: int) -> None:
        self._send("committed", commits=commits)

    def finished(self) -> bool:
        if os.getpid() != self._pid:
            return True  # fn has forked this process, which the agent does not know
        self._send("finished", generation=self._generation)
        with self._changed:
            self._changed.wait_for(lambda: self._finish or self.world_failure is not None or self._closed)
            return self._finish

    # ---- the agent ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake[0], select.POLLIN)
        while not self._closed:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake[0] in ready:
                name = signal.Signals(os.read(self._wake[0], 1)[0]).name
                self._send("leaving", why=f"{name} to the rank")
            if self._control.fileno() in ready:
                frame = recv_frame(self._control)
                with self._changed:
                    if frame is None:
                        self._closed, self.world_failure = True, "the agent of this rank is gone"
                    else:
                        self._take(frame[0])
                    self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "profile":
            if self._reporting is not None:
                self._reporting.profiler.ask(message["number"], message["steps"])
        elif kind == "dismiss":
            self._dismissed = True
        elif kind == "assign":
            self._me, self._generation = RankInfo(**message["place"]), message["generation"]
            self._assigned, self._store, self.world_failure = message, None, None
            self.update_wanted = self._finish = False
        elif message["generation"] != self._generation:
            return
        elif kind == "go":
            self._store = (message["store"][0], message["store"][1])
        elif kind == "update":
            self.update_wanted = True
        elif kind == "finish":
            self._finish = True
        elif kind == "reset":
            self.world_failure = message["why"]
            leave.abort(message["why"], self._generation)

    def _notice(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal that announces the end of this machine: only wake the listener, which reports it."""
        if os.getpid() == self._pid:
            os.write(self._wake[1], bytes([signum]))
        else:  # the signal is for a process that fn has forked
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _send(self, kind: str, **fields: Any) -> None:
        refuse_fork()
        with contextlib.suppress(OSError), self._sending:  # if the agent is gone, this process will be killed
            if not self._silent:
                send_frame(self._control, {"type": kind, **fields})

    def _local(self, me: RankInfo) -> RankInfo:
        """Return the place with the agent's slot as local rank, so that the GPU stays the same in every generation."""
        slot = self._spec.slot
        assert slot is not None
        return replace(me, local_rank=slot, local_size=max(me.local_size, slot + 1))
