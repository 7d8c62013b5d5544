"""A closer look at one rank's process from outside: where each of its threads stands, and whether it works at all."""

from __future__ import annotations

import time

import psutil

from spark_hvd.runner.channel.examination import Examination
from spark_hvd.runner.outcome.endings import trim_stacks
from spark_hvd.runner.supervise.processes import RankProcess

_SECONDS = 1.0
"""For how long the process' use of processors is watched."""
_STACKS_SECONDS = 0.3
"""How long its fault handler gets to write."""


class Probe:
    """An examination under way; it blocks nobody. Call :meth:`turn` when :attr:`due` has come, until it has a result.

    Args:
        process: Whom to examine.
    """

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._started = time.monotonic()
        self._used = _cpu_seconds(process.pid)
        self._cpu: float | None = None
        self.due = self._started + _SECONDS
        """When there is something to do, on the monotonic clock."""

    def turn(self, now: float) -> Examination | None:
        """Do the next part of the examination.

        Args:
            now: The monotonic clock.

        Returns:
            What was found, once it is complete.
        """
        if now < self.due:
            return None
        if self._cpu is None:
            self._cpu = max(0.0, _cpu_seconds(self._process.pid) - self._used) / (now - self._started)
            self._process.ask_for_stacks()
            self.due = now + _STACKS_SECONDS
            return None
        stacks = trim_stacks(self._process.stacks())
        self._process.clear_stacks()  # what is found there later is to be of a crash
        return Examination(self._cpu, _status(self._process.pid), stacks)


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process and of all that it has started."""
    total = 0.0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for one in family:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
