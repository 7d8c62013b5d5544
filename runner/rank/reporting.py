"""The thread of a rank that tells its supervisor how the rank is: once a second, and more often at first."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spark_hvd.context.observe import observe
from spark_hvd.runner.channel.silence import BEAT
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
_LAST_RECORD_SECONDS = 1.0
_SOON = 0.1
"""Seconds between two looks whether the rank is in a world, so that a short one is told of too."""
_YOUNG = 10.0
"""Seconds from a process' first record in which it tells more often, so that a short run has a point a step."""
_OFTEN = 0.05
_MOST_A_SECOND = 400
"""Records of all ranks: with many of them, each tells less often in its first seconds too."""


class Reporting:
    """Runs from :meth:`start` to :meth:`stop`.

    Args:
        send: Sends a record, as plain data; called by the thread.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._process = uuid.uuid4().hex
        self._sending = threading.Lock()  # held over each record: after stop() none may follow, not even half of one
        self._stopped = threading.Event()
        self._silent = False
        self._first: Vitals | None = None
        self._thread = threading.Thread(target=self._run, name="spark_hvd-vitals", daemon=True)

    def start(self) -> None:
        """Begin; the first record goes out at once."""
        activity.watched = True
        self._thread.start()

    def stop(self) -> None:
        """Send a last record, so that the whole run is known, and end: nothing is sent after that. Idempotent."""
        self._stopped.set()
        if not self._thread.is_alive():
            return
        # A metric on a GPU that hangs cannot be read, and must not keep this rank from saying why it failed.
        self._thread.join(_LAST_RECORD_SECONDS)
        with self._sending:
            self._silent = True

    def _run(self) -> None:
        before: Vitals | None = None
        try:
            while True:
                last = self._stopped.is_set()
                vitals = observe()
                if vitals is not None and not last:
                    self._tell(vitals)
                elif (known := vitals or before) is not None:
                    self._tell(replace(known, ended=True))
                before = vitals
                if last:
                    return
                self._stopped.wait(_SOON if vitals is None else self._pause(vitals))
        except OSError:  # the supervisor has gone, and takes this process with it
            return
        except Exception:  # what is missing then is a row of a table, which must not end a training
            _log.exception("this rank can tell no more of itself")

    def _pause(self, told: Vitals) -> float:
        """Seconds until the next record."""
        self._first = self._first or told
        young = told.clock - self._first.clock < _YOUNG
        return min(BEAT, max(_OFTEN, told.size / _MOST_A_SECOND)) if young else BEAT

    def _tell(self, vitals: Vitals) -> None:
        message = replace(vitals, process=self._process).to_message()
        with self._sending:
            if not self._silent:
                self._send(message)
