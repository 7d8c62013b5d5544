"""What displays have in common, and what ranks print: queued for the thread that shows it, written with its rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from spark_hvd.runner.terminal import harmless, is_terminal

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.runner.watch.view import RunView

_MAX_BACKLOG = 32 << 20


class Display(Protocol):
    """Shows one run. Called by one thread, the one that called ``run``: a notebook's cell belongs to it."""

    def lines(self, rank: int, stream: str, text: str) -> None:
        """Write whole lines that a rank has printed.

        Args:
            rank: Whose; -1 for a note of ours.
            stream: "out" or "err".
            text: Lines, separated by newlines, without the last newline.
        """

    def show(self, view: RunView, now: float) -> None:
        """The state of the run; called about four times a second. The display decides what of it to draw, and when.

        Args:
            view: All there is to know.
            now: ``time.monotonic()``.
        """

    def end(self, summary: Summary | None) -> None:
        """The run is over: show the summary, if there is one, and let go of the terminal. Idempotent."""


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
