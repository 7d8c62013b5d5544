"""One trace of the next steps of several ranks, assembled from their messages."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Mapping
from typing import Any

from spark_hvd.world.words import count, ranks_text

MOST_STEPS = 100
_MOST_BYTES = 512 << 20
"""Of all traces together, compressed."""


class RankTraces:
    """Takes messages of the ranks that were asked for their next ``steps``; those of another ``number`` are ignored."""

    def __init__(self, number: int, ranks: Iterable[int], steps: int) -> None:
        self.number, self.steps = number, steps
        self._waiting = {*ranks}
        self._heard: set[int] = set()
        self._parts: dict[int, list[bytes]] = {}
        self._done: dict[int, bytes] = {}
        self._faults: dict[int, str] = {}
        self._bytes = 0

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a rank; the parts of a trace must arrive in order."""
        if message["number"] != self.number or rank not in self._waiting:
            return
        self._heard.add(rank)
        if message["error"] is not None:
            self._fail(rank, message["error"])
        elif message["parts"]:
            parts = self._parts.setdefault(rank, [])
            if message["part"] != len(parts):
                self._fail(rank, "its trace has not come whole: ask again")
                return
            parts.append(base64.b64decode(message["data"]))
            self._bytes += len(parts[-1])
            if self._bytes > _MOST_BYTES:
                self._fail(rank, "the traces of all ranks are too large together: ask for fewer steps, or one rank")
                return
            if len(parts) == message["parts"]:
                self._waiting.discard(rank)
                self._done[rank] = b"".join(self._parts.pop(rank))

    def give_up(self, why: str, *, unheard: bool = False) -> None:
        """Stop waiting for all ranks, or only for those that have sent nothing."""
        for rank in self._waiting - (self._heard if unheard else set()):
            self._fail(rank, why)

    def _fail(self, rank: int, why: str) -> None:
        self._waiting.discard(rank)
        self._parts.pop(rank, None)
        self._faults[rank] = why

    @property
    def some_done(self) -> bool:
        """Whether the trace of any rank is complete."""
        return bool(self._done)

    @property
    def ended(self) -> bool:
        """Whether no rank is waited for."""
        return not self._waiting

    @property
    def ready(self) -> bool:
        """Whether there is something to download, and nothing more to come."""
        return self.ended and bool(self._done)

    def status(self) -> dict[str, Any]:
        """The state of the profile, for the page."""
        said = [f"profiling {count(self.steps, 'step')} of {ranks_text(sorted(self._waiting))} ..."] * (not self.ended)
        reasons: dict[str, list[int]] = {}
        for rank, why in sorted(self._faults.items()):
            reasons.setdefault(why, []).append(rank)
        said += [f"{ranks_text(ranks)}: {why}" for why, ranks in reasons.items()]
        return {"number": self.number, "ready": self.ready, "text": "; ".join(said)}

    def body(self) -> bytes:
        """The whole trace in Chrome's format, compressed; separately compressed parts may be concatenated."""
        comma = gzip.compress(b",\n")
        head, tail = gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [\n'), gzip.compress(b"\n]}\n")
        return head + comma.join(events for _, events in sorted(self._done.items())) + tail
