"""Checks whether the hosts of ranks that have not come up answer the driver at all.

Spark sends a task to an executor in a message that needs no reply. If the host was cut off before the run, the task is
lost, and Spark notices only after two minutes. Every executor has a port for blocks of data, to which the driver may
connect. The check connects to that port and asks for nothing.
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
"""Seconds that ranks get to come up before their hosts are checked. Imports on a cold host take longer, which does no
harm, because its executor answers."""
_LOOK_EVERY = 10.0
_ANSWER = 3.0
"""Seconds that a host gets to answer, twice, so that a run survives a network that is down for five; TCP retries after
one second."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where Spark has put the tasks of a run.

    Attributes:
        tasks: Executor and host of each task, by partition.
        executors: Host and port of every live executor.
        num_tasks: How many tasks the run has; None means one per rank.
    """

    tasks: Mapping[int, tuple[str, str]]
    executors: Mapping[str, tuple[str, int]]
    num_tasks: int | None = None

    def hosts(self, size: int) -> dict[int, str]:
        """Return the host of each rank; empty until all tasks are placed."""
        return {info.rank: info.host for info in self._layout(size).ranks} if self._complete(size) else {}

    def executors_of_ranks(self, size: int) -> dict[int, str]:
        """Return the executor of each rank; empty until all tasks are placed."""
        if not self._complete(size):
            return {}
        layout, each = self._layout(size), self._ranks_each(size)
        return {
            layout.of_process(task * each + place).rank: executor
            for task, (executor, _) in self.tasks.items()
            for place in range(each)
        }

    def on_executor(self, executor: str, size: int) -> str | None:
        """Name the ranks of an executor and their host; None if they are not known."""
        hosts = self.hosts(size)
        ranks = sorted(rank for rank, other in self.executors_of_ranks(size).items() if other == executor)
        return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) or None

    def _complete(self, size: int) -> bool:
        return sorted(self.tasks) == list(range(self.num_tasks or size))

    def _ranks_each(self, size: int) -> int:
        return size // (self.num_tasks or size)

    def _layout(self, size: int) -> WorldLayout:
        each = self._ranks_each(size)
        return WorldLayout.from_hosts([self.tasks[task][1] for task in sorted(self.tasks) for _ in range(each)])


@dataclass(slots=True)
class Reach:
    """Finds out why ranks do not come up."""

    size: int
    placement: Callable[[], Placement | None]
    _look_at: float = field(default_factory=lambda: time.monotonic() + _FIRST_LOOK)

    def missing(self, started: Iterable[int]) -> str | None:
        """Name the ranks that cannot have come up because their hosts do not answer; None if none are known.

        A call checks the hosts at most every ten seconds, and otherwise returns at once. It blocks for six seconds if
        a host does not answer. If no host answers, a firewall may protect all of them, and the result is None.
        """
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_EVERY
        placement = self.placement()
        hosts = {} if placement is None else placement.hosts(self.size)
        if placement is None or not hosts:
            return None
        targets = set(placement.executors.values())
        silent = unanswered(unanswered(targets, _ANSWER), _ANSWER)
        answering = {host for host, _ in targets - silent}
        gone = {host for host, _ in silent} - answering
        absent = [rank for rank in sorted(set(hosts) - set(started)) if hosts[rank] in gone]
        if not absent or not answering:
            return None
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in absent)
        return f"{names} (Spark has started the task, but the executor did not answer within {2 * _ANSWER:g} s)"

    def absent(self, started: Iterable[int]) -> str:
        """Name the ranks that have not come up, with their hosts; empty if Spark does not know the hosts."""
        ranks = sorted(set(range(self.size)) - set(started))
        placement = self.placement()
        hosts = {} if placement is None else placement.hosts(self.size)
        if not hosts:
            return ""
        return "Not heard from: " + ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) + ". "


def unanswered(targets: Iterable[tuple[str, int]], timeout: float) -> set[tuple[str, int]]:
    """Return the (host, port) pairs from which nothing comes back within ``timeout`` seconds, not even a refusal."""
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
