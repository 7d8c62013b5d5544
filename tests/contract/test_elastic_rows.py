"""A half-used part of an elastic state continues where it was: every row once per epoch, on all ranks alike."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch.utils.data import DataLoader

import spark_hvd.torch as hvd
from spark_hvd import run_elastic_local
from spark_hvd.data.registry import get_dataset_shard, register
from spark_hvd.data.source import ParquetSource
from spark_hvd.store import Store
from spark_hvd.testing import FaultPlan
from spark_hvd.world import launcher as elastic_launcher
from tests.contract.reader_data import numbered, write
from tests.elastic_ranks import Rank, elastic_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 144
BLOCK = 12
"""Rows of a step, over all ranks: a divisor of ROWS, so that every epoch has as many steps for any number of ranks."""

Plan = Sequence[tuple[int, int, str]]
"""For each generation: its ranks, the step after which it ends, and how; the last one runs to the end."""


class Counting:
    """Its state dict works like torchdata's: only a loaded state makes an iteration begin in the middle."""

    def __init__(self) -> None:
        self.taken, self._start, self._at_end = 0, 0, False

    def __iter__(self) -> Iterator[list[int]]:
        self.taken, self._start = self._start, 0
        while self.taken < ROWS:
            block = range(ROWS)[self.taken : self.taken + BLOCK]
            self.taken += BLOCK
            yield list(block[hvd.rank() :: hvd.size()])
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = self._start = state["taken"]


