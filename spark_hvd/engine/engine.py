"""The engine: one background thread per process that runs the queues of all its process sets.

It sleeps until a message or a call arrives; it never polls. User threads hand it functions to run (`call`). Queues and
coordinators live on it. It starts collectives and never waits for them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

import zmq

from spark_hvd.collectives.members import Members
from spark_hvd.collectives.messages import Decision
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.engine.channel import CLOSE_GRACE_SECONDS, CoordinatorSockets, MemberSockets
from spark_hvd.engine.curve import Keys, ZapAuthenticator
from spark_hvd.engine.links import CoordinatorLink, LoneLink, MemberLink
from spark_hvd.engine.service import Coordination
from spark_hvd.engine.timeline import WorldTimeline
from spark_hvd.transport.torch_private import Store
from spark_hvd.world.config import Config
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.ports import PortRange

T = TypeVar("T")
_log = logging.getLogger("spark_hvd")

_CONNECT_SECONDS = 30.0
_GATHER_SECONDS = 0.001
"""How long calls that nobody waits for are collected, so that they are fused."""
_LOOK_SECONDS = 0.1
"""How often a thread that waits for the engine checks whether it still runs."""
_CONTEXT_SECONDS = 1.5
"""How long closing waits for the last messages to leave; each has a second."""


class Engine:
    """Runs the queues of this process; the thread starts with the first queue that needs it.

    ``secret`` is the world's; None: the launcher made none. ``address`` returns this host's address on the network of
    the ranks. Coordinators may listen on ``ports``; None: any.
    """

    def __init__(
        self, config: Config, secret: bytes | None, address: Callable[[], str], ports: PortRange | None = None
    ) -> None:
        self.config = config
        self.tracing = Tracing(self.wake)
        self.timeline = WorldTimeline(self.tracing, self._on_thread, self._tell_all)
        self.decided = self.timeline.decided
        self._secret = secret
        self._address = address
        self._ports = ports
        self._calls: deque[Callable[[], None]] = deque()
        self._members: list[MemberLink] = []
        self._coordinations: list[Coordination] = []
        self._later: list[tuple[float, NegotiatedQueue, Callable[[], float | None]]] = []
        self._to_gather = False
        self._gathered_at: float | None = None
        self._closing = False
        self._aborted: str | None = None
        self._failed: str | None = None
        self._thread: threading.Thread | None = None
        self._awake = threading.Lock()
        self._stopped = threading.Event()

    def open_queue(self, members: Members, kv: Store) -> NegotiatedQueue:
        """Open a process set's queue; every member must do so. Only this queue uses the keys of ``kv``.

        Raises:
            CollectiveError: The coordinator cannot be reached.
        """
        if len(members.ranks) == 1:
            alone = LoneLink()
            queue = NegotiatedQueue(members, alone, self.tracing, self.config.fusion_threshold, self.config.is_horovod)
            alone.coordination = Coordination(queue, self.config, None)
            return queue
        self._start()
        return self._open_coordinator(members, kv) if members.place == 0 else self._open_member(members, kv)

    def _open_coordinator(self, members: Members, kv: Store) -> NegotiatedQueue:
        secret = self._secret or secrets.token_bytes(32)
        keys = Keys.of(secret)
        link = CoordinatorLink(self)
        queue = NegotiatedQueue(members, link, self.tracing, self.config.fusion_threshold, self.config.is_horovod)

        def listen() -> list[str]:
            self._authenticator.allow(keys.member_public)
            sockets = CoordinatorSockets(self._context, self._address(), keys, self._ports)
            link.coordination = Coordination(queue, self.config, sockets)
            link.coordination.on_message = self.timeline.heard
            self._coordinations.append(link.coordination)
            self._register(sockets.requests, link.coordination.read_requests)
            self._register(sockets.decisions, link.coordination.read_presence)
            if self._aborted is not None:
                link.coordination.complete.set()
            return sockets.endpoints

        endpoints = self.ask(listen)
        facts = {
            "endpoints": endpoints,
            "fusion_threshold": self.config.fusion_threshold,
            # Without a secret from the launcher, we trust the key-value store as torch does.
            "secret": None if self._secret else secret.hex(),
        }
        kv.set("coordinator", json.dumps(facts))
        # If the coordinator left before the members connect, they would search for it until their timeout.
        complete = link.coordination.complete.wait(_CONNECT_SECONDS)
        if not complete or self._aborted is not None:
            text = self._aborted or link.coordination.absent_text(_CONNECT_SECONDS)
            self.close_queue(queue, text)
            raise CollectiveError(text)
        return queue

    def _open_member(self, members: Members, kv: Store) -> NegotiatedQueue:
        facts = json.loads(kv.get("coordinator"))
        keys = Keys.of(self._secret or bytes.fromhex(facts["secret"]))
        sockets = MemberSockets(self._context, facts["endpoints"], members.place, keys, _CONNECT_SECONDS)
        member = MemberLink(self, sockets, members.place)
        member.queue = NegotiatedQueue(members, member, self.tracing, facts["fusion_threshold"], self.config.is_horovod)

        def attend() -> None:
            self._members.append(member)
            self._register(sockets.decisions, member.read)
            self._register(sockets.losses, member.read_losses)

        self.ask(attend)  # so that close() finds it
        member.send("hello")
        return member.queue

    def close_queue(self, queue: NegotiatedQueue, text: str, deadline: float | None = None) -> None:
        """Leave a queue; its unfinished collectives fail with this text, here and on the other members."""
        if len(queue.ranks) == 1:
            queue.gone(text)
        elif self._serves:
            self.ask(lambda: self._close(queue, text, deadline))

    def tune(self, config: Config) -> None:
        """Apply other values, for all ranks of the queues that this rank coordinates."""
        self.config = config
        for coordination in list(self._coordinations):
            self.call(partial(coordination.tune, config))

    # ---- other threads --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the engine's thread; from any thread."""
        # A wake-up that is still pending serves this one too.
        if self._awake.acquire(blocking=False):
            with contextlib.suppress(OSError):
                os.write(self._wake_pipe[1], b"\0")

    def gather(self) -> None:
        """Send calls that nobody waits for yet, after a moment, with those that follow; from any thread."""
        self._to_gather = True
        self.wake()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread soon, without waiting for it."""
        self._calls.append(function)
        self.wake()

    def ask(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, and return its result or raise its error.

        Raises:
            CollectiveError: The engine has failed.
        """
        answer: futures.Future[T] = futures.Future()

        def answering() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self.call(answering)
        while not futures.wait([answer], _LOOK_SECONDS).done:
            if not self._serves and not answer.done():
                raise CollectiveError(self._failed or "the engine of the named collectives has ended.")
        return answer.result()

    def _on_thread(self, function: Callable[[], None]) -> None:
        if self._serves:
            self.ask(function)
        else:
            function()

    def _tell_all(self, decision: Decision) -> None:
        if self._coordinations:  # the first is the world's
            self._coordinations[0].tell([decision])

    def abort(self, text: str) -> None:
        """Fail everything in flight on all queues of this process; they start nothing more. From any thread."""
        self._aborted = text

        def fail() -> None:
            for coordination in self._coordinations:
                coordination.queue.aborted(text)
                coordination.complete.set()
            for member in self._members:
                member.queue.aborted(text)

        if self._thread is not None:
            self.call(fail)

    def close(self, text: str) -> None:
        """Leave all queues and end the thread; unfinished collectives fail with this text."""
        with contextlib.suppress(OSError, CollectiveError):
            self.timeline.stop()
        if self._thread is None:
            return
        with contextlib.suppress(CollectiveError):  # the engine has failed
            self._leave_queues(text)
        while self._serves:
            self._stopped.wait(_LOOK_SECONDS)
        self._thread.join(_CONTEXT_SECONDS)
        self._thread = None
        self._awake.acquire(blocking=False)  # a late callback must not write to whatever reuses the pipe's descriptor
        for fd in self._wake_pipe:
            os.close(fd)

    def _leave_queues(self, text: str) -> None:
        self.timeline.leave()
        # One deadline for all queues: they wait for the same ranks.
        deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        for queue in [member.queue for member in self._members] + [each.queue for each in self._coordinations]:
            self.close_queue(queue, text, deadline)

        def end() -> None:
            self._closing = True

        self.call(end)

    @property
    def _serves(self) -> bool:
        """Whether the thread runs. A forked process has none."""
        return self._thread is not None and self._thread.is_alive() and not self._stopped.is_set()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._failed is not None:
            raise CollectiveError(self._failed)
        if self._thread is not None:
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ZapAuthenticator(self._context)
        self._wake_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._register(self._wake_pipe[0], self._woken)
        self._register(self._authenticator.socket, self._authenticator.handle_requests)
        self._thread = threading.Thread(target=self._serve, name="spark_hvd-engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._run_once()
        except BaseException as error:  # a defect of ours must not leave ranks waiting forever
            _log.exception("the engine of the named collectives has failed")
            self._give_up(f"{type(error).__name__}: {error}")
        self._authenticator.socket.close()
        self._stopped.set()
        # This may never end (see CoordinatorSockets.close()), so close() does not wait for it long. It runs in this
        # thread because Python 3.12 starts no thread while the interpreter exits.
        self._context.term()

    def _run_once(self) -> None:
        """Sleep until something arrives, and handle it."""
        handled = False
        for ready, _ in self._poller.poll(self._milliseconds_left()):
            handler = self._handlers.get(ready)
            if handler is not None:
                handler()
            elif not handled:  # otherwise another handler of this turn has closed the socket
                # pyzmq takes a closed socket for file descriptor 0, and would report it forever.
                raise RuntimeError("a socket was closed while the engine was serving it")
            handled = True
        if self._gathered_at is not None and time.monotonic() >= self._gathered_at:
            self._send_gathered()
        if self._later or any(coordination.waits for coordination in self._coordinations):
            self._check_deadlines()
        self.tracing.cycle()

    def _woken(self) -> None:
        os.read(self._wake_pipe[0], 16)
        self._awake.release()
        while self._calls:
            self._calls.popleft()()
        for member in self._members:
            member.queue.resume()
        for coordination in self._coordinations:
            coordination.queue.resume()
        if self._to_gather and self._gathered_at is None:
            self._to_gather = False
            self._gathered_at = time.monotonic() + _GATHER_SECONDS

    def _send_gathered(self) -> None:
        """Send the calls of the last moment together, as nobody has waited for them yet."""
        self._gathered_at = None
        for member in self._members:
            member.queue.flush()
        for coordination in self._coordinations:
            coordination.read_own()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for coordination in self._coordinations:
            due = coordination.next_check()
            if due is not None and now >= due:
                coordination.check()
        for item in [item for item in self._later if now >= item[0]]:
            _, queue, step = item
            self._later.remove(item)
            if (seconds := step()) is not None:
                self.later(queue, seconds, step)

    def _register(self, ready: Any, handler: Callable[[], None]) -> None:
        self._poller.register(ready, zmq.POLLIN)
        self._handlers[ready] = handler

    def _unregister(self, ready: Any) -> None:
        self._poller.unregister(ready)
        del self._handlers[ready]

    def _give_up(self, why: str) -> None:
        """Tell whoever waits why nothing can continue, this rank's callers first, and leave all queues."""
        self._failed = f"the engine of the named collectives failed: {why}"
        deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        sides: list[Coordination | MemberLink] = [*self._coordinations, *self._members]
        for each in sides:
            queue = each.queue
            text = f"rank {queue.ranks[queue.members.place]} could not do its part: {self._failed}"
            steps = partial(queue.aborted, text), partial(each.give_up, self._failed)
            for step in (*steps, partial(self._close, queue, text, deadline)):
                try:
                    step()
                except Exception:  # this step may need the very part that failed
                    _log.debug("while the engine of the named collectives ended", exc_info=True)

    def _milliseconds_left(self) -> int | None:
        times = [due for due, _, _ in self._later]
        if self._gathered_at is not None:
            times.append(self._gathered_at)
        for coordination in self._coordinations:
            if coordination.waits:
                due = coordination.next_check()
                times += [] if due is None else [due]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def later(self, queue: NegotiatedQueue, seconds: float, step: Callable[[], float | None]) -> None:
        """See EngineLoop."""
        self._later.append((time.monotonic() + seconds, queue, step))

    def _close(self, queue: NegotiatedQueue, text: str, deadline: float | None) -> None:
        queue.gone(text)
        queue.abandon()
        self._later = [item for item in self._later if item[1] is not queue]
        for coordination in [each for each in self._coordinations if each.queue is queue]:
            assert coordination.sockets is not None
            self._unregister(coordination.sockets.requests)
            self._unregister(coordination.sockets.decisions)
            coordination.leave(deadline)
            self._coordinations.remove(coordination)
        for member in [each for each in self._members if each.queue is queue]:
            self._unregister(member.sockets.decisions)
            self._unregister(member.sockets.losses)
            member.leave()
            self._members.remove(member)
