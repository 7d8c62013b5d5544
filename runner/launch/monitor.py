"""Shows a run to the caller of ``run``: messages arrive in the hub's thread, and the caller's thread shows them."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.channel.hub import HubServer
from spark_hvd.runner.config import PAGE, CommonConfig, PageAddress
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.outcome.payload import name_of
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.watch.display.choose import in_notebook, make_display
from spark_hvd.runner.watch.display.lines import Display, OutputQueue
from spark_hvd.runner.watch.hang.verdict import HangVerdict, Kind
from spark_hvd.runner.watch.hang.watch import Examine, HangWatch
from spark_hvd.runner.watch.history import RunHistory
from spark_hvd.runner.watch.tracking import Facts, Tracking, facts_of
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

if TYPE_CHECKING:
    from typing_extensions import Self

    from spark_hvd.runner.channel.state import Message
    from spark_hvd.runner.watch.display.page import Page
    from spark_hvd.runner.watch.summary import Summary

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_LOOK_EVERY = 0.25
"""Seconds between two updates of the display and checks for hangs."""


class Monitor:
    """Shows and records a run; a context manager. Its :meth:`hear` is the listener of a hub.

    A failure of a display, tracker or page does not end the run; a failure of a stream that the caller has passed does.
    ``price_per_hour`` is that of one rank; None if unknown. ``gpus_per_rank`` is None for one GPU per rank, if ranks
    have any. ``page`` is the address of the run's page; None means no page.
    """

    def __init__(
        self,
        display: Display,
        title: str,
        size: int,
        tracking: Tracking,
        facts: Facts,
        *,
        price_per_hour: float | None,
        gpus_per_rank: int | None,
        page: PageAddress | None = None,
    ) -> None:
        self._display = display
        self._tracking, self._facts = tracking, facts
        self._summary: Summary | None = None
        self._begun = title, size, time.monotonic(), price_per_hour, gpus_per_rank
        self._view = RunView(*self._begun)
        self._history = RunHistory()
        self._watch = HangWatch()
        self._hub: HubServer | None = None
        self._output = OutputQueue()
        self._records: deque[Vitals] = deque()
        self._examinations: deque[tuple[int, Examination]] = deque()
        self._next_look = 0.0
        self._failed: set[str] = set()
        self._page_address = page
        self._page: Page | None = None

    # ---- the hub's thread -----------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Message | Vitals | Examination) -> None:
        """Accept a message of a rank."""
        if isinstance(message, Vitals):
            self._records.append(message)
        elif isinstance(message, Examination):
            self._examinations.append((rank, message))
            if self._page is not None:
                self._page.examined(rank, message)
        elif message["type"] == "output":
            self._output.put(rank, message["stream"], message["text"])
        elif self._page is not None:
            self._page.profiled(rank, message)

    # ---- the caller's thread --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._tracking.start(self._facts)
        if self._page_address is not None:
            self._guarded("the page of the run", self._open_page, self._page_address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:  # end each, even if another one fails
            last.callback(self._tracking.end, error, self._summary)
            if self._page is not None:
                last.callback(self._page.close)
                last.callback(self._guarded, "the page of the run", self._end_page, self._page, error)
            self._display.end(None)

    def ask(self, hub: HubServer) -> None:
        """Let this hub examine ranks that do not move."""
        self._hub = hub

    @property
    def hang(self) -> HangVerdict | None:
        """Why the run does not progress; None if it does."""
        return self._watch.verdict

    def flush(self) -> None:
        """Show what is new; called many times a second."""
        for rank, stream, text in self._output.take():
            self._display.lines(rank, stream, text)
            if self._page is not None:
                self._page.lines(rank, stream, text)
        now = time.monotonic()
        while self._records:
            self._take(self._records.popleft(), now)
        while self._examinations:
            self._guarded("the look for hangs", self._watch.examined, *self._examinations.popleft(), now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            self._guarded("the look for hangs", self._look_for_hangs, now)
            self._display.show(self._view, now)
            if self._page is not None:
                self._guarded("the page of the run", self._page.show, self._picture, now)

    def result(self, values: Iterable[R]) -> RunResult[R]:
        """Show the summary of a successful run, and return the summary and the history."""
        self._next_look = 0.0  # check for hangs once more: a wait that was reported has ended with the run
        self.flush()
        now = time.monotonic()
        self._display.show(self._view, now)  # the last records may have arrived since the display was updated
        self._guarded("the view of the run", self._summarize, self._view, now)
        if self._summary is None:
            self._summarize(RunView(*self._begun), now)
        self._display.end(self._summary)
        return RunResult(values, self._summary, self._history)

    def _open_page(self, address: PageAddress) -> None:
        from spark_hvd.runner.watch.display.page import Page, announce

        def examine(rank: int) -> None:
            if self._hub is not None:  # without a hub, the page reports that nobody answers
                self._hub.examine(rank)

        def profile(rank: int, number: int, steps: int) -> None:
            if self._hub is not None:
                self._hub.profile(rank, number, steps)

        self._page = Page(address, examine, profile)
        announce(self._page, self._begun[0], in_notebook())

    def _end_page(self, page: Page, error: BaseException | None) -> None:
        facts = {} if self._summary is None else dict(self._summary.facts())
        page.end(partial(self._picture, True), facts, error)

    def _picture(self, at_end: bool = False) -> dict[str, Any]:
        from spark_hvd.runner.watch.display.page import picture

        snapshot = self._view.snapshot(time.monotonic())
        verdict = None if self.hang is None else self.hang.text
        return picture(snapshot.at_end() if at_end else snapshot, self._history, verdict)

    def _look_for_hangs(self, now: float) -> None:
        match self._watch.tick(now):
            case Examine():
                if self._hub is not None:
                    self._hub.examine()
            case HangVerdict() as verdict:
                _log.warning("%s", harmless(verdict.text))
                self._view.mark(None if verdict.kind is Kind.OVER else verdict.headline)

    def _take(self, record: Vitals, now: float) -> None:
        self._guarded("the view of the run", self._see, record, now)
        self._guarded("the history", self._history.take, record, now)
        self._guarded("the look for hangs", self._watch.take, record, now)
        self._tracking.take(record)

    def _see(self, record: Vitals, now: float) -> None:
        self._view.take(record, now)
        if record.ended:
            self._view.ended(record.rank)

    def _summarize(self, view: RunView, now: float) -> None:
        self._summary = view.summary(now)

    def _guarded(self, observer: str, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an observer; if it fails, stop calling it, and let the run continue."""
        if observer in self._failed:
            return
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._failed.add(observer)
            _log.warning("%s has failed (%r); the run continues without it", observer, error, exc_info=True)


def make_monitor(config: CommonConfig, fn: Callable[..., Any], size: int) -> Monitor:
    """Make the monitor of a run.

    Raises:
        TypeError: The tracker is not a tracker.
        ValueError: The variable for the page has no valid address.
    """
    name = name_of(fn)
    title = f"{name} on {size} rank{'' if size == 1 else 's'}"
    display = make_display(config.progress, config.verbose, config.stdout, config.stderr)
    tracker = config.tracker
    facts = {} if tracker is None else facts_of(config, name, num_proc=size, **getattr(fn, "facts", {}))
    return Monitor(
        display,
        title,
        size,
        Tracking(tracker),
        facts,
        price_per_hour=config.price_per_hour,
        gpus_per_rank=config.gpus_per_proc,
        page=PageAddress.parse(os.environ.get(PAGE), PAGE) if config.page is None else PageAddress.parse(config.page),
    )
