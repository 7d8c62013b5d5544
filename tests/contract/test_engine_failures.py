"""The engine meets an error that it cannot handle: nothing waits forever or spins, and a new world can start."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from spark_hvd.engine.engine import Engine
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def broken_pipe(engine: Engine) -> None:
    # From now on the pipe is readable at once, and reading raises. Done in the engine's thread: poll(2) keeps the file
    # that it began with open, so an engine asleep in it would not notice.
    engine.call(partial(os.dup2, engine._wake_pipe[1], engine._wake_pipe[0]))


def closed_socket(engine: Engine) -> None:
    engine.call(engine._authenticator.socket.close)


def failing_call(engine: Engine) -> None:
    engine.call(lambda: print([].pop()))


DEFECTS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "pipe": (broken_pipe, "OSError: [Errno 9] Bad file descriptor"),
    "socket": (closed_socket, "RuntimeError: a socket was closed while the engine was serving it"),
    "call": (failing_call, "IndexError: pop from empty list"),
}


@pytest.mark.parametrize(("defect", "victim"), [("pipe", 0), ("pipe", 1), ("socket", 1), ("call", 0)])
def test_the_engine_fails(defect: str, victim: int) -> None:
    def fn() -> tuple[list[str], int, list[float]]:
        logged: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = logged.append  # type: ignore[method-assign]
        logging.getLogger("spark_hvd").addHandler(handler)
        hvd.barrier()
        engine, failing = current().engine, hvd.rank() == victim

        def in_flight() -> None:
            waiting = hvd.allreduce_async(torch.ones(1), name="the victim's" if failing else "the others'")
            if failing:
                waiting.poll()
                DEFECTS[defect][0](engine)
            waiting.wait()

        texts = []
        for call in (in_flight, hvd.barrier, lambda: hvd.add_process_set([0, 1])):
            with pytest.raises(hvd.CollectiveError) as caught:
                call()
            texts.append(str(caught.value))
        if failing:
            with pytest.raises(hvd.CollectiveError) as caught:
                engine.ask(list)
            texts.append(str(caught.value))
        hvd.shutdown()
        assert not [thread for thread in threading.enumerate() if thread.name == "spark_hvd-engine"]
        hvd.init()
        return texts, len(logged), hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist()

    told = f"the engine of the named collectives failed: {DEFECTS[defect][1]}"
    with ranks(3, timeout=20) as world:
        for rank, (texts, logged, total) in enumerate(world.run(fn)):
            assert all(told in text for text in texts), texts
            assert all(f"rank {victim} could not do its part" in text for text in texts[:3]), texts
            assert logged == (rank == victim)
            assert total == [3.0]
