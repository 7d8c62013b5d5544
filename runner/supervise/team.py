"""Connects the ranks of one Spark task, or of this machine, to the others, and supervises them together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TypeVar

import zmq

from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS
from spark_hvd.runner.outcome.rows import PickledOutcome
from spark_hvd.runner.supervise.processes import ForkServer
from spark_hvd.runner.supervise.supervised import RankJob
from spark_hvd.runner.supervise.supervisor import supervise

T = TypeVar("T")
_CONNECT_WAIT = 8.0
"""Seconds to reach the driver's hub; less than the hub waits for missing tasks (FALLBACK_AFTER)."""


class LostError(RuntimeError):
    """This rank was stopped because other ranks or the hub went silent."""


class RefusedError(RuntimeError):
    """The hub has refused to let this task run fn."""


def meet(links: Sequence[Link], attempt: int, start_timeout: float) -> bool:
    """Send hello to the hub for each rank of this task, and wait until every rank of the run has done so.

    Returns:
        False if the ranks must meet elsewhere because some of them cannot reach this hub; the links are then closed.

    Raises:
        RefusedError: The task was started a second time, or the run has been stopped.
    """
    connected = [link.wait_connected(min(_CONNECT_WAIT, start_timeout)) for link in links]
    if not all(connected):
        for link in links:
            link.close(discard=True)
        return False
    for link in links:
        link.hello(attempt)
    answers = {_answer(link, attempt, start_timeout) for link in links}
    if answers == {"met"}:
        return True
    for link in links:
        if "stop" in answers:
            link.send("gone")
        link.close()
    if answers == {"fallback"}:
        return False
    ranks = ", ".join(str(link.rank) for link in links)
    raise RefusedError(f"rank {ranks} does not start: the run was stopped before all ranks had met ({answers}).")


def _answer(link: Link, attempt: int, start_timeout: float) -> str:
    message, deadline = None, time.monotonic() + start_timeout
    while message is None and time.monotonic() < deadline and link.hub_silence() < link.patience:
        message = link.wait(HEARTBEAT_SECONDS)
    if message is None:
        return "nothing"
    if message["type"] == "refuse":
        link.close()
        raise RefusedError(
            f"Spark started the task of rank {link.rank} a second time (task attempts {message['first_attempt']} and "
            f"{attempt}). fn does not run twice unless you ask for it, because it may have side effects. Start the run "
            "again."
        )
    return str(message["type"])


def supervise_all(
    jobs: Sequence[RankJob],
    links: Sequence[Link],
    server: ForkServer,
    on_lines: Callable[[str, list[str]], None] | None = None,
) -> list[PickledOutcome]:
    """Run several ranks to their end; see :func:`spark_hvd.runner.supervise.supervisor.supervise`.

    ``links`` are in the order of ``jobs``. Output goes to ``on_lines`` (stream, lines), or to the hub if that is None.

    Returns:
        The outcomes, in the same order.
    """
    if len(jobs) == 1:
        return [supervise(jobs[0], links[0], server, on_lines)]

    def one(number: int) -> PickledOutcome:
        try:
            return supervise(jobs[number], links[number], server, on_lines)
        except BaseException:  # a bug of ours, which is raised once the other ranks have been stopped
            with contextlib.suppress(zmq.ZMQError):  # the link itself may be broken
                links[number].send("ended", ok=False, echo=False)
            raise

    calls = in_threads(one, len(jobs))
    futures.wait(calls)
    return [call.result() for call in calls]


def in_threads(
    work: Callable[[int], T], count: int, name: str = "task", calls: list[futures.Future[T]] | None = None
) -> list[futures.Future[T]]:
    """Call a function with each number below ``count``, each in a daemon thread.

    The threads of a ThreadPoolExecutor would delay the exit of the program. The futures are in ``calls``, an empty
    list, before the first thread starts: a caller who is interrupted meanwhile knows of all that have started, and can
    cancel the others.
    """
    calls = [] if calls is None else calls
    calls += [futures.Future() for _ in range(count)]

    def call(number: int) -> None:
        if not calls[number].set_running_or_notify_cancel():
            return
        try:
            calls[number].set_result(work(number))
        except BaseException as error:
            calls[number].set_exception(error)

    for number in range(count):
        threading.Thread(target=call, args=[number], name=f"spark_hvd-{name}-{number}", daemon=True).start()
    return calls
