"""A web server for one page, with one thread and few connections, which clients cannot harm.

A browser that leaves, or a stranger who floods the server or sends a byte per second, can hold only a few connections
for some seconds. The server answers only requests with the token in the address, which is new for each run. It refuses
requests from other web pages in a browser: by another origin, or by a name that suddenly resolves to this machine's
address (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

_log = logging.getLogger(__name__)
_HEAD_SECONDS, _SEND_SECONDS = 5.0, 10.0
"""Time limits for a request to arrive, and for a client to take a piece of an answer."""
_PIECE = 1 << 18
_MOST_BYTES = 8 << 10
"""Maximum size of a request."""
_MOST = 32
"""Maximum number of connections without a request yet, and of requests in progress."""
_HEADERS = (
    "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\nConnection: close\r\n"
)
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {409: "Conflict", 500: "Internal Server Error", 503: "Service Unavailable", 504: "Gateway Timeout"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a browser; ``headers`` are additional header lines."""

    body: str | bytes
    status: int = 200
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Encode the answer in HTTP."""
        body = self.body.encode() if isinstance(self.body, str) else self.body
        more = "".join(f"{line}\r\n" for line in self.headers)
        head = f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.kind}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n{_HEADERS}{more}\r\n".encode() + body


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A browser's request. Only the last two parts of the path count, because a proxy may put others before them."""

    method: str
    token: str
    name: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, head: bytes) -> PageRequest:
        """Read a request line and its headers.

        Raises:
            ValueError: It is not HTTP.
        """
        line, *lines = head.decode("latin-1").split("\r\n")
        method, target, version = line.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"{version!r:.20}: expected HTTP/1.1")
        url = urlsplit(target)
        *_, token, name = ["", *url.path.split("/")]
        headers = {key.strip().lower(): value.strip() for key, _, value in (each.partition(":") for each in lines)}
        return cls(method, token, name, dict(parse_qsl(url.query, max_num_fields=20)), headers)


def refusal(request: PageRequest, token: str, names: Collection[str]) -> Answer | None:
    """Return the refusal of a request; None to answer it. ``names`` are this server's names besides addresses."""
    if not hmac.compare_digest(request.token.encode(), token.encode()):
        return Answer("This is not the complete address of the page: copy all of it, as it was printed.\n", 403)
    host = _host(f"//{request.headers.get('host', '')}")
    origin = _host(request.headers["origin"]) if "origin" in request.headers else host
    for name, known in ((host, host in names or _is_address(host)), (origin, origin in names or origin == host)):
        if not known:
            return Answer(
                f"The page does not know the name {name!r:.100}. If a proxy of yours shows it under this name, "
                'add the name: page="127.0.0.1:8080,NAME", or SPARK_HVD_PAGE=127.0.0.1:8080,NAME.\n',
                403,
            )
    if request.method == "POST" and request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return Answer("Only the page itself may ask for this.\n", 403)
    return None if request.method in ("GET", "POST") else Answer("Expected GET or POST.\n", 405)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class PageServer:
    """The web server of a page, which listens until :meth:`close`.

    ``names`` are further names for the page, besides localhost, this machine's name and all addresses. ``answer`` is
    called in the server's thread, and so are functions passed to :meth:`call`.

    Raises:
        OSError: It cannot listen on the address.
    """

    def __init__(
        self, host: str, port: int, names: Collection[str], answer: Callable[[PageRequest], Awaitable[Answer]]
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._names = {"localhost", socket.gethostname().lower(), host.lower(), *names}
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_MOST)
        self.port: int = self._listener.getsockname()[1]
        self._silent: dict[asyncio.Task[None], None] = {}
        self._cut: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="spark_hvd-page", daemon=True)
        self._thread.start()

    def call(self, work: Callable[..., object], *args: object) -> None:
        """Call a function soon in the server's thread. Callable from any thread; does nothing after :meth:`close`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *args)

    def close(self) -> None:
        """End all connections, after the answers in progress, and the thread. Idempotent."""
        self.call(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=_MOST_BYTES)
        await self._closing.wait()
        server.close()
        if self._asking:
            await asyncio.wait(self._asking, timeout=1.0)
        for task in (left := {*self._silent, *self._cut, *self._asking}):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = None
        if len(self._silent) > _MOST:
            oldest = next(iter(self._silent))
            del self._silent[oldest]  # not when it runs next: others of a burst come before that
            self._cut.add(oldest)
            oldest.cancel()
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
            self._silent.pop(task, None)
            writer.transport.set_write_buffer_limits(0)  # an answer that was waited for has been taken
            answer = (await self._answered(head, task)).to_bytes()
            for start in range(0, len(answer), _PIECE):
                writer.write(answer[start : start + _PIECE])
                await asyncio.wait_for(writer.drain(), _SEND_SECONDS)
            writer.close()
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:  # asyncio would log it as an error if it were raised again
            pass
        finally:
            self._silent.pop(task, None)
            self._cut.discard(task)
            self._asking.discard(task)
            writer.transport.abort() if not writer.is_closing() else None

    async def _answered(self, head: bytes, task: asyncio.Task[None]) -> Answer:
        try:
            request = PageRequest.parse(head)
        except ValueError:
            return Answer("This is not HTTP.\n", 400)
        if (refused := refusal(request, self.token, self._names)) is not None:
            return refused
        if len(self._asking) >= _MOST:
            return Answer("Too many browsers have this page open.\n", 503)
        self._asking.add(task)
        try:
            return await self._answer(request)
        except Exception:
            _log.warning("the page of the run cannot answer %r; the run continues", request.name[:50], exc_info=True)
            return Answer("The page has failed; the driver's log has details. The run continues.\n", 500)
