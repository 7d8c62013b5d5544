"""A feeder on its own executor is killed: Spark restarts it, and no row is lost or duplicated."""

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
from spark_hvd.runner import run
from tests.conftest import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_spark_replaces_a_killed_feeder(
    cluster: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wait").touch()

    def changed(rows: pa.RecordBatch) -> pa.RecordBatch:
        if rows.num_rows > 1:  # not for the columns
            (tmp_path / f"pid-{os.getpid()}").touch()
            while (tmp_path / "wait").exists():
                time.sleep(0.01)
        return rows

    def read() -> tuple[list[int], int]:
        batches = list(hvd.get_dataset_shard("train").torch_batches(8, shuffle=True))
        return [i for batch in batches for i in batch["id"].tolist()], os.getppid()

    found: list[Any] = []
    data = {"train": Mapped(cluster.range(0, 200, 1, 3), changed, rows_at_once=16)}
    options = {"num_proc": 1, "data": data, "feeders": 1, "gpus_per_proc": 0, "spark": cluster}
    thread = threading.Thread(target=lambda: found.extend(run(read, **options)))
    thread.start()
    (first,) = wait_until(lambda: list(tmp_path.glob("pid-*")), 300)
    os.kill(int(first.name[4:]), signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 300)
    (tmp_path / "wait").unlink()
    thread.join(300)
    assert sorted(found[0][0]) == list(range(200))
    assert "restarting" not in caplog.text  # by us
