"""Ranks that die, stop, leave or fail in the midst of named collectives: the others learn it soon, and can end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 5.0
"""Within which the others must have heard, and must be able to shut down and to end."""
FEW, MANY = 1000, 8 << 20
"""Elements."""

Handles = list[Any]


def start(*names: str, elements: int = FEW) -> Handles:
    return [hvd.allreduce_async_(torch.ones(elements), op=hvd.Sum, name=name) for name in names]


def nothing() -> Handles:
    return []


def others_lack_it() -> Handles:
    """The victim is ready for something that the others are not, and the other way round."""
    handles = start("a", "victim's" if hvd.rank() == victim_of_world() else "others'")
    time.sleep(0.1)
    return handles


def many_small() -> Handles:
    return start(*(f"small {number}" for number in range(100)), *"abc")


def several_large() -> Handles:
    handles = start(*(f"large {number}" for number in range(6)), elements=MANY)
    handles[0].poll()  # they are sent
    time.sleep(0.1)
    return handles


MOMENTS: dict[str, Callable[[], Handles]] = {
    "before": nothing,
    "submitted": others_lack_it,
    "small in flight": many_small,
    "large in flight": several_large,
}


def exit_as_python_does(code: int = 0) -> None:
    """End this process with all that the end of a program brings: exit handlers, and destructors of what is left."""
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(code)


def leave_and_live() -> None:
    hvd.shutdown()


# What the victim does, and what the others are told of it.
ENDS: dict[str, tuple[Callable[[], None], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "has ended without a word"),
    "stopped": (
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "has ended without a word, or cannot be reached any more",
    ),
    "exits": (exit_as_python_does, "has left the world"),
    "leaves": (leave_and_live, "has left the world"),
}


def victim_of_world() -> int:
    return int(os.environ["VICTIM"])


def scenario(end: str, victim: int, moment: str, clock: str) -> dict[str, Any]:
    os.environ["VICTIM"] = str(victim)
    for _ in range(3):  # so that some names have numbers
        for handle in start(*"abc"):
            handle.wait()
    hvd.barrier()
    handles: Handles = []
    errors = []
    try:
        handles = MOMENTS[moment]()
    except hvd.CollectiveError as error:  # it has happened already
        errors.append(str(error))
    if hvd.rank() == victim:
        Path(clock).write_text(str(time.monotonic()))
        sys.kept = handles  # type: ignore[attr-defined]
        ENDS[end][0]()
        return {}
    for handle in handles:
        try:
            result = handle.wait()
        except hvd.CollectiveError as error:
            errors.append(str(error))
        else:
            assert bool((result == hvd.size()).all())
    while not errors:  # all that was under way may have succeeded
        try:
            hvd.allreduce(torch.ones(FEW), name="a")
        except hvd.CollectiveError as error:
            errors.append(str(error))
    told = time.monotonic() - float(Path(clock).read_text())
    began = time.monotonic()
    for call in (lambda: hvd.allreduce(torch.ones(FEW), name="a"), hvd.barrier, hvd.join):
        with pytest.raises(hvd.CollectiveError) as caught:
            call()
        errors.append(str(caught.value))
    again = time.monotonic() - began
    began = time.monotonic()
    sys.kept = handles  # type: ignore[attr-defined]
    hvd.shutdown()
    return {"errors": errors, "told": told, "again": again, "shutdown": time.monotonic() - began}


def end_like_a_program() -> None:
    """From now on this process ends as a program does, once it is told to."""
    from multiprocessing import util

    util.Finalize(None, exit_as_python_does, exitpriority=-1000)


def seconds_to_end(world: Ranks, rank: int) -> float:
    began = time.monotonic()
    world._pipes[rank].close()
    world.processes[rank].join(2 * SECONDS)
    assert world.processes[rank].exitcode == 0, f"rank {rank} has not ended: {world.processes[rank]}"
    return time.monotonic() - began


def play(end: str, size: int, victim: int, moment: str, folder: Path) -> None:
    world = Ranks(size, forked=True)
    try:
        world.run(end_like_a_program)
        clock = folder / f"{end}{size}{victim}{moment}"
        answers: list[Any] = [None] * size
        call = cloudpickle.dumps((scenario, (end, victim, moment, str(clock))))
        for pipe in world._pipes:
            pipe.send_bytes(call)
        survivors = [rank for rank in range(size) if rank != victim]
        for rank in survivors:
            ok, answers[rank] = world._outcome(rank)
            assert ok, answers[rank]
            for text in answers[rank]["errors"]:
                assert re.search(rf"rank {victim}\b.* {ENDS[end][1]}", text), text
            print(end,size,victim,moment,rank,answers[rank])
            assert answers[rank]["told"] < SECONDS, answers[rank]
            assert answers[rank]["again"] < 0.2, answers[rank]
            assert answers[rank]["shutdown"] < SECONDS, answers[rank]
        for rank in survivors:
            assert seconds_to_end(world, rank) < SECONDS
        if end == "leaves":
            assert world._outcome(victim) == (True, {})
    finally:
        for process in world.processes:
            process.kill()
        world.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_is_stopped(size: int, victim: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(MOMENTS)) as pool:  # they wait for most of the time
        for done in [pool.submit(play, "stopped", size, victim, moment, tmp_path) for moment in MOMENTS]:
            done.result()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("end", ["killed", "exits", "leaves"])
def test_a_rank_is_gone(end: str, size: int, victim: int, moment: str, tmp_path: Path) -> None:
    play(end, size, victim, moment, tmp_path)
