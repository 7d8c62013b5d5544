"""Runs of one program share the slots of its Spark application: one that finds too few free waits for others to end.

Spark makes such a run wait too, but by then its ``start_timeout`` counts, and its processes are there already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from spark_hvd.runner.stopping import check_stop

_log = logging.getLogger(__name__)
_LOOK_EVERY = 0.1


class SlotShares:
    """Which run has which share of the slots. Who asks first is served first: no large run is passed over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free = Fraction(1)
        self._queue: list[object] = []
        self._threads: list[int] = []
        """Of the runs that hold slots."""
        self._told = False

    @contextmanager
    def held(self, tasks: int, slots: int | None) -> Iterator[None]:
        """Hold slots for this run; waits until they are free.

        Args:
            tasks: How many the run takes.
            slots: How many there would be for tasks of its kind, were no other run there: kinds differ in cores and
                GPUs, so shares are compared. None where they cannot be counted; then there is no wait.

        Raises:
            KeyboardInterrupt: see :mod:`spark_hvd.runner.stopping`.
        """
        share = Fraction(0) if slots is None else min(Fraction(1), Fraction(tasks, max(slots, 1)))
        me, thread = object(), threading.get_ident()
        with self._changed:
            if thread in self._threads:  # within a run, as from its tracker: the wait for that one would never end
                share = Fraction(0)
            self._queue.append(me)
            try:
                if not self._may(me, share):
                    _log.log(
                        logging.INFO if self._told else logging.WARNING,
                        "a run waits for %d of the %s slots, which other runs of this program hold; it starts when "
                        "they are free, and Ctrl-C ends it",
                        tasks,
                        slots,
                    )
                    self._told = True
                while not self._may(me, share):
                    self._changed.wait(_LOOK_EVERY)
                    check_stop()
                self._free -= share
                self._threads.append(thread)
            finally:
                self._queue.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._threads.remove(thread)
                self._changed.notify_all()

    def _may(self, me: object, share: Fraction) -> bool:
        return share == 0 or (self._queue[0] is me and share <= self._free)


slot_shares = SlotShares()
"""Those of this program, which has one Spark application at a time."""
