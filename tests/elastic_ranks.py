"""Elastic ranks without Spark: forked processes, and a launcher that the test controls."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import cloudpickle
import torch

import spark_hvd.torch as hvd
from spark_hvd.context import init as context
from spark_hvd.context import leave
from spark_hvd.elastic.kv import reach_store
from spark_hvd.transport.torch_private import TCPStore
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.errors import CollectiveError, HostsUpdatedInterrupt
from spark_hvd.world.layout import Endpoint, RankInfo, World, WorldLayout
from tests.forked import fork

SECONDS = 60.0
HOST = "127.0.0.1"


# ---- in the rank's process ------------------------------------------------------------------------------------------


class PipeLauncher:
    """An ElasticLauncher that the test controls over a pipe."""

    def __init__(self, pipe: Connection, timeout: float) -> None:
        self._pipe = pipe
        self._timeout = timeout
        self._said: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._kv: TCPStore | None = None
        self.generation = -1
        self.update_wanted = False
        self.world_failure: str | None = None
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(message)

    def _listen(self) -> None:
        while True:
            try:
                kind, *fields = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(3)
            if kind == "abort":
                generation, text = fields
                if generation == self.generation:
                    self.world_failure = text
                leave.abort(text, generation)
            elif kind == "update":
                self.update_wanted = True
            else:
                self._said.put((kind, *fields))

    def enter(self) -> None:
        self.tell("ready")
        self._kv = None
        while True:
            kind, *fields = self._said.get()
            if kind == "serve":
                self._kv = TCPStore(HOST, 0, None, True, timedelta(seconds=self._timeout), wait_for_workers=False)
                self.tell("store", self._kv.port)
            elif kind == "go":
                break
            elif kind == "end":
                self.tell("value", None)
                os._exit(0)
        generation, info, port = fields
        me = RankInfo(**info)
        self.generation, self.world_failure, self.update_wanted = generation, None, False
        try:
            if self._kv is None:
                self._kv = reach_store(Endpoint(HOST, port), generation, self._timeout)
            world = World(me, Endpoint(HOST, port), generation)
            context.join(world, self._kv, timeout=self._timeout)
        except CollectiveError as error:
            self.tell("not joined", generation, str(error))
            raise
        self.tell("joined", generation)

    def broken(self, error: str) -> None:
        self.tell("broken", self.generation, error)

    def yielded(self) -> None:
        self.tell("yielded", self.generation)

    def committed(self, commits: int) -> None:
        self.tell("committed", commits)

    def finished(self) -> bool:
        self.tell("finished", self.generation)
        kind, *fields = self._said.get()
        assert kind == "verdict", kind
        return bool(fields[0])


def _nursery(address: Any) -> None:
    """Run a fork server of ranks, after loading what optimizers import, which takes seconds."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = Client(address)
    while True:
        try:
            orders.recv()
        except EOFError:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe = Client(address)
            pipe.send(os.getpid())
            try:
                _serve(pipe)
            except EOFError:
                os._exit(4)
            os._exit(0)


def _serve(pipe: Connection) -> None:
    fn, args, timeout, place = cloudpickle.loads(pipe.recv_bytes())
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    launcher = PipeLauncher(pipe, timeout)
    elastic_launcher.install(launcher)
    context.expect(place)
    try:
        value = fn(*args)
    except BaseException:
        launcher.tell("raised", traceback.format_exc())
        os._exit(1)
    launcher.tell("value", value)
    leave.shutdown()


class TrainState:
    """The simplest state: a model, its optimizer, and a count of steps.

    Args:
        model: The model, which is saved, restored and synchronised.
        optimizer: The optimizer of its parameters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0
        self.commits = -1
        self.restored = 0
        self.resets: list[tuple[int, int, int]] = []
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy((self.step, self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self) -> None:
        self.restored += 1
        self._load()

    def _load(self) -> None:
        step, model, optimizer = copy.deepcopy(self._saved)
        self.step = step
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def sync(self) -> None:
        commits = hvd.allgather_object(self.commits)
        root = commits.index(max(commits))
        mine = (self.step, self.model.state_dict(), self.optimizer.state_dict())
        self._saved = hvd.broadcast_object(mine, root_rank=root)
        self.commits = max(0, *commits)
        self._load()

    def on_reset(self) -> None:
        self.resets.append((hvd.generation(), hvd.rank(), hvd.size()))

    def commit(self) -> None:
        self.save()
        self.commits += 1
        launcher = elastic_launcher.installed()
        if launcher is not None:
            launcher.committed(self.commits)
            if hvd.broadcast_object(launcher.update_wanted, root_rank=0):
                raise HostsUpdatedInterrupt


# ---- in the test's process ------------------------------------------------------------------------------------------


class _Nursery:
    """The fork server of ranks. Tests in this process share it if their ranks have the same modules loaded."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._listener = Listener("\0" + "-".join(["spark_hvd-elastic-ranks", str(os.getpid()), *preload]))
        fork(_nursery, self._listener.address, preload=preload)
        self._orders = self._listener.accept()

    def fork(self) -> tuple[Connection, int]:
        self._orders.send("fork")
        pipe = self._listener.accept()
        return pipe, pipe.recv()


