"""Limits the number of unauthenticated connections, so that strangers cannot use up the driver's descriptors.

libzmq accepts every connection, and drops unauthenticated ones after the time for the handshake. If descriptors run out
before that, its accept loop spins, and the driver cannot open files. libzmq cannot pause accepting, either: unbinding
would also cut the connections of tasks.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct

import zmq

_MAX_EXTRA = 1000
_MAX_DESCRIPTORS = 1 << 16

SOCKETS = 24
"""Files that a ZeroMQ context with a few sockets opens at once. If it cannot open them, libzmq ends the process."""


class UnauthenticatedConnections:
    """The connections over which no message has come yet; cuts the oldest if there are too many.

    ``listener`` must not be bound yet. ``expected`` is the number of legitimate connections, all of which may be silent
    for a moment. Only the socket's thread may use this object.
    """

    def __init__(self, listener: zmq.Socket[bytes], expected: int) -> None:
        self._listener = listener
        self.events = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        """Readable when :meth:`process_events` should be called."""
        self._most = expected + min(_MAX_EXTRA, _descriptors() // 4)
        self._silent: dict[int, None] = {}  # descriptors, the oldest first

    def process_events(self) -> None:
        """Handle new and closed connections, and cut the oldest if there are too many."""
        while self.events.poll(0):
            # zmq_socket_monitor(3). pyzmq's own parser of these events would load asyncio.
            event, descriptor = struct.unpack("=Hi", self.events.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._silent[descriptor] = None
            else:
                self._silent.pop(descriptor, None)
        while len(self._silent) > self._most:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            self._cut(oldest)

    def authenticated(self, descriptor: int) -> None:
        """Note that a message has arrived over this connection, so the other end holds a key."""
        self._silent.pop(descriptor, None)

    def close(self) -> None:
        """Stop watching for connections."""
        self._listener.disable_monitor()
        self.events.close(0)

    def _cut(self, descriptor: int) -> None:
        """Shut a connection down, so that libzmq closes it. Check first that the number is still this connection's."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            port = int(self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def _descriptors() -> int:
    """Return this process's limit of descriptors, after raising it as far as allowed: a large run needs many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted


def require_descriptors() -> None:
    """Check that this process can open the files of a hub.

    Raises:
        OSError: It cannot. The text says what to do.
    """
    held: list[int] = []
    try:
        for _ in range(SOCKETS):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            error.errno,
            f"the driver's channel to its ranks needs {SOCKETS} more open files, but this process can open {len(held)} "
            f"(its limit is {limit}: {error.strerror}). Next: close files, or raise the limit where the process is "
            "started, ulimit -n 65536",
        ) from error
    finally:
        for fd in held:
            os.close(fd)
