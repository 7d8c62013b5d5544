"""Who may connect to a coordinator: the holders of a member's key, and nobody else (https://rfc.zeromq.org/spec/27).

pyzmq's own authenticators bring a thread and an event loop for each context; the engine has a thread already.
"""

from __future__ import annotations

import zmq
import zmq.utils.z85


class Doorman:
    """Answers ZeroMQ's questions about newcomers; belongs to one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.questions = context.socket(zmq.REP)
        self.questions.linger = 0
        self.questions.bind("inproc://zeromq.zap.01")
        self._welcome: set[bytes] = set()

    def welcome(self, public_key: bytes) -> None:
        """Let in the holder of this key, given as Z85 text."""
        self._welcome.add(zmq.utils.z85.decode(public_key))

    def answer(self) -> None:
        """Answer what has been asked."""
        while self.questions.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.questions.recv_multipart()
            known = mechanism == b"CURVE" and credentials[0] in self._welcome
            status, text = (b"200", b"OK") if known else (b"400", b"no key of this world")
            self.questions.send_multipart([version, request, status, text, b"", b""])
