"""Saves with wait=False: training continues, and whatever happens meanwhile, one complete checkpoint exists."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd import run_local
from spark_hvd.checkpoint.background import Memory, copied
from spark_hvd.runner import RankFailedError, run_elastic_local
from spark_hvd.store.paths import temporary_name
from spark_hvd.testing import FaultPlan
from tests.background_saves import break_it, mend, raised
from tests.ranks import Ranks, ranks
from tests.stores import gated, mount  # noqa: F401

cloudpickle.register_pickle_by_value(sys.modules[__name__])
NUMBERS = 1 << 22
"""16 MiB, which takes a while to write."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as world:
        yield world


def save(where: Any, value: float, step: int, numbers: int = 3, **options: Any) -> hvd.checkpoint.SaveHandle:
    return hvd.checkpoint.save(where, {"weight": torch.full((numbers,), value)}, step, wait=False, **options)


def value_of(where: Any, step: int | None = None) -> tuple[int, float] | None:
    saved = hvd.checkpoint.load(where, step)
    if saved is None:
        return None
    assert len(saved.state["weight"].unique()) == 1
    return saved.step, float(saved.state["weight"][0])


def saved(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("step-")) if folder.exists() else []


def file_of(step: int) -> str:
    return f"step-{step:012d}.pt"


# -- the copy


def states() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    whole = torch.arange(24.0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [whole[3:7], whole.view(4, 6).t(), whole],
        "kinds": (torch.ones(3, dtype=torch.bfloat16), torch.tensor(3), torch.empty(0), torch.ones(2, dtype=bool)),
        "parameter": nn.Parameter(torch.randn(2)),
        "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        "plain": OrderedDict(text="x", size=torch.Size([1, 2]), dtype=torch.float16, raw=bytearray(b"ab"), none=None),
    }


