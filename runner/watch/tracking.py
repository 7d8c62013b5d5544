"""``Tracker``: records runs elsewhere, such as in MLflow; only the driver calls it."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

import spark_hvd
from spark_hvd.runner.config import CommonConfig, RunConfig

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
Facts = Mapping[str, str | int | float]


class StopRun(Exception):  # noqa: N818 - not an error: a tracker ends, for example, an unpromising trial
    """Raise this, or a subclass, in a tracker's ``take``: the run then stops its ranks and raises it."""

    __module__ = "spark_hvd.runner"


class Tracker(Protocol):
    """Records runs, one after the other. Only the thread that called ``run`` calls it."""

    __module__: str = "spark_hvd.runner"

    def start(self, facts: Facts) -> None:
        """Record the beginning of a run, before any rank starts. An exception ends the run.

        Args:
            facts: The run's options, and versions, by name.
        """

    def take(self, vitals: Vitals) -> None:
        """Take a record of a rank, which arrives about once a second, and more often at first. Must not block.

        Args:
            vitals: The record.

        Raises:
            StopRun: to end the run.
        """

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """Record the end of a run. Called only if ``start`` has returned.

        Args:
            error: The exception that ``run`` raises; None if it succeeded.
            summary: How the run went; None if the driver received nothing from the ranks.
        """


class Tracking:
    """A guard around a tracker (or None), whose errors cannot disturb a run that has begun. It may still end the run.

    Raises:
        TypeError: It is not a tracker.
    """

    def __init__(self, tracker: Tracker | None) -> None:
        if tracker is not None and not all(hasattr(tracker, name) for name in ("start", "take", "end")):
            raise TypeError(
                f"tracker={tracker!r}: expected an object with start, take and end, such as "
                "spark_hvd.runner.MlflowTracker()"
            )
        if isinstance(tracker, type):
            raise TypeError(f"tracker={tracker.__name__}: expected an object, not a class: {tracker.__name__}()")
        self._tracker = tracker
        self._failed = False

    def start(self, facts: Facts) -> None:
        """See Tracker; exceptions are passed on."""
        if self._tracker is not None:
            self._tracker.start(facts)

    def take(self, vitals: Vitals) -> None:
        """See Tracker; the first error that is not a StopRun is logged."""
        if self._tracker is not None:
            try:
                self._tracker.take(vitals)
            except StopRun:
                raise
            except Exception as error:
                self._note(error)

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """See Tracker; an error is logged."""
        if self._tracker is not None:
            try:
                self._tracker.end(error, summary)
            except Exception as own:
                self._note(own)

    def _note(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            _log.warning(
                "tracker=%s: %s: %s; the run continues, but its record may be incomplete",
                type(self._tracker).__name__,
                type(error).__name__,
                without_password(str(error)),
            )


def without_password(text: str) -> str:
    """Remove user names and passwords from the URLs in a text."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def facts_of(config: CommonConfig, name: str, **more: str | float | None) -> dict[str, str | int | float]:
    """Return the facts for a tracker's start; entries of ``more`` that are None are left out."""
    found: dict[str, str | int | float | None] = {
        "function": name,
        "num_proc": config.num_proc,
        "backend": config.backend or "auto",
        "max_restarts": (isinstance(config, RunConfig) and config.max_restarts) or None,
        "python": platform.python_version(),
        "spark_hvd": spark_hvd.__version__,
        "torch": _version("torch"),
        "pyspark": _version("pyspark"),
        **more,
    }
    return {key: value for key, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
