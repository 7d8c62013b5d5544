"""What this process is doing, kept where it costs next to nothing, and gathered when somebody asks.

Queues and reducers know what is under way in them anyway; here they only say so when they are asked. What is counted on
the way is a number, a name and a moment for each collective, and the time for which the program had to wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from spark_hvd.world.vitals import Underway

_SHOWN = 8
_EPOCHS, _EPOCH_SECONDS = 64, 10.0


class Source(Protocol):
    """What knows of collectives under way. Asked by another thread than the one that works."""

    def underway(self, now: float) -> Iterable[Underway]:
        """The collectives that this rank has entered and that have not ended; `now` is ``time.monotonic()``."""


class Loop(Protocol):
    """A loop of ``hvd.progress``."""

    def facts(self, now: float) -> dict[str, Any]:
        """How far it is, as fields of :class:`~spark_hvd.world.vitals.Vitals`; `now` is ``time.monotonic()``."""

    @property
    def total_steps(self) -> int:
        """Steps done in this process, in this loop and before it."""

    def report(self, /, **metrics: Any) -> None:
        """Take the latest values of metrics."""

    def close(self) -> Any:
        """End the loop; returns what the loop that follows it is to add to."""


class Activity:
    """See the module's description. One for a process; cheap enough to be kept always."""

    def __init__(self) -> None:
        self.entered = 0
        self.last: tuple[str, ...] = ()
        """The words of its name: to put them together takes longer than to keep them."""
        self.last_at = 0.0
        self.at_step: Callable[[], None] | None = None
        """Called by the thread that trains, after each step; None: nobody wants to know of steps."""
        self.watched = False
        """Whether somebody is told of this rank, and will say what is wrong."""
        self.news = threading.Event()
        """Set where whoever tells of this rank is to do so now."""
        self._waited = 0.0
        self._waits_since = 0.0
        self.optimizer_steps = 0
        """The steps of DistributedOptimizer; they tell something where there is no loop of `hvd.progress`."""
        self.steps_before = 0
        """Steps that this process had done when its present world began."""
        self.kept_steps: int | None = None
        self._keeping = threading.Lock()  # checkpoints are written by another thread
        self.lost_steps = 0
        self.progress: Loop | None = None
        """The loop that runs, or ran last."""
        self._epochs: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_EPOCHS)
        self._told_by_fit = False
        self._epoch: int | None = None
        self._values: dict[str, float] = {}
        """The last ones of those loops of that epoch that have ended."""
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[tuple[str, float, tuple[int, ...] | None]] = []

    @property
    def total_steps(self) -> int:
        """Steps done in this process."""
        return self.optimizer_steps if self.progress is None else self.progress.total_steps

    def enter_world(self) -> None:
        """Another world begins."""
        self.steps_before = self.total_steps

    def keep_steps(self, steps: int | None = None) -> None:
        """The first ``steps``, or all that were done so far, are in a commit or a checkpoint that is written."""
        steps = self.total_steps if steps is None else steps
        with self._keeping:
            self.kept_steps = max(steps, self.kept_steps or 0)

    def load_steps(self) -> None:
        """A checkpoint was loaded: before its first step, a process has nothing to lose that is not in it."""
        if not self.total_steps:
            self.keep_steps()

    def undo_steps(self) -> None:
        """The last commit was restored: work since then is lost."""
        self.lost_steps += self.total_steps - (self.kept_steps or 0)
        self.keep_steps()

    def add_epoch(self, means: Mapping[str, float]) -> None:
        """An epoch of a fit is done, with these means; the values of its loops, which are of batches, are not told."""
        self._told_by_fit = True
        self._epochs.append((time.monotonic(), means))

    def end_loop(self, epoch: int | None = None, *, last: bool = False) -> None:
        """The newest loop of ``hvd.progress`` is over: its last values are those of its epoch, if that is over too.

        ``epoch`` is that of the loop that follows, if this is not the ``last``; None: that loop belongs to the epoch
        before it.
        """
        if self.progress is None or self._told_by_fit or not self.watched:
            return
        facts = self.progress.facts(time.monotonic())
        if facts["epoch"] is not None:
            self._epoch = facts["epoch"]
        stage = "" if facts["stage"] in ("", "train") else f"{facts['stage']}/"
        self._values |= {f"{stage}{name}": value for name, value in facts["metrics"].items()}
        if self._epoch is None or not (last or (epoch is not None and epoch != self._epoch)):
            return
        if last or (epoch is not None and epoch > self._epoch):  # else it was left, and is to be done again
            self._epochs.append((time.monotonic(), {**self._values, "epoch": self._epoch + 1}))
        self._values = {}

    def epochs_done(self, now: float) -> list[Mapping[str, float]]:
        """Those of the last seconds: whoever is told once a second hears of each, and of none for ever."""
        return [means for at, means in list(self._epochs) if now - at < _EPOCH_SECONDS]

    def add_source(self, source: Source) -> None:
        """Ask it from now on, for as long as it lives."""
        self._sources.add(source)

    def enter(self, *name: str) -> float:
        """This rank enters a collective.

        Returns:
            ``time.monotonic()``.
        """
        self.entered += 1
        self.last = name
        self.last_at = now = time.monotonic()
        return now

    @contextmanager
    def waiting(self, name: str, ranks: tuple[int, ...] | None = None) -> Iterator[None]:
        """Enter a collective of these ranks (None: all) that no source knows of, and wait for its end."""
        one = (
            name,
            self.enter(name),
            ranks,
        )  # two threads may wait for collectives of one name, but not since one moment
        self._waiting.append(one)
        outermost = not self._waits_since
        if outermost:
            self.wait_begins(one[1])
        try:
            yield
        finally:
            if outermost:
                self.wait_ends(time.monotonic())
            self._waiting.remove(one)

    def wait_begins(self, now: float) -> None:
        """The program can do nothing but wait for communication from now on."""
        self._waits_since = now

    def wait_ends(self, now: float) -> None:
        """Note that the program can go on."""
        self._waited += now - (self._waits_since or now)
        self._waits_since = 0.0

    def waited(self, now: float) -> float:
        """Seconds that the program has waited for communication, until `now`."""
        since = self._waits_since
        return self._waited + (now - since if since else 0.0)

    def underway(self, now: float) -> list[Underway]:
        """What this rank has entered and has not ended, oldest first; eight at most."""
        found = [Underway(name, now - since, ranks) for name, since, ranks in list(self._waiting)]
        for source in list(self._sources):
            found += source.underway(now)
        return sorted(found, key=lambda one: -one.seconds)[:_SHOWN]


activity = Activity()
"""What this process is doing."""
