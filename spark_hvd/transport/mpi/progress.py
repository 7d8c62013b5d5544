"""Drives MPI's non-blocking operations: MPI makes progress only while some thread is inside one of its calls.

A thread that waits for an operation polls it itself, so a small collective costs no thread switch. A daemon thread
polls the operations that nobody waits for, so that all of them progress behind a backward pass, and callbacks run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.transport.mpi.backoff import PollingBackoff
from spark_hvd.transport.mpi.library import MPI, THREADS, TURNS, before_end
from spark_hvd.world.errors import CollectiveError

_log = logging.getLogger("spark_hvd")

_TESTS_AT_ONCE = 64
"""How often a waiting thread polls before it checks the clock; this takes about 20 microseconds."""
_WATCH_SECONDS = 1e-4
"""Seconds between two polls of operations that nobody waits for."""
_REST_SECONDS = 1e-3
_REST_LASTS = 0.02
"""How long the thread stays awake after it last saw an operation. After that it costs nothing, and must be woken."""


class Operation:
    """One request in flight. It ends once, in the thread that notices first; usable from any thread.

    Its buffers, ``keep``, stay alive until it has ended.
    """

    __slots__ = ("_callbacks", "_keep", "_lock", "_progress", "_request", "done", "error", "name", "owner", "waiters")

    def __init__(self, owner: object, name: str, request: MPI.Request, keep: Any, progress: ProgressThread) -> None:
        self.owner = owner
        self.name = name
        self.done = False
        self.error: str | None = None
        """Why it failed, if it did, once it is done."""
        self.waiters = 0
        self._request = request
        self._keep = keep
        self._progress = progress
        self._lock = threading.Lock() if THREADS else TURNS
        self._callbacks: list[Callable[[], None]] | None = None

    def poll(self, times: int = 1) -> bool:
        """Return whether it has ended; this also moves everything that MPI has in flight a little."""
        if self.done:
            return True
        with self._lock:  # two calls of MPI must not use one request at once
            if not self._test(times):
                return False
        self._ended()
        return True

    def _test(self, times: int) -> bool:
        if not self.done:  # another thread may have ended it meanwhile
            test = self._request.Test
            try:
                for _ in range(times):
                    if test():
                        break
                else:
                    return False
            except MPI.Exception as error:
                self.error = error.Get_error_string()
            self.done = True
        return True

    def wait(self, seconds: float) -> None:
        """Block until it has ended.

        Raises:
            CollectiveError: It failed, or the time is up; in the latter case it continues.
        """
        if not self.poll(_TESTS_AT_ONCE):
            self.waiters += 1
            try:
                self._wait(seconds)
            finally:
                self.waiters -= 1
        if self.error is not None:
            raise CollectiveError(f"{self.name} failed on rank {MPI.COMM_WORLD.rank}: {self.error}")

    def _wait(self, seconds: float) -> None:
        backoff = PollingBackoff()
        until = time.monotonic() + seconds
        while True:
            before = time.perf_counter()
            if self.poll():
                return
            pause = backoff.after(before, time.perf_counter())
            if pause:
                if time.monotonic() > until:
                    raise CollectiveError(
                        f"{self.name} has waited for other ranks for {seconds:g} s on rank {MPI.COMM_WORLD.rank}, "
                        "the timeout; one of them has not called it, or is gone."
                    )
                time.sleep(pause)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once it has ended, from the thread that notices; at once if it has ended already."""
        with self._lock:
            if not self.done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback()

    def fail(self, error: str) -> None:
        """End it as failed. MPI may keep its request, and so its buffers."""
        with self._lock:
            if self.done:
                return
            self.error, self.done = error, True
        self._progress.abandoned.append((self._request, self._keep))
        self._ended()

    def _ended(self) -> None:
        self._progress.remove(self)
        self._keep = None
        if self._callbacks is not None:  # none is added once it is done
            with self._lock:  # two threads may come here
                callbacks, self._callbacks = self._callbacks or [], None
            for callback in callbacks:
                try:
                    callback()
                except Exception:  # a bug in a callback must stop neither this thread nor the next callback
                    _log.exception("a callback of %s has failed", self.name)