def written(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_copy_is_written_as_what_it_is_of() -> None:
    state = states()
    copy = copied(state, Memory())
    assert written(copy) == written(state)
    before = written(copy)
    for tensor in (*state["model"].values(), *state["views"], state["kinds"][0]):
        tensor.zero_()
    state["plain"]["raw"][0] = 0
    state["optimizer"]["param_groups"][0]["lr"] = 9.0
    assert written(copy) == before
    odd = {"sparse": torch.eye(2).to_sparse(), "conjugate": torch.ones(2, dtype=torch.complex64).conj()}
    assert copied(odd, Memory())["sparse"].to_dense().equal(torch.eye(2))
    assert copied(odd, Memory())["conjugate"].equal(odd["conjugate"])


# -- training goes on


def test_what_is_saved_is_the_state_of_that_moment(two: Ranks, tmp_path: Path) -> None:
    def fn() -> list[Any]:
        weight = torch.ones(NUMBERS)
        for step in (1, 2, 3):
            hvd.checkpoint.save(tmp_path, {"weight": weight}, step, wait=False)
            weight.mul_(10)
        return [value_of(tmp_path), value_of(tmp_path, 2), hvd.checkpoint.latest(tmp_path)]

    assert two.run(fn) == [[(3, 100.0), (2, 10.0), 3]] * 2
    assert saved(tmp_path) == [file_of(2), file_of(3)]


def test_one_save_at_a_time_and_old_ones_go_when_the_new_one_is_whole(two: Ranks, tmp_path: Path) -> None:
    def first() -> tuple[bool, bool]:
        hvd.checkpoint.save(tmp_path / "run", {"weight": torch.zeros(3)}, 1)
        hvd.barrier()
        handle = save(gated(tmp_path), 2.0, 2, keep=1)
        done = handle.done()
        hvd.allreduce(torch.ones(1))  # runs at the same time
        return done, os.path.exists(tmp_path / "run" / file_of(1))

    def second() -> tuple[list[str], bool]:
        if hvd.rank() == 1:
            threading.Timer(0.3, (tmp_path / "open").touch).start()
        handle = save(gated(tmp_path), 3.0, 3, keep=1)
        there = saved(tmp_path / "run")
        handle.wait()
        handle.wait()
        return there, handle.done()

    assert two.run(first) == [(False, True), (True, True)]
    assert saved(tmp_path / "run") == [file_of(1)], "nothing is deleted yet"
    (there, done), _ = two.run(second)
    assert file_of(2) in there
    assert file_of(1) not in there
    assert done
    assert saved(tmp_path / "run") == [file_of(3)]


def test_load_and_a_save_that_waits_come_after(two: Ranks, tmp_path: Path) -> None:
    def fn() -> tuple[int, float] | None:
        save(gated(tmp_path), 2.0, 2)
        threading.Timer(0.2, (tmp_path / "open").touch).start()
        return value_of(tmp_path / "run")

    def then() -> bool:
        handle = save(tmp_path / "run", 3.0, 3, NUMBERS)
        if hvd.rank() == 0:
            hvd.checkpoint.save(tmp_path / "run", {"weight": torch.full((3,), 4.0)}, 4)  # called by rank 0 alone
            assert saved(tmp_path / "run") == [file_of(3), file_of(4)]
        handle.wait()
        return handle.done()

    assert two.run(fn) == [(2, 2.0)] * 2
    assert two.run(then) == [True, True]
    assert two.run(value_of, tmp_path / "run") == [(4, 4.0)] * 2


def kept(steps: int | None = None) -> int | None:
    """Return the steps that count as saved on this rank, now or after it has made so many."""
    from spark_hvd.world.activity import activity  # its lock does not go to ranks

    if steps is not None:
        activity.optimizer_steps = steps
    return activity.kept_steps


def test_steps_are_kept_when_their_checkpoint_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fn() -> list[int | None]:
        hvd.checkpoint.load(folder)
        found = [kept(10)]  # nothing was loaded
        handle = save(gated(tmp_path), 1.0, 1)
        found.append(kept(20))
        hvd.barrier()
        (tmp_path / "open").touch()
        handle.wait()
        found.append(kept())
        hvd.checkpoint.load(folder)
        found.append(kept())  # looking at a checkpoint saves nothing
        hvd.checkpoint.save(folder, {"weight": torch.zeros(3)}, 2)
        hvd.barrier()
        found.append(kept(30))
        if hvd.rank() == 0:
            break_it(folder)
            assert raised(lambda: hvd.checkpoint.save(folder, {"weight": torch.zeros(3)}, 3))
            mend(folder)
        hvd.barrier()
        found.append(kept())
        hvd.checkpoint.save_sharded(folder, nn.Linear(2, 2), step=4)
        return [*found, kept()]

    def again() -> int | None:
        hvd.checkpoint.load_sharded(folder, nn.Linear(2, 2))
        return kept(5)

    with ranks(2) as world:
        assert world.run(fn) == [[None, None, 10, 10, 20, 20, 30], [None] * 6 + [30]]
    with ranks(2) as world:
        assert world.run(again) == [0, 0]


# -- a store that goes away


TOLD_BY: dict[str, Callable[[hvd.checkpoint.SaveHandle, Path], Any]] = {
    "the next save": lambda handle, folder: save(gated(folder), 2.5, 2),
    "load": lambda handle, folder: value_of(folder / "run"),
    "wait": lambda handle, folder: handle.wait(),
}


@pytest.mark.parametrize("call", TOLD_BY.values(), ids=TOLD_BY)
def test_a_store_that_goes_away_is_named_on_all_ranks(two: Ranks, tmp_path: Path, call: Any) -> None:
    folder, gate = tmp_path / "run", tmp_path / "open"

    def fn() -> list[str]:
        handle = save(gated(tmp_path), 2.0, 2)  # begins before anything fails
        hvd.barrier()
        if hvd.rank() == 0:
            break_it(folder)
            gate.touch()
        texts = [raised(lambda: call(handle, tmp_path)), raised(handle.wait)]
        if hvd.rank() == 0:
            mend(folder)
        hvd.barrier()
        # The error was reported, and training may continue.
        texts.append(raised(lambda: save(gated(tmp_path), 3.0, 3).wait()))
        return [*texts, raised(lambda: value_of(folder, 3))]

    folder.mkdir()
    for told, again, *rest in two.run(fn):
        assert told.startswith(f"saving gated://{folder}/{file_of(2)} in the background failed: cannot write")
        assert again == told, "by the handle each time"
        assert rest == ["", ""]


def test_a_full_disk(two: Ranks, mount: Callable[..., Path]) -> None:  # noqa: F811
    disk = mount()

    def fn() -> list[str]:
        save(disk, 1.0, 1).wait()
        save(disk, 2.0, 2, NUMBERS)
        return [raised(lambda: save(disk, 3.0, 3)), str(value_of(disk))]

    for told, there in two.run(fn):
        assert "No space left on device" in told
        assert "Free space there" in told
        assert there == "(1, 1.0)"
    assert os.listdir(disk) == [file_of(1)]


def test_what_cannot_be_saved_is_refused_at_once(two: Ranks, tmp_path: Path) -> None:
    def fn() -> str:
        try:
            hvd.checkpoint.save(tmp_path, {"net": nn.Linear(1, 1)}, 1, wait=False)
        except TypeError as error:
            return str(error)
        return ""

    refused, other = two.run(fn)
    assert refused.startswith("state['net'] is a torch.nn.modules.linear.Linear: ")
    assert other == ""
    assert two.run(lambda: save(tmp_path, 1.0, 1).wait()) == [None, None]


# -- processes that end


@pytest.mark.slow
def test_a_program_ends_when_its_checkpoint_is_whole(tmp_path: Path) -> None:
    def fn(step: int, failing: bool) -> None:
        save(tmp_path, float(step), step, NUMBERS)
        if failing:
            raise ValueError("mine")
        if step == 1 and hvd.rank() == 0:
            hvd.shutdown()
            assert saved(tmp_path) == [file_of(1)]

    run_local(fn, (1, False), verbose=0)
    assert value_of(tmp_path) == (1, 1.0)
    with pytest.raises(RankFailedError, match="ValueError: mine"):
        run_local(fn, (2, True), num_proc=1, verbose=0)
    assert value_of(tmp_path) == (2, 2.0)
    break_it(tmp_path)
    with pytest.raises(RankFailedError, match=r"saving .*step-000000000003.pt in the background failed: cannot write"):
        run_local(fn, (3, False), verbose=0)


@pytest.mark.parametrize(
    "share", [*(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.3, 0.9)), 0.01, 0.6, 1.0]
)
def test_whoever_is_killed_while_it_writes_leaves_the_former_one(tmp_path: Path, share: float) -> None:
    def fn() -> None:
        save(tmp_path, 1.0, 1).wait()
        save(tmp_path, 2.0, 2, NUMBERS)
        (tmp_path / "begun").touch()

    size = 4 * NUMBERS
    with ranks(1) as world:
        killer = threading.Thread(target=kill_at, args=(tmp_path, share * size, world.processes[0].pid))
        killer.start()
        world.outcomes(fn)
        killer.join()
    found = value_of(tmp_path)
    assert found == (2, 2.0) if file_of(2) in saved(tmp_path) else found == (1, 1.0)
    with ranks(1) as world:
        world.run(lambda: save(tmp_path, 3.0, 3).wait())
    assert value_of(tmp_path) == (3, 3.0)


