"""Shows a run as a web page: makes the data for browsers and answers their requests; the file page.html draws it.

The thread that called ``run`` makes pictures of the run, but only while a browser is open. The server's thread does
everything else. A browser's request waits there for the next picture, so that every browser gets the last one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.config import PageAddress
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.tracebacks import folded
from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.display.lines import plain
from spark_hvd.runner.watch.display.serve import Answer, PageRequest, PageServer
from spark_hvd.runner.watch.display.text import columns_of
from spark_hvd.runner.watch.display.trace import MOST_STEPS, RankTraces
from spark_hvd.runner.watch.history import RunHistory
from spark_hvd.runner.watch.snapshot import RankRow, RunSnapshot
from spark_hvd.world.palette import SHARES

if TYPE_CHECKING:
    from spark_hvd.runner.channel.examination import Examination

_INTERVAL = 1.0
_PATIENCE = 10.0
"""Maximum seconds that a browser waits for the next picture; after a request, it counts as open for so long."""
_LAST_LOOK = 1.5
"""Seconds that the end of a run waits for browsers to fetch the last picture."""
_STACKS_SECONDS = 6.0
_HEARD_SECONDS, _LATE_SECONDS = 8.0, 30.0
"""Seconds for a rank to confirm a profile, and to send its trace after the first rank has sent one."""
_BUSY_SECONDS = 60.0
"""Seconds for which a profile blocks new requests; a profile that hangs does not block them longer."""
_NO_ANSWER = "does not answer: it has not started yet or has ended, or its host cannot be reached"
_MOST_LINES, _MOST_LENGTH = 2000, 2000
"""Limits for the ranks' output: lines of all ranks together, and characters per line."""
_MOST_CURVES, _MOST_POINTS, _MOST_PLOTS = 8, 200, 7


def picture(snapshot: RunSnapshot, history: RunHistory, verdict: str | None) -> dict[str, Any]:
    """Return the run as data for the page, with the same texts as in all other displays."""
    columns = [each for each in columns_of(snapshot.rows, snapshot) if each.heading not in ("rank", "compute")]
    facts = {"time": words.duration(snapshot.seconds)}
    if snapshot.remaining is not None:
        facts["ETA" if snapshot.remaining.whole else "this loop ends in"] = words.duration(snapshot.remaining.seconds)
    if snapshot.rows and (epoch := words.epoch(snapshot.rows[0])):
        facts["epoch"] = epoch
    speed = snapshot.samples_per_second, snapshot.steps_per_second
    for name, value in zip(("samples/s", "steps/s"), speed, strict=True):
        if value is not None:
            facts[name] = words.number(value)
    for name in SHARES:
        if (share := getattr(snapshot, name)) is not None:
            facts[name] = words.share(share)
    if again := words.again(snapshot.restarts, snapshot.changes):
        facts["interrupted"] = again
    ranks = [
        {
            "rank": row.rank,
            "host": row.host,
            "pid": row.pid,
            "state": _state(row),
            "look": "quiet" if row.quiet else "slow" if row.skew is not None else "",
            "cells": [column.cells[number] for column in columns],
            "shares": [getattr(row, name) or 0.0 for name in SHARES],
        }
        for number, row in enumerate(snapshot.rows)
    ]
    return {
        "title": snapshot.title,
        "facts": facts,
        "columns": [column.heading for column in columns],
        "whole": [column.whole for column in columns] if len(ranks) > 1 else [],
        "ranks": ranks,
        "plots": _plots(history),
        "verdict": verdict or snapshot.verdict,
    }


def _state(row: RankRow) -> str:
    return words.note(row) or (row.stage or "running")


