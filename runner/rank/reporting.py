"""The thread that reports a rank's state to its supervisor, once a second, and more often in a new world."""

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
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
_LAST_RECORD_SECONDS = 1.0
_SOON = 0.1
"""Seconds between two checks whether the rank is in a world, so that even a short world is reported."""
_YOUNG = 10.0
"""Seconds for which a rank in a new world reports more often, so that a short world has a point for each step."""
_OFTEN = 0.05
_MOST_A_SECOND = 400
"""Maximum number of records per second of all ranks in those seconds; with many ranks, each reports less often."""


class VitalsSender:
    """Sends this rank's record regularly, from :meth:`start` to :meth:`stop`, and the profiles that were requested.

    Its threads call ``send`` with the type of a message and its fields. They call ``hear`` before each record, to check
    for a message to this rank.
    """

    def __init__(self, send: Callable[..., None], hear: Callable[[], None] = lambda: None) -> None:
        self._send, self._hear = send, hear
        self.profiler = StepProfiler(lambda **fields: self._send_unless_silent("profile", **fields))
        self._process = uuid.uuid4().hex
        self._sending = threading.Lock()  # held for each record, so that after stop() not even half of one follows
        self._stopped = threading.Event()
        self._silent = False
        self._thread = threading.Thread(target=self._run, name="spark_hvd-vitals", daemon=True)

    def start(self) -> None:
        """Start reporting; the first record is sent at once."""
        activity.watched = True
        self._thread.start()

    def stop(self) -> None:
        """Send a last record, so that no part of the run is missing, and stop for good. Idempotent."""
        self.profiler.end()
        self._stopped.set()
        activity.news.set()
        if not self._thread.is_alive():
            return
        # If a GPU hangs, its metrics cannot be read. That must not keep this rank from reporting why it failed.
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
                    self._send_vitals(vitals)
                elif (known := vitals or before) is not None:
                    self._send_vitals(replace(known, ended=True))
                before = vitals
                if last:
                    return
                if activity.news.wait(_pause(vitals, time.monotonic() - since)):
                    activity.news.clear()
                    since = time.monotonic()
        except OSError:  # the supervisor is gone, and this process will be killed
            return
        except Exception:  # only a row of the live table will be missing, so training continues
            _log.exception("this rank can no longer report its state")

    def _send_vitals(self, vitals: Vitals) -> None:
        self._send_unless_silent("vitals", vitals=replace(vitals, process=self._process).to_message())

    def _send_unless_silent(self, kind: str, **fields: Any) -> None:
        with self._sending:
            if not self._silent:
                self._send(kind, **fields)


def _pause(vitals: Vitals | None, age: float) -> float:
    """Return the seconds until the next record."""
    if vitals is None:
        return _SOON
    return HEARTBEAT_SECONDS if age >= _YOUNG else min(HEARTBEAT_SECONDS, max(_OFTEN, vitals.size / _MOST_A_SECOND))
