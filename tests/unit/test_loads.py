"""What a driver, a Spark task and a rank import: each only its own side of a run, so that it starts fast."""

from __future__ import annotations

import pytest

from tests.unit.test_public_api import modules_after

HUB_AND_MPI = ("runner.channel.hub", "runner.channel.state", "runner.supervise.mpi.launcher", "runner.outcome.errors")
TASK_SIDE = ("runner.supervise", "runner.elastic", "runner.channel.hub", "runner.channel.link")
OTHERS = ("torch", "pyspark", "zmq", "asyncio")
DRIVER_SIDE = ("runner.launch", "runner.spark")


@pytest.mark.parametrize(
    ("module", "most", "not_these"),
    [
        ("runner.rank.main", 16, ("torch", "zmq", "pyspark", *TASK_SIDE, *DRIVER_SIDE)),
        *(  # they import torch, and so does test_imports_load_no_spark by day
            pytest.param(module, most, ("pyspark", "runner.watch", *TASK_SIDE, *DRIVER_SIDE), marks=pytest.mark.slow)
            for module, most in (("runner.rank.static", 74), ("runner.rank.elastic", 75))
        ),
        ("runner.supervise.task", 26, ("torch", "pyspark", "asyncio", *HUB_AND_MPI, *DRIVER_SIDE)),
        ("runner.supervise.feeding", 23, ("torch", "pyspark", "asyncio", *HUB_AND_MPI, *DRIVER_SIDE)),
        ("runner.elastic.task", 29, ("torch", "pyspark", "runner.elastic.hub", *HUB_AND_MPI, *DRIVER_SIDE)),
        ("runner.launch.run", 85, ("torch", "pyspark", "asyncio", "runner.rank.main", "runner.elastic")),
        ("runner.elastic.run", 98, ("torch", "pyspark", "asyncio", "runner.rank.main")),
    ],
)
def test_a_process_loads_its_own_side_of_a_run(module: str, most: int, not_these: tuple[str, ...]) -> None:
    loaded = modules_after(f"import spark_hvd.{module}")
    unwanted = {name if name in OTHERS else f"spark_hvd.{name}" for name in not_these}
    ours = [name for name, file in loaded.items() if name.startswith("spark_hvd.") and "__init__" not in file]
    assert sorted(unwanted & loaded.keys()) == []
    assert len(ours) <= most, f"{module} loads {len(ours)} of our files: {sorted(ours)}"
