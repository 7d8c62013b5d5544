"""All connections of one elastic world, so that another thread can end them at once, even while they are being made.

A rank that has stopped keeps its sockets and says nothing. To free whoever waits for it in a collective, the
connections of the process groups are cut. While a group is being made, its connections are not known yet, and there is
more to wait for: keys of the key-value store, and peers that should connect to Gloo's listeners. In that phase, every
connection that was made since its start is cut, including those to the store, and the listeners are answered in place
of the peers. This may hit a connection of a user's thread, if it was made in the few milliseconds that making a group
takes, in a generation that breaks then.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from spark_hvd.transport.connections import Abortable, Sockets, answer, cut_among, cut_to, since, sockets
from spark_hvd.transport.handles import is_out_of_memory
from spark_hvd.world.errors import CollectiveError

if TYPE_CHECKING:
    from spark_hvd.world.layout import Endpoint

_AGAIN_SECONDS = 0.05
"""Seconds between two cuts while a group is being made: its sockets come one after another."""


class ConnectionRegistry:
    """The connections of one generation of an elastic world."""

    def __init__(self, generation: int, endpoint: Endpoint | None, size: int) -> None:
        self.generation = generation
        self.broken: str | None = None
        """Why they were cut; None if they were not."""
        self._size = size
        self._store = set[tuple[str, int]]()
        if endpoint is not None:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            self._store = {(str(each[4][0]), endpoint.port) for each in found}
        self._lock = threading.Lock()  # so that a listener hears of a cut once, whether it came before or after the cut
        self._cutting = threading.Lock()  # held during a cut, which must not hit what is made after establishing()
        self._known: list[Abortable] = []
        self._listeners: list[Callable[[str], None]] = []
        self._before: Sockets | None = None
        """The sockets that existed before, while a group is being made."""

    @contextlib.contextmanager
    def establishing(self) -> Iterator[None]:
        """Within this context, make process groups; an abort also cuts what they wait for.

        Raises:
            CollectiveError: The connections were aborted, or a peer or the network failed.
        """
        if self._before is not None:
            yield
            return
        self._require_whole()
        self._before = sockets()
        try:
            self._require_whole()
            yield
        except RuntimeError as error:
            if self.broken is not None:
                raise CollectiveError(self.broken) from error
            if isinstance(error, CollectiveError) or is_out_of_memory(error):
                raise
            raise CollectiveError(f"the ranks could not meet: {error}") from error
        finally:
            with self._cutting:  # otherwise it would cut what comes next
                self._before = None
        self._require_whole()

    def add(self, known: Abortable) -> None:
        """Add the connections of a process group that has been made."""
        with self._lock:
            self._known.append(known)

    def on_abort(self, listener: Callable[[str], None]) -> None:
        """Tell this listener as well when the connections are cut, and why; in the thread that cuts."""
        with self._lock:
            self._listeners.append(listener)
            text = self.broken
        if text is not None:
            listener(text)

    def abort(self, text: str) -> None:
        """End all connections; the first text is the one that is reported. From any thread."""
        with self._lock:
            if self.broken is None:
                self.broken = text
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(text)
        self._cut()
        if self._before is not None:
            # In its own thread, which ends with the making of the group: the caller must listen to others.
            threading.Thread(target=self._keep_cutting, name="spark_hvd-abort", daemon=True).start()

    def _keep_cutting(self) -> None:
        while self._before is not None:
            time.sleep(_AGAIN_SECONDS)
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            known = list(self._known)
        for each in known:
            each.abort()
        # If no file descriptor is left, try again in a moment.
        with self._cutting, contextlib.suppress(OSError):
            if self._before is not None:
                cut_to(self._store)
                fresh = since(self._before)
                cut_among(fresh)
                answer(fresh, self._size)

    def _require_whole(self) -> None:
        if self.broken is not None:
            raise CollectiveError(self.broken)
