"""The thread of a rank that tells its supervisor how the rank is: once a second, and more often in a new world."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spark_hvd.context.observe import observe
from spark_hvd.context.profile import StepProfiler
from spark_hvd.runner.channel.silence import BEAT
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
_LAST_RECORD_SECONDS = 1.0
_SOON = 0.1
"""Seconds between two looks whether the rank is in a world, so that a short one is told of too."""
_YOUNG = 10.0
"""Seconds of a world in which a rank tells more often, so that a short one has a point a step."""
_OFTEN = 0.05
_MOST_A_SECOND = 400
"""Records of all ranks: with many of them, each tells less often in those seconds too."""


class VitalsSender:
    """Sends the record of this rank regularly, from :meth:`start` to :meth:`stop`, and profiles that are asked for.

    Threads of its own call ``send`` with the type of a message and its fields. ``hear`` is called before each record,
    to look whether there is a message for this rank.
    """

    def __init__(self, send: Callable[..., None], hear: Callable[[], None] = lambda: None) -> None:
        self._send, self._hear = send, hear
        self.profiler = StepProfiler(lambda **fields: self._told("profile", **fields))
        self._process = uuid.uuid4().hex
        self._sending = threading.Lock()  # held over each record: after stop() none may follow, not even half of one
        self._stopped = threading.Event()
        self._silent = False
        self._thread = threading.Thread(target=self._run, name="spark_hvd-vitals", daemon=True)

    def start(self) -> None:
        """Begin; the first record goes out at once."""
        activity.watched = True
        self._thread.start()

    def stop(self) -> None:
        """Send a last record, so that the whole run is known, and end: nothing is sent after that. Idempotent."""
        self.profiler.end()
        self._stopped.set()
        activity.news.set()
        if not self._thread.is_alive():
            return
        # A metric on a GPU that hangs cannot be read, and must not keep this rank from saying why it failed.
        self._thread.join(_LAST_RECORD_SECONDS)
        with self._sending:
            self._silent = True

    def _run(self) -> None:
        before: Vitals | None = None
        since = time.monotonic()
        try:
            while True:
                self._hear()
                last = self._stopped.is_set()
                if last:
                    activity.end_loop(last=True)
                vitals = observe()
                if vitals is not None and not last:
                    self._tell(vitals)
                elif (known := vitals or before) is not None:
                    self._tell(replace(known, ended=True))
                before = vitals
                if last:
                    return
                if activity.news.wait(_pause(vitals, time.monotonic() - since)):
                    activity.news.clear()
                    since = time.monotonic()
        except OSError:  # the supervisor has gone, and takes this process with it
            return
        except Exception:  # what is missing then is a row of a table, which must not end a training
            _log.exception("this rank can tell no more of itself")

    def _tell(self, vitals: Vitals) -> None:
        self._told("vitals", vitals=replace(vitals, process=self._process).to_message())

    def _told(self, kind: str, **fields: Any) -> None:
        with self._sending:
            if not self._silent:
                self._send(kind, **fields)


def _pause(told: Vitals | None, age: float) -> float:
    """Seconds until the next look."""
    if told is None:
        return _SOON
    return BEAT if age >= _YOUNG else min(BEAT, max(_OFTEN, told.size / _MOST_A_SECOND))
