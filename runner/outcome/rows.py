"""The outcome of a rank, ``Ok`` or ``Failed``, and its form in the rows of a Spark result."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

CHUNK_BYTES = 4 << 20  # Spark Connect ships results in gRPC messages of 4 MiB at most
SPOOL_ABOVE = 16 << 20
_SPOOLED = -1
_HANDED_OVER = -2


class FailureKind(str, Enum):
    """The reason why a rank has no value."""

    EXCEPTION = "exception"  # fn raised
    EXIT = "exit"  # the process exited before fn returned
    SIGNAL = "signal"  # a signal killed the process: SIGKILL, SIGSEGV ...
    TIMEOUT = "timeout"  # it was still running after the run's timeout
    STOPPED = "stopped"  # we stopped it, because another rank failed or the run was interrupted
    LOST = "lost"  # we stopped it, because another task or the hub had fallen silent; in elastic runs also: it is gone
    RESULT = "result"  # fn returned a value that cannot be pickled or is lost, or returned while others wait for it
    SETUP = "setup"  # the rank could not be started
    MPI = "mpi"  # MPI's process manager ended before it


@dataclass(frozen=True, slots=True)
class Ok:
    """Rank ``rank`` returned ``value``."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Rank ``rank`` ended without a value.

    Attributes:
        rank: The rank in the world.
        host: Address of its host, as Spark names it.
        kind: What ended it.
        error: One line, e.g. ``ValueError: bad batch``.
        traceback: The rank's own traceback, or the stacks of its threads after a crash or a timeout. May be empty.
        log_tail: Its last lines of output, oldest first.
        echo: Whether the error only reports the loss of a peer or the network, so that another rank is the cause.
        exception: The pickled exception, if it could be pickled.
        ended_at: Seconds since 1970, on that host's clock.
        exitcode: Exit code of a process that exited by itself, or minus the signal that killed it; otherwise None.
        executor: Spark's ID of its executor, "driver" in local mode; empty if unknown.
        gpus: The assigned GPUs, as CUDA_VISIBLE_DEVICES names them; empty if none were assigned.
    """

    rank: int
    host: str
    kind: FailureKind
    error: str
    traceback: str = ""
    log_tail: str = ""
    echo: bool = False
    exception: bytes | None = None
    ended_at: float = 0.0
    exitcode: int | None = None
    executor: str = ""
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class PickledOutcome:
    """An outcome in transit, still pickled. If the hub already has the value, `data` is empty."""

    rank: int
    ok: bool
    data: bytes | memoryview
    at_hub: bool = False

    @classmethod
    def failed(cls, failure: Failed) -> PickledOutcome:
        """Pack a failure."""
        return cls(failure.rank, False, pickle.dumps(failure))

    @classmethod
    def handed_over(cls, rank: int) -> PickledOutcome:
        """Make a placeholder for the value of a rank that the driver already has."""
        return cls(rank, True, b"", at_hub=True)

    def open(self) -> Ok | Failed:
        """Unpickle; call on the driver only.

        Raises:
            Exception: whatever unpickling the value raises, e.g. ModuleNotFoundError.
        """
        value = pickle.loads(self.data)
        return Ok(self.rank, value) if self.ok else value


Row = tuple[int, bool, int, bytes]
"""One row of the Spark result: rank, ok, part number, bytes."""

SCHEMA = "rank int, ok boolean, part int, chunk binary"


def to_rows(packed: PickledOutcome, spool: str | None = None, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Row]:
    """Cut a packed outcome into rows of at most ``chunk_bytes`` bytes; an empty outcome is one row, too.

    An outcome above 16 MiB is written to the directory ``spool``, if given, because Spark needs five times its size of
    Java heap.
    """
    if packed.at_hub:
        yield packed.rank, packed.ok, _HANDED_OVER, b""
        return
    if spool is not None and len(packed.data) > SPOOL_ABOVE:
        path = os.path.join(spool, f"rank-{packed.rank}")
        with open(path, "wb") as file:
            file.write(packed.data)
        yield packed.rank, packed.ok, _SPOOLED, path.encode()
        return
    for part, start in enumerate(range(0, max(len(packed.data), 1), chunk_bytes)):
        yield packed.rank, packed.ok, part, bytes(packed.data[start : start + chunk_bytes])


def from_rows(rows: Iterable[Row], values: Mapping[int, bytes] = MappingProxyType({})) -> list[PickledOutcome]:
    """Join rows, in any order, back into outcomes in rank order.

    ``values`` are those that the hub has received, by rank.
    """
    parts: dict[int, list[tuple[int, bytes]]] = {}
    oks: dict[int, bool] = {}
    for rank, ok, part, chunk in rows:
        parts.setdefault(rank, []).append((part, chunk))
        oks[rank] = ok
    return [
        PickledOutcome(
            rank, oks[rank], values[rank] if parts[rank][0][0] == _HANDED_OVER else _join(sorted(parts[rank]))
        )
        for rank in sorted(parts)
    ]


def _join(parts: list[tuple[int, bytes]]) -> bytes:
    if parts[0][0] == _SPOOLED:
        with open(parts[0][1], "rb") as file:
            return file.read()
    return b"".join(chunk for _, chunk in parts)
