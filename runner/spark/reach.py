"""Whether hosts on which Spark has started tasks answer the driver at all, while their ranks have not come up.

Spark hands a task to an executor by a message that gets no answer, so a host that was cut off before the run swallows
it, and Spark notices after two minutes. Every executor listens on a port for blocks of data, to which the driver is
entitled to connect; it is asked for nothing here.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from spark_hvd.world.layout import WorldLayout

_FIRST_LOOK = 4.0
"""Seconds that ranks get to come up before their hosts are asked; imports on a cold host take longer, which does no
harm: its executor answers."""
_LOOK_EVERY = 10.0
_ANSWER = 3.0
"""Seconds that a host gets to answer: TCP asks a second time after one."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where Spark has put the tasks of a run.

    Attributes:
        tasks: Executor and host of each task, by partition.
        executors: Host and port of every executor that Spark holds to be alive.
        num_tasks: How many tasks the run has; None for one a rank.
    """

    tasks: Mapping[int, tuple[str, str]]
    executors: Mapping[str, tuple[str, int]]
    num_tasks: int | None = None

    def hosts(self, size: int) -> dict[int, str]:
        """Host of each rank; empty while not all tasks are placed."""
        return {info.rank: info.host for info in self._layout(size).ranks} if self._complete(size) else {}

    def executors_of_ranks(self, size: int) -> dict[int, str]:
        """Executor of each rank; empty while not all tasks are placed."""
        if not self._complete(size):
            return {}
        layout, each = self._layout(size), self._ranks_each(size)
        return {
            layout.of_process(task * each + place).rank: its
            for task, (its, _) in self.tasks.items()
            for place in range(each)
        }

    def on_executor(self, executor: str, size: int) -> str | None:
        """Names the ranks of an executor with their host, or None where that is not known."""
        hosts = self.hosts(size)
        there = sorted(rank for rank, its in self.executors_of_ranks(size).items() if its == executor)
        return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in there) or None

    def _complete(self, size: int) -> bool:
        return sorted(self.tasks) == list(range(self.num_tasks or size))

    def _ranks_each(self, size: int) -> int:
        return size // (self.num_tasks or size)

    def _layout(self, size: int) -> WorldLayout:
        each = self._ranks_each(size)
        return WorldLayout.from_hosts([self.tasks[task][1] for task in sorted(self.tasks) for _ in range(each)])


@dataclass(slots=True)
class Reach:
    """Looks after ranks that do not come up."""

    size: int
    placement: Callable[[], Placement | None]
    _look_at: float = field(default_factory=lambda: time.monotonic() + _FIRST_LOOK)

    def missing(self, started: Iterable[int]) -> str | None:
        """Name the ranks that cannot have come up, because their hosts do not answer; None if there are none known.

        Asks every ten seconds, and else returns at once. Blocks for three seconds when some host does not answer. If no
        host does, nothing is concluded: a firewall may stand before all of them.
        """
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_EVERY
        there = self.placement()
        hosts = {} if there is None else there.hosts(self.size)
        if there is None or not hosts:
            return None
        targets = set(there.executors.values())
        silent = unanswered(targets, _ANSWER)
        answering = {host for host, _ in targets - silent}
        gone = {host for host, _ in silent} - answering
        absent = [rank for rank in sorted(set(hosts) - set(started)) if hosts[rank] in gone]
        if not absent or not answering:
            return None
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in absent)
        return f"{names} (Spark has started the task, but its executor does not answer within {_ANSWER:g} s)"

    def absent(self, started: Iterable[int]) -> str:
        """Name the ranks that have not come up, with their hosts where Spark can tell."""
        ranks = sorted(set(range(self.size)) - set(started))
        there = self.placement()
        hosts = {} if there is None else there.hosts(self.size)
        if not hosts:
            return ""
        return "Not heard of: " + ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) + ". "


def unanswered(targets: Iterable[tuple[str, int]], timeout: float) -> set[tuple[str, int]]:
    """The addresses (host, port) from which nothing comes back within ``timeout`` seconds, not even a refusal."""
    waiting: dict[socket.socket, tuple[str, int]] = {}
    silent: set[tuple[str, int]] = set()
    with ExitStack() as closing, selectors.DefaultSelector() as selector:
        for host, port in targets:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                attempt = closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
                attempt.setblocking(False)
                attempt.connect_ex(address)
            except OSError:
                silent.add((host, port))
                continue
            waiting[attempt] = (host, port)
            selector.register(attempt, selectors.EVENT_WRITE)
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                attempt = key.fileobj  # type: ignore[assignment]
                selector.unregister(attempt)
                target = waiting.pop(attempt)
                error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error not in (0, errno.ECONNREFUSED):
                    silent.add(target)
    return silent | set(waiting.values())
