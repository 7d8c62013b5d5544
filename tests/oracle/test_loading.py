"""Loaders of `data=` yield each row of a DataFrame once per epoch, unchanged, for any columns and partitions.

Hypothesis generates the cases, the same in each run, several per run. `SPARK_HVD_NIGHT=5000` tries a tenth as many.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spark_hvd.runner import run
from tests.oracle import loading
from tests.oracle.loading import DataCase, check_loaded, data_cases, frame_of, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(loading)
NIGHT = int(os.environ.get("SPARK_HVD_NIGHT", "0"))
TOGETHER = 6
"""Maximum number of data sets in a run: hypothesis' first example has only one, the simplest."""


@pytest.mark.slow  # by day: tests/spark/test_data.py
@pytest.mark.timeout(36_000 if NIGHT else 300)
@settings(
    max_examples=-(-NIGHT // 10 // TOGETHER) or 2,
    derandomize=not NIGHT,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases=st.lists(data_cases, min_size=1, max_size=TOGETHER), ranks_of_a_task=st.sampled_from((1, 2)))
def test_rows_as_they_are(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, cases: list[DataCase], ranks_of_a_task: int
) -> None:
    def fn() -> list[object]:
        import spark_hvd.torch as hvd

        hvd.init()
        return [read(f"d{number}", case) for number, case in enumerate(cases)]

    frames = [frame_of(spark, case) for case in cases]
    folder, data = tmp_path_factory.mktemp("loading"), {}
    for number, (case, frame) in enumerate(zip(cases, frames, strict=True)):
        path = Path(folder) / str(number)
        if case.door == "files":
            frame.write.parquet(str(path))
        data[f"d{number}"] = path if case.door == "files" else frame
    ranks = run(fn, num_proc=2 * ranks_of_a_task, procs_per_task=ranks_of_a_task, data=data, spark=spark, verbose=0)
    for number, (case, frame) in enumerate(zip(cases, frames, strict=True)):
        check_loaded(case, frame.collect(), [found[number] for found in ranks])
