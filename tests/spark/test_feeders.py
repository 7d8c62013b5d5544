"""Feeders next to the ranks of a run, on local[4]: rows, losses, errors, and leftovers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest

import spark_hvd.torch as hvd
from spark_hvd.data import Mapped
from spark_hvd.runner import NotEnoughSlotsError, RankFailedError, RunError, run
from tests.conftest import start_session, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]
ROWS = 300


@pytest.fixture(scope="module")
def four() -> SparkSession:
    return start_session("local[4]")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(folder: Path) -> set[int]:
    return {int(each.name[4:]) for each in folder.glob("pid-*")}


def changed(folder: str, rows: pa.RecordBatch) -> dict[str, Any]:
    """Return the rows, with the process that has changed them; report it, and wait if told to."""
    if rows.num_rows > 1:  # not for the columns
        Path(folder, f"pid-{os.getpid()}").touch()
        while Path(folder, "wait").exists():
            time.sleep(0.01)
    ids = rows.column("id").to_numpy()
    return {"id": ids, "twice": ids * 2, "pid": [os.getpid()] * len(ids)}


def read(epochs: int, leave: int | None = None) -> tuple[list[list[int]], set[int], int]:
    """Return the batches of each epoch, one of which is abandoned; the processes that changed them, and this one."""
    found: list[list[int]] = []
    pids: set[int] = set()
    loader = hvd.get_dataset_shard("train").torch_batches(8, shuffle=True, seed=4)
    for epoch in range(epochs):
        for batch in loader:
            assert (batch["twice"] == 2 * batch["id"]).all()
            found.append(batch["id"].tolist())
            pids |= set(batch["pid"].tolist())
            if epoch == leave:
                break
    return found, pids, os.getpid()


def mapped(folder: Path, rows: Any, **options: Any) -> Mapped:
    return Mapped(rows, lambda batch: changed(str(folder), batch), **{"rows_at_once": 16, **options})


def frame(spark: SparkSession) -> Any:
    """Return a DataFrame with some empty partitions."""
    return spark.range(0, 2 * ROWS, 1, 5).where(f"id < {ROWS}")


def test_rows_are_those_of_ranks_without_feeders(four: SparkSession, tmp_path: Path) -> None:
    data = {"train": mapped(tmp_path, frame(four))}
    fed = run(read, (3, 1), num_proc=2, data=data, feeders=2, spark=four)
    alone = run(read, (3, 1), num_proc=2, data=data, spark=four)
    for (batches, feeders, _), (same, here, rank) in zip(fed, alone, strict=True):
        assert batches == same
        assert len(feeders) <= 2
        assert here == {rank}
    pids = set.union(*(each[1] for each in fed))
    assert not pids & {each[2] for each in fed}
    first = [[i for batch in each[0][: len(each[0]) // 2] for i in batch] for each in fed]
    assert sorted(first[0] + first[1]) == list(range(ROWS))
    wait_until(lambda: not four.sparkContext.statusTracker().getActiveStageIds())


def test_a_killed_feeder_loses_no_row(four: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wait").touch()
    found: list[Any] = []

    def train() -> None:
        data = {"train": mapped(tmp_path, frame(four))}
        found.extend(run(read, (2,), num_proc=2, data=data, feeders=2, spark=four))

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: len(pids_in(tmp_path)) == 2, 300)
    killed, other = pids_in(tmp_path)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pids_in(tmp_path) - {killed, other}, 300)
    (tmp_path / "wait").unlink()
    thread.join(300)
    ids = sorted(i for batches, _, _ in found for batch in batches for i in batch)
    assert ids == sorted([*range(ROWS)] * 2)
    assert "restarting the feeders of this run (1 of 3)" in caplog.text  # on a local master, Spark does not


class OurError(Exception):
    pass


def test_an_error_of_the_function_ends_the_run(four: SparkSession) -> None:
    def fails(rows: pa.RecordBatch) -> pa.RecordBatch:
        if 250 in rows.column("id").to_pylist():
            raise OurError("row 250 is bad")
        return rows

    def fn() -> None:
        for _ in hvd.get_dataset_shard("train").torch_batches(8):
            pass

    with pytest.raises(RankFailedError, match="OurError: row 250 is bad") as raised:
        run(fn, num_proc=2, data={"train": Mapped(frame(four), fails)}, feeders=2, spark=four)
    assert isinstance(raised.value.__cause__, OurError)
    assert 'raise OurError("row 250 is bad")' in str(raised.value)


def test_feeders_that_always_die_end_the_run(four: SparkSession) -> None:
    def dies(rows: pa.RecordBatch) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunError, match="the Spark job of the feeders failed 4 times") as raised:
        run(read, (1,), num_proc=1, data={"train": Mapped(frame(four), dies)}, feeders=1, spark=four)
    assert raised.value.__cause__ is not None


def test_a_function_that_works_when_the_run_ends_is_killed(four: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()

    def fn() -> None:
        loader = iter(hvd.get_dataset_shard("train").torch_batches(8))
        threading.Thread(target=next, args=(loader,), daemon=True).start()
        wait_until(lambda: list(tmp_path.glob("pid-*")))
        raise OurError("something else")

    with pytest.raises(RankFailedError, match="something else"):
        run(fn, num_proc=1, data={"train": mapped(tmp_path, frame(four))}, feeders=1, spark=four)
    (pid,) = pids_in(tmp_path)
    wait_until(lambda: not alive(pid))


def test_feeders_that_find_no_room(four: SparkSession) -> None:
    data = {"train": Mapped(frame(four), lambda rows: rows)}
    wanted = r"num_proc=2, feeders=3: 5 slots needed, 4 available.*feeders=2.*local\[5\]"
    with pytest.raises(NotEnoughSlotsError, match=wanted):
        run(read, (1,), num_proc=2, data=data, feeders=3, spark=four)
    with pytest.raises(NotEnoughSlotsError, match=r"num_proc=None, feeders=4: 5 slots needed, 4 available"):
        run(read, (1,), data=data, feeders=4, spark=four)
    with pytest.raises(ValueError, match="feeders=2: no data set of data= goes through a function"):
        run(read, (1,), num_proc=2, data={"train": frame(four)}, feeders=2, spark=four)
    with pytest.raises(ValueError, match="feeders=-1: expected a whole number of Spark tasks, at least 0"):
        run(read, (1,), num_proc=2, data=data, feeders=-1, spark=four)


def test_ranks_leave_room_for_feeders(four: SparkSession, tmp_path: Path) -> None:
    data = {"train": mapped(tmp_path, frame(four))}
    assert len(run(read, (1,), data=data, feeders=3, spark=four)) == 1
