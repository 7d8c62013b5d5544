"""Ranks that die, stop, leave or fail during named collectives: the others notice soon, and can end."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 20.0
"""Seconds within which the others must notice, and must be able to shut down and end. Enough on a busy machine, and
long before the timeout of collectives, a minute, would release them."""
FEW, MANY = 1000, 8 << 20
"""Number of elements."""

Handles = list[Any]


def start(*names: str, elements: int = FEW, op: Any = hvd.Sum) -> Handles:
    return [hvd.allreduce_async_(torch.ones(elements), op=op, name=name) for name in names]


def nothing() -> Handles:
    return []


def others_lack_it() -> Handles:
    """The victim is ready for a collective that the others are not ready for, and vice versa."""
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


def adasum() -> Handles:
    """Collectives of several rounds."""
    handles = start(*(f"adasum {number}" for number in range(20)), elements=MANY // 100, op=hvd.Adasum)
    handles[0].wait()
    return handles


MOMENTS: dict[str, Callable[[], Handles]] = {
    "before": nothing,
    "submitted": others_lack_it,
    "small in flight": many_small,
    "large in flight": several_large,
    "adasum in flight": adasum,
}


def exit_as_python_does(code: int = 0) -> None:
    """End this process like a program: with exit handlers, and destructors of what is left."""
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(code)


def leave_and_live() -> None:
    hvd.shutdown()


# What the victim does, and what the others learn.
ENDS: dict[str, tuple[Callable[[], None], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "has ended without notice"),
    "stopped": (
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "has ended without notice, or can no longer be reached",
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
    except hvd.CollectiveError as error:  # it has already happened
        errors.append(str(error))
    if hvd.rank() == victim:
        time.sleep(0.05)  # the others have learned that the barrier is over
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
            expected = 1 if handle.request.op == "ADASUM" else hvd.size()
            assert bool((result == expected).all())
    while not errors:  # everything in flight may have succeeded
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
    """From now on, this process ends like a program, once it is told to."""
    from multiprocessing import util

    util.Finalize(None, exit_as_python_does, exitpriority=-1000)


def seconds_to_end(world: Ranks, rank: int) -> float:
    began = time.monotonic()
    world._pipes[rank].close()
    world.processes[rank].join(2 * SECONDS)
    assert world.processes[rank].exitcode == 0, f"rank {rank} has not ended: {world.processes[rank]}"
    return time.monotonic() - began


def play(end: str, size: int, victim: int, moment: str, folder: Path) -> None:
    world = Ranks(size)
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
            assert answers[rank]["told"] < SECONDS, answers[rank]
            assert answers[rank]["again"] < SECONDS, answers[rank]
            assert answers[rank]["shutdown"] < SECONDS, answers[rank]
        for rank in survivors if moment.endswith("in flight") else []:
            assert seconds_to_end(world, rank) < SECONDS
        if end == "leaves":
            assert world._outcome(victim) == (True, {})
    finally:
        for process in world.processes:
            process.kill()
        world.close()


OFTEN = [
    ("killed", 3, 0, "before"),
    ("killed", 3, 0, "large in flight"),
    ("exits", 2, 0, "small in flight"),
    ("leaves", 3, 1, "large in flight"),
]
SLOW = [("killed", 3, 1, "small in flight"), ("exits", 2, 1, "submitted"), ("leaves", 3, 0, "adasum in flight")]
"""Each case of both lists takes a second or two; the others run at night."""
CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow if case in SLOW else pytest.mark.night)
    for case in product(["killed", "exits", "leaves"], [2, 3], [0, 1], MOMENTS)
]


@pytest.mark.parametrize(("end", "size", "victim", "moment"), CASES)
def test_a_rank_is_gone(end: str, size: int, victim: int, moment: str, tmp_path: Path) -> None:
    play(end, size, victim, moment, tmp_path)


def stop_at(moments: Iterable[str], size: int, victim: int, folder: Path) -> None:
    with ThreadPoolExecutor(len(MOMENTS)) as pool:  # they wait for most of the time
        for done in [pool.submit(play, "stopped", size, victim, moment, folder) for moment in moments]:
            done.result()


@pytest.mark.slow
def test_a_rank_is_stopped(tmp_path: Path) -> None:
    stop_at(["submitted", "large in flight"], 3, 1, tmp_path)


@pytest.mark.night
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_is_stopped_at_any_moment(size: int, victim: int, tmp_path: Path) -> None:
    stop_at(MOMENTS, size, victim, tmp_path)


STALL = {"stall_warning": 0.8, "stall_timeout": 1.5}


def await_notes(folder: Path, name: str, count: int = 1) -> None:
    """Wait until this many ranks have left a note of this name."""
    while len(list(folder.glob(f"{name} *"))) < count:
        time.sleep(0.01)


def note(folder: Path, name: str) -> None:
    (folder / f"{name} {hvd.rank()}").touch()


def stalls(late: int, numbered: bool, folder: Path) -> dict[str, Any]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spark_hvd").addHandler(handler)
    hvd.init(**STALL)
    for _ in range(3 if numbered else 0):
        hvd.allreduce(torch.ones(3), name="loss")
    hvd.allreduce(torch.ones(3), name="what they did last")
    if hvd.rank() == late:
        await_notes(folder, "told", 2)
    began = time.monotonic()
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    if hvd.rank() != late:
        with pytest.raises(TimeoutError, match=r"allreduce 'loss' has not ended within 0\.1 s; it is still under way"):
            handle.wait(0.1)
    with pytest.raises(hvd.StalledError) as caught:
        handle.wait()
    told = time.monotonic()
    note(folder, "late" if hvd.rank() == late else "told")
    await_notes(folder, "late")  # otherwise the others were told again
    for name in ("loss", "loss", "loss", "another"):
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name=name).tolist() == [hvd.size()] * 3
    return {"text": str(caught.value), "began": began, "told": told, "logged": logged}


@pytest.mark.parametrize(("late", "numbered"), [(0, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_rank_is_late(late: int, numbered: bool, tmp_path: Path) -> None:
    with ranks(3) as world:
        answers = world.run(stalls, late, numbered, tmp_path)
    assert len({answer["text"] for answer in answers}) == 1
    said = rf"for rank {late} \(rank {late} last called 'what they did last', \d+\.\d s ago\)"
    ready = "ready: ranks 0, 1" if late == 2 else "ready: ranks 1, 2"
    assert re.fullmatch(rf"allreduce 'loss' has waited \d+\.\d s {said}; {ready}\.", answers[0]["text"])
    others = [answer for rank, answer in enumerate(answers) if rank != late]
    assert max(answer["told"] - answer["began"] for answer in others) >= 1
    assert [bool(answer["logged"]) for answer in answers] == [True, False, False]
    assert re.search(rf"Some ranks wait.*\n  allreduce 'loss' has waited \d+\.\d s {said}", answers[0]["logged"][0])


def test_others_try_again_before_the_late_rank_comes(tmp_path: Path) -> None:
    def fn() -> list[str]:
        hvd.init(stall_timeout=2.0)
        for _ in range(3):
            hvd.allreduce(torch.ones(1), name="loss")
        if hvd.rank() == 1:
            await_notes(tmp_path, "again", 2)
        outcomes = []
        while "[6.0]" not in outcomes:
            try:
                total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="loss")
                outcomes.append(str(total.tolist()))
            except hvd.StalledError as error:
                outcomes.append(type(error).__name__)
                note(tmp_path, "again")
        return outcomes

    with ranks(3) as world:
        assert world.run(fn) == [["StalledError", "[6.0]"]] * 3


def test_what_goes_on_beside_what_waits_is_not_late() -> None:
    def fn() -> str:
        hvd.init(stall_warning=None, stall_timeout=1.0)
        for _ in range(3):
            for name in ("rare", "frequent"):
                hvd.allreduce(torch.ones(1), name=name)
        handle = hvd.allreduce_async(torch.ones(1), name="rare") if hvd.rank() == 0 else None
        until = time.monotonic() + 2.5
        on = torch.ones(1)
        while on:
            time.sleep(0.01 * hvd.rank())
            on = hvd.allreduce(torch.tensor([time.monotonic() < until]), op=hvd.Min, name="frequent")
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(1), name="rare")
        with pytest.raises(hvd.StalledError, match=r"'rare' has waited .* for rank 1") as caught:
            handle.wait()
        return str(caught.value)

    with ranks(2) as world:
        first, second = world.run(fn)
        assert first == second


def no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("method", "victim"),
    [("allreduce", 0), ("allreduce", 1), ("broadcast", 0), ("alltoall", 1), ("allgather", 0), ("_sum", 1)],
)
def test_one_rank_cannot_run_it(method: str, victim: int) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce(torch.ones(1 << 15), name="it"),  # smaller ones go through memory
        "broadcast": lambda: hvd.broadcast(torch.ones(1 << 15), victim, name="it"),
        "alltoall": lambda: hvd.alltoall(torch.ones(3), name="it"),
        "allgather": lambda: hvd.allreduce(torch.ones(3), op=hvd.Adasum, name="it"),  # in one of its later rounds
        "_sum": lambda: hvd.allreduce(torch.ones(MANY // 8), name="it"),  # in pieces, through shared memory
    }

    def fn() -> tuple[str, float]:
        for _ in range(3):
            calls[method]()
        is_victim = hvd.rank() == victim
        if is_victim:
            setattr(getattr(current().queue.members, "sliced" if method == "_sum" else "communicator"), method, no_room)
        began = time.monotonic()
        # Running out of memory is reported as such: elastic training would roll back forever.
        with pytest.raises(MemoryError if is_victim else hvd.CollectiveError) as caught:
            calls[method]()
        seconds = time.monotonic() - began
        with pytest.raises(hvd.CollectiveError, match=f"rank {victim} could not do its part"):
            hvd.barrier()
        hvd.shutdown()
        return str(caught.value), seconds

    with ranks(3) as world:
        for rank, (text, seconds) in enumerate(world.run(fn)):
            said = "" if rank == victim else f"'it' failed: rank {victim} could not do its part: MemoryError: "
            assert f"{said}no room" in text
            assert seconds < 30


PROGRAM = """
import time, torch, spark_hvd.torch as hvd
hvd.init()
handles = [hvd.allreduce_async(torch.ones(100_000), name=str(number)) for number in range(20)]
if hvd.rank() == {victim}:
    {end}
while True:
    hvd.allreduce(torch.ones(3), name="step")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "victim"),
    [("raise ValueError('mine')", 1), pytest.param("raise SystemExit(1)", 0, marks=pytest.mark.night)],
)
def test_programs_that_end(end: str, victim: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, "-c", PROGRAM.format(end=end, victim=victim)]
    processes = [
        subprocess.Popen(program, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert ("ValueError: mine" in outputs[victim]) == ("mine" in end)
    assert re.search(rf"CollectiveError: .*rank {victim} \(on .*\) has left the world", outputs[1 - victim])
    assert not any("terminate called" in output for output in outputs)
