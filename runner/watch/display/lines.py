"""What ranks print: cut into lines, kept as a tail, forwarded with the rank's number in front."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from typing import TextIO

from spark_hvd.runner.terminal import harmless, is_terminal

_LINE_END = re.compile(rb"\r\n|\n|\r")  # progress bars end their lines with \r

TAIL_LINES = 20
_MAX_LINE = 64 << 10
_MAX_BACKLOG = 32 << 20


class LineCutter:
    """Turns pieces of bytes into whole lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take a piece; return the lines it completes. A line of more than 64 KiB is cut."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def end(self) -> list[str]:
        """Return what is left of an unfinished line."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


class Tail:
    """The last lines that a rank printed on either stream."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    def add(self, lines: list[str]) -> None:
        """Note more lines."""
        self._lines.extend(line[:2000] for line in lines)

    def __str__(self) -> str:
        return "\n".join(self._lines)


class OutputQueue:
    """What ranks have said and nobody has written yet.

    Lines arrive in the hub's thread (:meth:`put`) and are written by the thread that called ``run`` (:meth:`take`),
    because in a notebook a thread's output goes to the cell that the thread belongs to.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, str, str]] = deque()
        self._queued = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, rank: int, stream: str, text: str) -> None:
        """Take lines of a rank, from any thread. Beyond 32 MiB not yet taken, the oldest go, and it is said."""
        with self._lock:
            self._queue.append((rank, stream, text))
            self._queued += len(text)
            while self._queued > _MAX_BACKLOG:
                _, _, old = self._queue.popleft()
                self._queued -= len(old)
                self._dropped += old.count("\n") + 1

    def take(self) -> Iterable[tuple[int, str, str]]:
        """What has arrived: rank, or -1 for a note of ours, "out" or "err", and whole lines."""
        with self._lock:
            items, self._queue = self._queue, deque()
            dropped, self._dropped, self._queued = self._dropped, 0, 0
        if dropped:
            items.appendleft((-1, "err", f"({dropped} lines of the ranks came faster than they could be shown)"))
        return items


class LineWriter:
    """Writes what ranks say to text streams, each line as ``[rank] line``; to a terminal as text and colours only.

    Args:
        stdout: Where the ranks' stdout goes, or None for nowhere.
        stderr: Where their stderr goes, or None for nowhere.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self._streams = {"out": stdout, "err": stderr}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Write whole lines of a rank; of -1 without a number."""
        target = self._streams[stream]
        if target is not None:
            text = harmless(text) if is_terminal(target) else text
            prefix = f"[{rank}] " if rank >= 0 else ""
            target.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))
            target.flush()