class ProgressThread:
    """The operations of this process, and the thread that polls them."""

    def __init__(self) -> None:
        self.abandoned: list[Any] = []
        """Requests that were given up, with their buffers, which MPI may still write to."""
        self._operations: dict[int, Operation] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._awake = threading.Event()
        self._resting = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(
        self, owner: object, name: str, call: Callable[..., MPI.Request], arguments: Sequence[Any], keep: Any
    ) -> Operation:
        """Start an operation, which progresses whether or not anybody waits for it.

        ``call`` is a method of a communicator that returns a request. Its arguments and ``keep`` stay alive until the
        operation has ended.

        Raises:
            CollectiveError: MPI refuses.
        """
        try:
            if THREADS:
                request = call(*arguments)
            else:
                with TURNS:
                    request = call(*arguments)
        except MPI.Exception as error:
            raise CollectiveError(f"{name} failed on rank {MPI.COMM_WORLD.rank}: {error.Get_error_string()}") from error
        operation = Operation(owner, name, request, (arguments, keep), self)
        self._operations[id(operation)] = operation
        if self._resting or self._thread is None:
            self._wake()
        return operation

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after some seconds, in the thread."""
        self._later.append((time.monotonic() + seconds, call))
        self._wake()

    def of(self, owner: object) -> list[Operation]:
        """Return the operations of an owner that are in flight."""
        return [each for each in list(self._operations.values()) if each.owner is owner]

    def remove(self, operation: Operation) -> None:
        """Stop polling an operation that has ended."""
        self._operations.pop(id(operation), None)

    def close(self) -> bool:
        """End the thread; return whether nothing is left in flight, so that MPI can be ended."""
        self._closed = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(1.0)
        try:
            with TURNS:
                return not self._operations and all(request.Test() for request, _ in self.abandoned)
        except MPI.Exception:
            return False

    def _wake(self) -> None:
        if self._thread is None:
            self._begin()
        if self._resting:
            self._awake.set()

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                # A daemon, so that it does not keep a process alive.
                thread = threading.Thread(target=self._run, name="spark_hvd-mpi", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed:
            try:
                last = self._turn(last)
            except Exception as error:  # a bug of ours must not leave a thread waiting forever
                _log.exception("the thread that keeps MPI moving has failed")
                for operation in list(self._operations.values()):
                    operation.fail(f"the thread that keeps MPI moving has failed: {type(error).__name__}: {error}")

    def _turn(self, last: float) -> float:
        """Do what is due; return when there was last something to do."""
        for each in list(self._later):
            if each[0] <= time.monotonic():
                self._later.remove(each)
                each[1]()
        if self._poll():
            time.sleep(_WATCH_SECONDS)
            return time.monotonic()
        if self._operations or self._later or time.monotonic() - last < _REST_LASTS:
            # Waiting threads poll the remaining operations themselves.
            time.sleep(_REST_SECONDS)
            return last
        self._rest()
        return time.monotonic()

    def _poll(self) -> bool:
        """Poll operations that nobody waits for, while they progress; return whether some are left."""
        backoff = PollingBackoff(patience=0.0)
        while True:
            operations = [each for each in list(self._operations.values()) if not each.waiters]
            before = time.perf_counter()
            left = [each for each in operations if not each.poll()]
            if not left or self._closed:
                return False
            if backoff.after(before, time.perf_counter()):
                return True

    def _rest(self) -> None:
        self._awake.clear()
        self._resting = True  # from now on, a start wakes this thread
        if not self._operations and not self._later and not self._closed:
            self._awake.wait()
        self._resting = False


PROGRESS = ProgressThread()
"""The progress thread of this process, which has only one MPI too."""

before_end.append(PROGRESS.close)
