"""A task's signs of life: a thread that tells the hub every second that the task is there, and hears its answers.

A thread, since the supervisor waits in one place for the fork server and in another for output to drain. It has a
connection of its own, so no output stands before it in a queue. ZeroMQ's own heartbeats would close a connection whose
other end is only suspended, and lose what is queued on it; TCP keeps both for as long as it takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import zmq

from spark_hvd.runner.channel.silence import BEAT, LivenessTracker

_HUB = 0


class Heartbeat:
    """The thread; it ends with :meth:`close`.

    Args:
        socket: Connected to the hub; owned by the thread from now on.
        message: What to send.
    """

    def __init__(self, socket: zmq.Socket[bytes], message: dict[str, Any]) -> None:
        self._socket = socket
        self._message = json.dumps(message).encode()
        self._liveness = LivenessTracker()
        self._liveness.record_heartbeat(_HUB, time.monotonic())
        self._lock = threading.Lock()  # the thread records answers, others ask for how long there was none
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="spark_hvd-heartbeat", daemon=True)
        self._thread.start()

    def silence(self) -> float:
        """Seconds in which the hub has not answered, to within a second or two."""
        with self._lock:
            return self._liveness.expired(0.0, time.monotonic()).get(_HUB, 0.0)

    def close(self) -> None:
        """End the thread and its connection. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        with self._socket:
            while True:
                with contextlib.suppress(zmq.Again):  # not connected, or cut off: nothing is to pile up
                    self._socket.send(self._message, zmq.NOBLOCK)
                if self._closing.wait(BEAT / 2):
                    return
                self._listen()
                if self._closing.wait(BEAT / 2):
                    return

    def _listen(self) -> None:
        answered = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv(zmq.NOBLOCK)
                answered = True
        with self._lock:
            now = time.monotonic()
            if answered:
                self._liveness.record_heartbeat(_HUB, now)
            self._liveness.tick(now)
