"""Records what this process is doing, at almost no cost, and collects it on request.

Queues and reducers know their own collectives in flight, and only report them when asked. While training runs, this
module only counts collectives, keeps the name and time of the last one, and adds up how long the program had to wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from spark_hvd.world.vitals import PendingCollective

_SHOWN = 8
_EPOCHS, _EPOCH_SECONDS = 64, 10.0


class Source(Protocol):
    """Something that knows of collectives in flight. A thread other than the one that works calls it."""

    def pending(self, now: float) -> Iterable[PendingCollective]:
        """Return the collectives that this rank has entered and that have not ended; `now` is ``time.monotonic()``."""


class Loop(Protocol):
    """A loop of ``hvd.progress``."""

    def facts(self, now: float) -> dict[str, Any]:
        """Return the progress as fields of :class:`~spark_hvd.world.vitals.Vitals`; `now` is ``time.monotonic()``."""

    @property
    def total_steps(self) -> int:
        """Steps done in this process, in this loop and before it."""

    def report(self, /, **metrics: Any) -> None:
        """Record the latest values of metrics."""

    def close(self) -> Any:
        """End the loop, and return the totals that the next loop adds to."""


class Activity:
    """What this process is doing; one per process, always kept."""

    def __init__(self) -> None:
        self.entered = 0
        self.last: tuple[str, ...] = ()
        """The words of its name, kept apart because joining them takes longer."""
        self.last_at = 0.0
        self.at_step: Callable[[], None] | None = None
        """Called by the training thread after each step; None if nobody needs it."""
        self.watched = False
        """Whether this rank's state is being reported, so that warnings come from there."""
        self.news = threading.Event()
        """Set to have this rank's state reported at once."""
        self._waited = 0.0
        self._waits_since = 0.0
        self.optimizer_steps = 0
        """Steps of DistributedOptimizer, used where there is no loop of `hvd.progress`."""
        self.steps_before = 0
        """Steps that this process had done when its present world began."""
        self.kept_steps: int | None = None
        self._keeping = threading.Lock()  # checkpoints are written by another thread
        self.lost_steps = 0
        self.progress: Loop | None = None
        """The loop that runs, or that ran last."""
        self._epochs: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_EPOCHS)
        self._fit_reports_epochs = False
        self._epoch: int | None = None
        self._values: dict[str, float] = {}
        """Last values of that epoch's loops that have ended."""
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[tuple[str, float, tuple[int, ...] | None]] = []

    @property
    def total_steps(self) -> int:
        """Steps done in this process."""
        return self.optimizer_steps if self.progress is None else self.progress.total_steps

    def enter_world(self) -> None:
        """Record that another world begins."""
        self.steps_before = self.total_steps

    def keep_steps(self, steps: int | None = None) -> None:
        """Record that the first ``steps``, or all steps so far, are in a commit or a written checkpoint."""
        steps = self.total_steps if steps is None else steps
        with self._keeping:
            self.kept_steps = max(steps, self.kept_steps or 0)

    def load_steps(self) -> None:
        """Record that a checkpoint was loaded: before its first step, a process can lose nothing that is not in it."""
        if not self.total_steps:
            self.keep_steps()

    def undo_steps(self) -> None:
        """Record that the last commit was restored, which loses the steps since then."""
        self.lost_steps += self.total_steps - (self.kept_steps or 0)
        self.keep_steps()

    def add_epoch(self, means: Mapping[str, float]) -> None:
        """Record the means of a fit's epoch; the values of its loops, which are of batches, are not reported."""
        self._fit_reports_epochs = True
        self._epochs.append((time.monotonic(), means))

    def end_loop(self, epoch: int | None = None, *, last: bool = False) -> None:
        """Record that the newest loop of ``hvd.progress`` has ended, and with it perhaps its epoch.

        ``epoch`` is the epoch of the next loop, unless this loop is the ``last``; None: the next loop belongs to the
        same epoch. The epoch's values are the last ones of its loops.
        """
        if self.progress is None or self._fit_reports_epochs or not self.watched:
            return
        facts = self.progress.facts(time.monotonic())
        if facts["epoch"] is not None:
            self._epoch = facts["epoch"]
        stage = "" if facts["stage"] in ("", "train") else f"{facts['stage']}/"
        self._values |= {f"{stage}{name}": value for name, value in facts["metrics"].items()}
        if self._epoch is None or not (last or (epoch is not None and epoch != self._epoch)):
            return
        if last or (epoch is not None and epoch > self._epoch):  # else it was left unfinished, and runs again
            self._epochs.append((time.monotonic(), {**self._values, "epoch": self._epoch + 1}))
        self._values = {}

    def epochs_done(self, now: float) -> list[Mapping[str, float]]:
        """Return the epochs of the last seconds: whoever asks once a second sees each, and none is kept forever."""
        return [means for at, means in list(self._epochs) if now - at < _EPOCH_SECONDS]

    def add_source(self, source: Source) -> None:
        """Ask this source from now on, for as long as it lives."""
        self._sources.add(source)

    def enter(self, *name: str) -> float:
        """Record that this rank enters a collective.

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
        # Two threads may wait for collectives of one name, but not since the same moment.
        one = (name, self.enter(name), ranks)
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
        """Record that the program can only wait for communication from now on."""
        self._waits_since = now

    def wait_ends(self, now: float) -> None:
        """Record that the program can continue."""
        self._waited += now - (self._waits_since or now)
        self._waits_since = 0.0

    def waited(self, now: float) -> float:
        """Return the seconds that the program has waited for communication, until `now`."""
        since = self._waits_since
        return self._waited + (now - since if since else 0.0)

    def pending(self, now: float) -> list[PendingCollective]:
        """Return the collectives that this rank has entered and that have not ended, oldest first; eight at most."""
        found = [PendingCollective(name, now - since, ranks) for name, since, ranks in list(self._waiting)]
        for source in list(self._sources):
            found += source.pending(now)
        return sorted(found, key=lambda one: -one.seconds)[:_SHOWN]


activity = Activity()
"""What this process is doing."""