def _plots(history: RunHistory) -> list[dict[str, Any]]:
    """Return a plot for each metric and for the speed, with a line for each rank, or for some of many ranks."""
    every = history.ranks
    chosen = every[:: max(1, -(-len(every) // _MOST_CURVES))]
    plots: dict[str, list[dict[str, Any]]] = {}
    for rank in chosen:
        for name, stage, x, y in history.curves(rank, _MOST_POINTS):
            plots.setdefault(name, []).append({"rank": rank, "stage": stage, "x": x, "y": y})
    losses_first = sorted(plots, key=lambda name: (name != "loss", "loss" not in name.lower()))
    return [{"name": name, "lines": plots[name]} for name in losses_first[:_MOST_PLOTS]]


@cache
def _document() -> Answer:
    """Return the page, with a policy that allows only its own script and style."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    hashed = {
        tag: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)) is not None
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashed['script']}'; style-src 'sha256-{hashed['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Answer(text, kind="text/html; charset=utf-8", headers=(f"Content-Security-Policy: {policy}",))


def _json(value: Mapping[str, Any], status: int = 200) -> Answer:
    return Answer(json.dumps(plain(value), allow_nan=False), status, "application/json")


class Page:
    """Serves the page of one run until :meth:`end`; browsers then keep the last picture.

    ``examine(rank)`` requests an examination, and ``profile(rank, number, steps)`` a profile. Both return at once; the
    results go to :meth:`examined` and :meth:`profiled`.

    Raises:
        OSError: It cannot listen on the address.
    """

    def __init__(
        self, address: PageAddress, examine: Callable[[int], None], profile: Callable[[int, int, int], None]
    ) -> None:
        self._examine, self._profile = examine, profile
        self._printed: list[tuple[int, str, str]] = []
        self._next = 0.0
        # The server's thread owns the attributes below. Other threads only read the time of the last request.
        self._looked = -_PATIENCE
        self._picture: dict[str, Any] = {}
        self._number = 0
        self._size = 0
        self._drawn = asyncio.Event()
        self._lines: deque[tuple[int, int, str, str]] = deque(maxlen=_MOST_LINES)
        self._line = 0
        self._browsers: dict[str, tuple[float, int]] = {}
        self._all_up_to_date = threading.Event()
        self._looks: dict[int, asyncio.Future[Examination]] = {}
        self._trace: RankTraces | None = None
        self._traced_at = 0.0
        self._server = PageServer(address.host, address.port, address.names, self._answered)
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._server.port}/{self._server.token}/"

    # ---- the caller's thread --------------------------------------------------------------------------------------

    def lines(self, rank: int, stream: str, text: str) -> None:
        """Keep lines of a rank's output; the page shows the newest."""
        self._printed += [(rank, stream, line[:_MOST_LENGTH]) for line in text.split("\n")[-_MOST_LINES:]]
        del self._printed[:-_MOST_LINES]

    def show(self, draw: Callable[[], dict[str, Any]], now: float) -> None:
        """Publish new output and, while a browser is open, once a second a :func:`picture`, which ``draw`` returns.

        ``now`` is ``time.monotonic()``.
        """
        if self._printed:
            self._server.call(self._keep, self._printed)
            self._printed = []
        if now >= self._next and now - self._looked < _PATIENCE:
            self._next = now + _INTERVAL
            self._server.call(self._publish, draw())

    def end(self, draw: Callable[[], dict[str, Any]], facts: Mapping[str, str], error: BaseException | None) -> None:
        """Show the end of the run with the ``facts`` of its summary to open browsers, and stop serving."""
        try:
            if time.monotonic() - self._looked < _PATIENCE:
                self._server.call(self._keep, self._printed)
                text = None if error is None else harmless(f"{type(error).__name__}: {error}", colors=False)
                self._server.call(self._publish, draw() | {"over": True, "error": text, "summary": facts})
                self._all_up_to_date.wait(_LAST_LOOK)
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving the page. Idempotent."""
        self._server.close()

    def examined(self, rank: int, found: Examination) -> None:
        """Take the examination of a rank. Callable from any thread."""
        self._server.call(self._found, rank, found)

    def profiled(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a rank's message about a profile. Callable from any thread."""
        self._server.call(self._take_trace, rank, message)

    # ---- the server's thread --------------------------------------------------------------------------------------

    def _keep(self, printed: list[tuple[int, str, str]]) -> None:
        for rank, stream, line in printed:
            self._line += 1
            self._lines.append((self._line, rank, stream, harmless(line, colors=False)))

    def _publish(self, picture: dict[str, Any]) -> None:
        self._picture, self._number, self._size = picture, self._number + 1, len(picture["ranks"])
        drawn, self._drawn = self._drawn, asyncio.Event()
        drawn.set()

    def _found(self, rank: int, found: Examination) -> None:
        if (look := self._looks.pop(rank, None)) is not None and not look.done():
            look.set_result(found)

    async def _answered(self, request: PageRequest) -> Answer:
        match request.method, request.name:
            case "GET", "":
                return _document()
            case "GET", "run":
                return await self._run(request.query)
            case "POST", "stacks":
                return await self._stacks(request.query.get("rank", ""))
            case "POST", "profile":
                return self._ask_for_trace(request.query.get("rank", ""), request.query.get("steps", ""))
            case "GET", "trace.json.gz" if self._trace is not None and self._trace.ready:
                headers = ('Content-Disposition: attachment; filename="trace.json.gz"',)
                return Answer(self._trace.body(), kind="application/gzip", headers=headers)
        return Answer(f"There is nothing with the name {request.name!r:.50}.\n", 404)

    async def _run(self, query: Mapping[str, str]) -> Answer:
        """Answer with the next picture and the lines that the browser does not have yet."""
        self._looked = time.monotonic()
        if self._number <= _number(query, "after") and not self._picture.get("over"):
            drawn = self._drawn
            try:
                await asyncio.wait_for(drawn.wait(), _PATIENCE)
            except asyncio.TimeoutError:
                return _json({"number": self._number, "late": True})
        since = _number(query, "line")
        lines = [line for line in self._lines if line[0] > since]
        self._note(query.get("me", "")[:20])
        news = {"number": self._number, "lines": lines, "line": self._line, "trace": self._traced()}
        return _json({**self._picture, **news})

    def _note(self, browser: str) -> None:
        """Note which browser has which picture, and whether all recent browsers have the last one."""
        now = time.monotonic()
        self._browsers[browser] = now, self._number
        self._browsers = {me: had for me, had in self._browsers.items() if now - had[0] < 3 * _INTERVAL}
        if self._picture.get("over") and all(number == self._number for _, number in self._browsers.values()):
            self._all_up_to_date.set()

    def _ask_for_trace(self, rank: str, steps: str) -> Answer:
        """Let one rank, or all (""), profile its next steps; an earlier request is dropped."""
        if not (steps.isdecimal() and 1 <= int(steps) <= MOST_STEPS):
            return _json({"error": f"steps={steps!r:.20}: expected a number from 1 to {MOST_STEPS}"}, 400)
        if rank and not (rank.isdecimal() and int(rank) < self._size):
            return _json({"error": f"rank {rank!r:.20}: expected a number below {self._size}"}, 404)
        if self._busy:
            return _json({"error": "ranks are already being profiled"}, 409)
        self._traced_at = time.monotonic()
        ranks = [int(rank)] if rank else range(self._size)
        number = 1 if self._trace is None else self._trace.number + 1
        trace = self._trace = RankTraces(number, ranks, int(steps))
        for each in ranks:
            self._profile(each, number, int(steps))
        later = asyncio.get_running_loop().call_later
        later(_HEARD_SECONDS, lambda: trace.give_up(_NO_ANSWER, unheard=True))
        return _json({"trace": self._traced()})

    @property
    def _busy(self) -> bool:
        trace = self._trace
        return trace is not None and not trace.ended and time.monotonic() - self._traced_at < _BUSY_SECONDS

    def _traced(self) -> dict[str, Any] | None:
        return None if self._trace is None else self._trace.status() | {"busy": self._busy}

    def _take_trace(self, rank: int, message: Mapping[str, Any]) -> None:
        trace = self._trace
        if trace is None:
            return
        before = trace.some_done
        trace.take(rank, message)
        if trace.some_done and not before:  # ranks that train together do their steps together
            late = partial(trace.give_up, "it has not done the steps in time")
            asyncio.get_running_loop().call_later(_LATE_SECONDS, late)

    async def _stacks(self, rank: str) -> Answer:
        """Answer with the current stacks of a rank's threads. Requests during an examination share its result."""
        if not rank.isdecimal() or int(rank) >= self._size:
            return _json({"error": f"rank {rank!r:.20}: expected a number below {self._size}"}, 404)
        number = int(rank)
        if (look := self._looks.get(number)) is None:
            look = self._looks[number] = asyncio.get_running_loop().create_future()
            self._examine(number)
        try:
            found = await asyncio.wait_for(asyncio.shield(look), _STACKS_SECONDS)
        except asyncio.TimeoutError:
            if self._looks.get(number) is look:
                del self._looks[number]
            return _json({"error": f"rank {number} {_NO_ANSWER}"}, 504)
        lines = folded(found.stacks) or found.stacks.strip().splitlines()
        return _json({"cpu": found.cpu, "status": found.status, "folded": lines, "stacks": found.stacks})


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 15 else 0


def announce(page: Page, title: str, notebook: bool) -> None:
    """Print the address of the page once: a link in a notebook, otherwise a line on stderr."""
    text = f"spark_hvd: watch {harmless(title, colors=False)} in a browser: {page.url}"
    if not notebook:
        print(text, file=sys.stderr, flush=True)
        return
    from IPython.display import display

    link = f'<a href="{page.url}" target="_blank" rel="noreferrer">Watch this run in a browser</a>'
    display({"text/html": link, "text/plain": text}, raw=True)  # type: ignore[no-untyped-call]
