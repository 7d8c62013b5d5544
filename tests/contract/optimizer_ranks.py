"""A few rank processes that live for a whole test module and run named cases one after the other."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tests.ranks import start_ranks

CASE_SECONDS = 200


class Ranks:
    """Runs `case(rank, size)` on every rank at once; a failure on any rank fails the call."""

    def __init__(self, size: int, seconds: int = CASE_SECONDS, preload: Sequence[str] = ()) -> None:
        self.size, self._seconds, self._preload = size, seconds, preload
        self._started = False

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = Path(self._folder.name) / "meeting"
        pipes = [Pipe() for _ in range(self.size)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        calls = [(rank, self.size, str(meeting), theirs) for rank, (_, theirs) in enumerate(pipes)]
        self._processes = start_ranks(_serve, calls, self._preload)
        self._started = True

    def run(self, case: Callable[[int, int], None]) -> None:
        """Run one case, a function of a module; after a failure or a hang, the next call starts new ranks."""
        if not self._started:
            self._start()
        for pipe in self._pipes:
            pipe.send(f"{case.__module__}:{case.__name__}")
        reports = []
        for rank, pipe in enumerate(self._pipes):
            try:
                report = pipe.recv() if pipe.poll(self._seconds) else f"still running after {self._seconds} s"
            except EOFError:
                report = "the process is gone"
            if report is not None:
                reports.append(f"--- rank {rank}\n{report}")
                break  # its peers may wait for it forever
        if reports:
            self.close()
            raise AssertionError("\n".join(reports))

    def close(self) -> None:
        """End the ranks."""
        if not self._started:
            return
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
        self._started = False


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from spark_hvd.context.init import init

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    init()
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            module, _, name = case.partition(":")
            getattr(importlib.import_module(module), name)(rank, size)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