def reads(kind: str, source: ParquetSource, epochs: int, plan: Plan) -> Any:
    """Read some epochs; ranks change as planned. All ranks' rows so far are part of the state."""
    register({"train": pickle.dumps(source)})
    held: Any
    if kind == "sampler":
        held = hvd.elastic.ElasticSampler(range(ROWS), seed=3)
    elif kind == "counting":
        held = Counting()
    else:
        shard = get_dataset_shard("train")
        make = shard.numpy_batches if kind == "numpy" else shard.torch_batches
        held = make(BLOCK // 2, shuffle=True, seed=3, window_rows=20)
    launcher: Any = elastic_launcher.installed()

    def batches() -> Iterator[list[int]]:
        if kind == "counting":
            yield from held
        elif kind == "sampler":
            data: Any = range(ROWS)
            for number, batch in enumerate(DataLoader(data, batch_size=BLOCK // hvd.size(), sampler=held)):
                held.record_batch(number, len(batch))
                yield batch.tolist()
        else:
            for batch in DataLoader(held, batch_size=None) if kind == "data_loader" else held:
                yield batch["row"].tolist()

    def end_of_step(state: Any) -> None:
        generation = hvd.generation()
        _, last, how = plan[generation] if generation < len(plan) - 1 else (0, -1, "")
        if state.step == last and how == "kill":
            state.commit()
            if hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
        launcher.update_wanted = state.step == last and how in ("commit", "check")
        if how == "check":
            state.check_host_updates()
        else:
            state.commit()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < epochs:
            for rows in batches():
                together = hvd.allgather_object((state.epoch, rows))
                state.seen = [*state.seen, *together]
                state.step += 1
                end_of_step(state)
            if state.by_loader:
                assert held.epoch == state.epoch + 1
            state.epoch += 1
            if kind == "sampler":
                held.set_epoch(state.epoch)

    by_loader = kind in ("torch", "numpy", "data_loader")
    state = hvd.elastic.TorchState(held=held, epoch=0, step=0, seen=[], by_loader=by_loader)
    train(state)
    return state.seen


def carried_out(fn: Any, *args: Any, plan: Plan) -> list[Any]:
    """Return the function's values on the ranks of the last generation."""
    with elastic_job(fn, *args, plan, count=plan[0][0]) as job:
        members: list[Rank] = job.ranks[:]
        for (_, _, how), (size, _, _) in itertools.pairwise(plan):
            job.form(members)
            if how == "kill":
                members[-1].await_end()
                del members[-1]
                job.abort(members)
            members = members[:size]
            members += job.start(size - len(members))
        job.form(members)
        return job.finish(members)


def source_in(folder: Path) -> ParquetSource:
    store = Store.create(folder)
    return ParquetSource(write(store, numbered(ROWS), 3, 10), store)


def assert_each_row_once(values: list[Any], epochs: int) -> None:
    assert all(value == values[0] for value in values)
    for epoch in range(epochs):
        assert sorted(row for at, rows in values[0] if at == epoch for row in rows) == list(range(ROWS)), epoch


PLANS: dict[str, Plan] = {
    "one leaves by notice, in the middle": [(3, 5, "commit"), (2, -1, "")],
    "one leaves by notice, at the end": [(2, 12, "commit"), (1, -1, "")],
    "one leaves at the end, without a commit": [(2, 12, "check"), (1, -1, "")],
    "one joins in the middle, without a commit": [(1, 3, "check"), (2, -1, "")],
    "a lost one's successor joins later": [(2, 3, "kill"), (1, 8, "commit"), (2, -1, "")],
    "one is lost at the end, and one joins at the next end": [(3, 12, "kill"), (2, 24, "commit"), (3, -1, "")],
    "changes in each epoch": [(2, 1, "commit"), (2, 7, "check"), (1, 20, "commit"), (3, 30, "check"), (2, -1, "")],
}


SLOW = {"one leaves by notice, at the end", "one joins in the middle, without a commit"}
"""By day, one leaves a loader of numpy arrays at the end, and ranks join where they change in each epoch."""
CASES = [
    *(pytest.param("torch", plan, marks=pytest.mark.slow if plan in SLOW else ()) for plan in PLANS),
    ("counting", "one leaves at the end, without a commit"),
    ("counting", "a lost one's successor joins later"),
    ("sampler", "changes in each epoch"),
    ("data_loader", "changes in each epoch"),
    ("numpy", "one leaves by notice, at the end"),
]


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_every_row_once_when_ranks_change(tmp_path: Path, kind: str, plan: str) -> None:
    values = carried_out(reads, kind, source_in(tmp_path), 3, plan=PLANS[plan])
    assert_each_row_once(values, 3)


def trains(epochs: int, faults: FaultPlan) -> Any:
    loader = get_dataset_shard("train").torch_batches(5, shuffle=True)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while loader.epoch < epochs:
            for batch in loader:
                faults.at(state.step)
                rows = batch["row"].tolist()
                state.seen = [*state.seen, *hvd.allgather_object(rows)]
                state.step += 1
                state.commit()

    state = hvd.elastic.TorchState(loader=loader, step=0, seen=[])
    loop(state)
    return state.seen


def test_a_run_goes_on_with_fewer_ranks_and_takes_one_in(tmp_path: Path) -> None:
    source_in(tmp_path)
    faults = FaultPlan().kill(rank=1, step=4)
    values = run_elastic_local(
        trains, (2, faults), num_proc=2, min_num_proc=1, data={"train": str(tmp_path)}, verbose=0
    )
    assert all(value == values[0] for value in values)
    assert sorted(row for rows in values[0] for row in rows) == sorted([*range(ROWS)] * 2)


def test_a_loop_that_had_its_last_batch_ends_when_it_is_entered_again(tmp_path: Path) -> None:
    hvd.init()
    register({"train": pickle.dumps(source_in(tmp_path))})
    shard = get_dataset_shard("train")
    try:
        loader, other = shard.torch_batches(50), shard.torch_batches(50)
        batches = iter(loader)
        for left in (2, 1, 0):
            next(batches)
            other.load_state_dict(loader.loop_state_dict())
            assert other.epoch == 0
            assert len(list(other)) == left
            assert other.epoch == 1
            assert len(list(other)) == 3
        assert loader.state_dict()["position"] == [1, []]  # as always
        del batches  # left after its last batch, as by islice: the epoch is over
        other.load_state_dict(loader.loop_state_dict())
        assert len(list(other)) == 3
    finally:
        register({})
        hvd.shutdown()