_the_nursery = functools.cache(_Nursery)


class Rank:
    """The test's handle of one process."""

    def __init__(self, job: ElasticJob, number: int) -> None:
        self.number = number
        self._pipe, self.pid = _the_nursery(job.preload).fork()
        self._end = os.pidfd_open(self.pid)
        place = WorldLayout.of_ranks([HOST] * (number + 1)).ranks[number]
        self._pipe.send_bytes(cloudpickle.dumps((job.fn, job.args, job.timeout, place)))

    def say(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(message)

    def await_(self, *kinds: str, seconds: float = SECONDS) -> tuple[Any, ...]:
        """Return the next message of one of these kinds, and skip those before it."""
        until = time.monotonic() + seconds
        passed = []
        while True:
            try:
                if not self._pipe.poll(max(0.0, until - time.monotonic())):
                    self.kill(signal.SIGUSR1)  # prints where it hangs
                    time.sleep(0.5)
                    raise AssertionError(f"process {self.number}: no {kinds} within {seconds} s, but {passed}")
                message = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"process {self.number} has ended without {kinds}, but with {passed}") from None
            if message[0] in kinds:
                return tuple(message)
            if message[0] == "raised":
                raise AssertionError(f"process {self.number}:\n{message[1]}")
            passed.append(message[:2])

    def kill(self, number: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self._end, number)

    def await_end(self, seconds: float = SECONDS) -> None:
        """Wait until the process has ended."""
        assert wait([self._end], seconds), f"process {self.number} is still there"

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self._pipe.close()
        os.close(self._end)


class ElasticJob:
    """Processes that run one function, and form one generation after another."""

    def __init__(
        self, fn: Callable[..., Any], *args: Any, timeout: float = SECONDS, preload: tuple[str, ...] = ()
    ) -> None:
        self.fn, self.args, self.timeout, self.preload = fn, args, timeout, preload
        self.ranks: list[Rank] = []
        self.generation = -1

    def start(self, count: int = 1) -> list[Rank]:
        """Start processes."""
        fresh = [Rank(self, len(self.ranks) + number) for number in range(count)]
        self.ranks += fresh
        return fresh

    def form(self, members: Sequence[Rank], *, join: bool = True) -> int:
        """Make members, in rank order, the next generation. They must be about to join it.

        Args:
            members: The members. Rank 0, which serves the store, comes first.
            join: Whether to wait until all have joined.
        """
        self.generation += 1
        for rank in members:
            rank.await_("ready")
        members[0].say("serve")
        _, port = members[0].await_("store")
        infos = WorldLayout.of_ranks([HOST] * len(members)).ranks
        for rank, info in zip(members, infos, strict=True):
            rank.say("go", self.generation, asdict(info), port)
        if join:
            for rank in reversed(members):
                said = rank.await_("joined", "not joined")
                assert said[0] == "joined", f"process {rank.number}: {said}"
        return self.generation

    def abort(self, members: Sequence[Rank], text: str = "a rank was lost", generation: int | None = None) -> None:
        """Tell members that their generation is over."""
        for rank in members:
            rank.say("abort", self.generation if generation is None else generation, text)

    def finish(self, members: Sequence[Rank]) -> list[Any]:
        """Let all processes return, and return the values of the function."""
        for rank in members:
            rank.await_("finished")
        for rank in members:
            rank.say("verdict", True)
        return [rank.await_("value")[1] for rank in members]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@contextlib.contextmanager
def elastic_job(fn: Callable[..., Any], *args: Any, count: int, **options: Any) -> Iterator[ElasticJob]:
    """Run a job with some processes for the duration of a with statement."""
    job = ElasticJob(fn, *args, **options)
    try:
        job.start(count)
        yield job
    finally:
        job.close()
