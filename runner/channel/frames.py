"""Length-prefixed frames on the anonymous socket pair between a supervisor and its rank process.

A frame is a small JSON header and an opaque payload. The socket pair has no name and no address, so no other
process can reach it; nothing in this module is ever used on a network socket.
"""

from __future__ import annotations

import json
import mmap
import signal
import socket
import struct
from typing import Any

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a rank writes the stack of each of its threads to the file that its supervisor gave it."""
NOTICES = (signal.SIGTERM, *([signal.SIGPWR] if hasattr(signal, "SIGPWR") else []))
"""Signals that announce the end of a machine or container. SIGPWR exists only on Linux; a driver may run elsewhere."""
REQUEST_LENGTH = struct.Struct("!I")
"""The length that precedes each request to a fork server."""
_LENGTHS = struct.Struct("!IQ")
_LARGE = 1 << 20


def send_frame(sock: socket.socket, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
    """Send one frame, blocking until it is written.

    Raises:
        OSError: The other end is gone.
    """
    head = json.dumps(header).encode()
    sock.sendall(_LENGTHS.pack(len(head), len(payload)) + head)
    if len(payload):
        sock.sendall(payload)


def recv_frame(sock: socket.socket) -> tuple[dict[str, Any], memoryview] | None:
    """Receive one frame from a blocking socket; return None when the other end has closed."""
    prefix = recv_exactly(sock, _LENGTHS.size)
    if prefix is None:
        return None
    head_length, payload_length = _LENGTHS.unpack(prefix)
    head = recv_exactly(sock, head_length)
    payload = recv_exactly(sock, payload_length)
    if head is None or payload is None:
        return None
    return json.loads(bytes(head)), payload


def recv_exactly(sock: socket.socket, count: int) -> memoryview | None:
    """Receive ``count`` bytes from a blocking socket; return None if it closes before that."""
    data = view = _memory(count)
    while view:
        received = sock.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return data


def _memory(count: int) -> memoryview:
    """Allocate ``count`` bytes.

    Python fills a large bytearray with zeros while no other thread can run. For gigabytes, this takes longer than a
    task may be silent. The kernel makes mapped pages only when they are written, and without Python's lock.
    """
    if count < _LARGE:
        return memoryview(bytearray(count))
    return memoryview(mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class FrameReader:
    """Reads frames from a socket piecewise, so that a large frame never blocks an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._head: dict[str, Any] | None = None
        self._lengths: tuple[int, int] | None = None
        self._want(_LENGTHS.size)
        self.closed = False

    def _want(self, count: int) -> None:
        self._buffer = _memory(count)
        self._filled = 0

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """Read the bytes that have arrived, and return a frame once it is complete. Call this when readable."""
        try:
            received = self._sock.recv_into(self._buffer[self._filled :])
        except OSError:  # a peer killed with unread data resets the connection
            received = 0
        if not received:
            self.closed = True
            return None
        self._filled += received
        return self._advance() if self._filled == len(self._buffer) else None

    def _advance(self) -> tuple[dict[str, Any], memoryview] | None:
        if self._lengths is None:
            self._lengths = _LENGTHS.unpack(self._buffer)
            self._want(self._lengths[0])
            return None
        if self._head is None:
            self._head = json.loads(bytes(self._buffer))
            self._want(self._lengths[1])
            if self._lengths[1]:
                return None
        head, payload = self._head, self._buffer
        self._head = self._lengths = None
        self._want(_LENGTHS.size)
        return head, payload