def kill_at(folder: Path, size: float, process: int | None) -> None:
    """Kill a process when the file that it writes has this size, or is complete."""
    assert process is not None
    while file_of(2) not in (names := os.listdir(folder)):
        parts = [folder / name for name in names if file_of(2) in name]
        try:
            if parts and parts[0].stat().st_size >= size:
                break
        except FileNotFoundError:  # it already has its final name
            break
    os.kill(process, signal.SIGKILL)


def test_what_was_cut_at_any_byte_is_not_seen(two: Ranks, tmp_path: Path) -> None:
    two.run(lambda: save(tmp_path, 1.0, 1).wait())
    data = (tmp_path / file_of(1)).read_bytes()
    for length in [*range(0, len(data), 97), len(data)]:
        (tmp_path / temporary_name(file_of(2))).write_bytes(data[:length])
    assert two.run(value_of, tmp_path) == [(1, 1.0)] * 2
    assert two.run(hvd.checkpoint.latest, tmp_path) == [1, 1]
    two.run(lambda: save(tmp_path, 2.0, 2, keep=1).wait())
    assert two.run(value_of, tmp_path) == [(2, 2.0)] * 2
    assert saved(tmp_path) == [file_of(2)]


def test_nothing_hangs_when_a_peer_dies_meanwhile(tmp_path: Path) -> None:
    def begin() -> None:
        save(gated(tmp_path), 1.0, 1)

    def go_on() -> str:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            save(gated(tmp_path), 2.0, 2)
        except hvd.HorovodInternalError as error:
            return type(error).__name__
        return ""

    with ranks(2) as world:
        world.run(begin)
        threading.Timer(0.3, (tmp_path / "open").touch).start()
        begun = time.monotonic()
        (ended, _) = world.outcomes(go_on)
        assert ended[0], ended[1]
        assert ended[1].endswith("Error")
        assert time.monotonic() - begun < 20
    assert value_of(tmp_path / "run") == (1, 1.0)


def elastic(folder: str, faults: FaultPlan, steps: int) -> tuple[int, float]:
    state = hvd.elastic.ObjectState(step=0)
    weight = torch.zeros(1 << 16)

    @hvd.elastic.run
    def trained(state: Any) -> None:
        while state.step < steps:
            hvd.allreduce(torch.ones(1), name="step")
            faults.at(state.step)
            state.step += 1
            weight.fill_(state.step)
            hvd.checkpoint.save(folder, {"weight": weight}, state.step, wait=False)
            state.commit()

    trained(state)
    return hvd.generation(), state.step


@pytest.mark.parametrize("rank", [0, 1])
def test_an_elastic_run_saves_on_in_its_next_world(tmp_path: Path, rank: int) -> None:
    faults = FaultPlan().kill(rank=rank, step=4)
    results = run_elastic_local(elastic, (str(tmp_path), faults, 8), num_proc=2, timeout=60, verbose=0)
    assert results == [(1, 8)] * 2
    assert value_of(tmp_path) == (8, 8.0)
    assert saved(tmp_path) == [file_of(7), file_of(8)]
