"""Takes a rank's output from its pipes to the hub, and loses nothing if the hub is slow."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable

from spark_hvd.runner.channel.link import Link

_READ_BYTES = 64 << 10
_LINE_END = re.compile(rb"\r?\n")
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_UP = re.compile(rb"\x1b\[[0-9]*A")
_DRAWING = re.compile(rb"\r|" + _UP.pattern)
_SECONDS_BETWEEN_STATES = 1.0
_NO_NAME = re.compile(r"\[W[^\]]*\bsocket\.cpp:\d+\].*The hostname of the client socket cannot be retrieved")
"""torch's warning about addresses without names (no reverse DNS). It is harmless, because torch needs no names."""
TAIL_LINES = 20
_MAX_LINE = 64 << 10


class LineCutter:
    """Cuts a stream of bytes into complete lines of text.

    A progress bar that redraws its line with carriage returns gives one line per second, and its last state. Cursor
    movements of nested bars are removed, because they have no meaning among the lines of other ranks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._drawing = False
        self._drawn, self._shown = "", ""  # states of a progress bar: the newest unless shown, and the last shown
        self._next = 0.0

    def feed(self, data: bytes) -> list[str]:
        """Take a piece, and return the lines that it completes. A line of more than 64 KiB is cut."""
        pieces = _LINE_END.split(self._rest + data)
        *ended, self._rest = pieces
        lines: list[str] = []
        for line, following in zip(ended, pieces[1:], strict=False):
            state = _state(line)
            if _DRAWING.search(line) and (state in ("", self._drawn, self._shown) or _UP.search(following)):
                self._draw(state)  # the newline only moves the cursor to a nested bar
            elif line or not self._drawing:
                if _DRAWING.search(line):
                    self._drawn = ""  # this line overwrites the bar's state
                lines += [*self._show(), state]
                self._drawing = False
        drawn = self._rest.removesuffix(b"\r")  # the first half of a line's end, perhaps
        if _DRAWING.search(drawn):
            self._draw(_state(drawn))
            self._rest = self._rest[max(drawn.rfind(b"\r"), 0) :]
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest.decode(errors="replace"))
            self._rest = b""
        return lines + self.due()

    def due(self) -> list[str]:
        """Return the current state of a progress bar if it is due."""
        return self._show() if self._clock() >= self._next else []

    def end(self) -> list[str]:
        """Return the rest of an unfinished line."""
        rest, self._rest = self._rest, b""
        if _DRAWING.search(rest):
            self._draw(_state(rest))
            return self._show()
        return self._show() + ([rest.decode(errors="replace")] if rest else [])

    def _draw(self, state: str) -> None:
        self._drawing = True
        if state:
            self._drawn = "" if state == self._shown else state

    def _show(self) -> list[str]:
        if not self._drawn:
            return []
        self._shown, self._drawn = self._drawn, ""
        self._next = self._clock() + _SECONDS_BETWEEN_STATES
        return [self._shown]


def _state(line: bytes) -> str:
    """Return what a terminal would show of a line in the end."""
    if not _DRAWING.search(line):
        return line.decode(errors="replace")
    parts = [text for part in line.split(b"\r") if (text := _CURSOR.sub(b"", part)).strip()]
    return parts[-1].decode(errors="replace") if parts else ""


class Tail:
    """The last lines that a rank printed on either stream."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    def add(self, lines: list[str]) -> None:
        """Keep these lines, and drop the oldest if there are too many."""
        self._lines.extend(line[:2000] for line in lines)

    def __str__(self) -> str:
        return "\n".join(self._lines)


class RankOutput:
    """The output of one rank, sent to ``on_lines`` (stream, lines) if given, otherwise to the hub.

    ``fds`` has the reading ends of the rank's pipes, with "out" or "err" for each.
    """

    def __init__(self, fds: dict[int, str], link: Link, on_lines: Callable[[str, list[str]], None] | None) -> None:
        self.fds = fds
        """The open pipes."""
        self.tail = Tail()
        self._link = link
        self._on_lines = on_lines
        self._cutters = {stream: LineCutter() for stream in fds.values()}
        self._unsent: list[tuple[str, str]] = []

    @property
    def waiting(self) -> bool:
        """Whether the hub is slow. Then the pipes fill up, and the rank blocks in its print."""
        return bool(self._unsent)

    def read(self, fd: int) -> bool:
        """Read a pipe, and return False if it has ended and must no longer be polled."""
        stream = self.fds[fd]
        data = os.read(fd, _READ_BYTES)
        if data:
            self._emit(stream, self._cutters[stream].feed(data))
            return True
        del self.fds[fd]
        return False

    def flush(self) -> None:
        """Send as much as the hub takes now."""
        for stream, cutter in self._cutters.items():
            self._emit(stream, cutter.due())
        while self._unsent:
            stream, text = self._unsent[0]
            if not self._link.try_send("output", stream=stream, text=text):
                return
            del self._unsent[0]

    def end(self, grace: float) -> None:
        """Send the rest, including unfinished lines. A slow hub gets ``grace`` seconds."""
        for stream, cutter in self._cutters.items():
            self._emit(stream, cutter.end())
        deadline = time.monotonic() + grace
        while self._unsent and time.monotonic() < deadline:
            self.flush()
            time.sleep(0.01)

    def _emit(self, stream: str, lines: list[str]) -> None:
        lines = [line for line in lines if not _NO_NAME.match(line)]
        if not lines:
            return
        self.tail.add(lines)
        if self._on_lines is not None:
            self._on_lines(stream, lines)
        else:
            self._unsent.append((stream, "\n".join(lines)))
