"""The driver's side on local[2]: refusals, timeouts, unreachable hub, missing packages."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from spark_hvd.runner import (
    NotEnoughSlotsError,
    RankFailedError,
    SetupError,
    StartTimeoutError,
    UnpicklableError,
    run,
    run_elastic,
)
from spark_hvd.runner.launch import attempt as attempt_module
from spark_hvd.runner.spark import job, slots
from spark_hvd.runner.spark import session as on_spark
from tests.conftest import daemon_of, ranks_alive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


def hvd() -> Any:
    import spark_hvd.torch

    return spark_hvd.torch


def reduce_one() -> float:
    import torch

    return float(hvd().allreduce(torch.ones(1), op=hvd().Sum))


def test_too_few_slots_fails_at_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_SETTLE", 600.0)  # a run that waits would do so for longer than a test may take
    with pytest.raises(NotEnoughSlotsError, match=r'3 slots needed, 2 available .*master\("local\[3\]"\)'):
        run(lambda: 1, num_proc=3, spark=spark)


@pytest.mark.slow
def test_elastic_ranks_fail_in_the_driver(spark: SparkSession) -> None:
    def fails() -> None:
        raise ValueError("bad batch")

    with pytest.raises(RankFailedError, match=r"Traceback of rank \d \(host \S+\)"):
        run_elastic(fails, num_proc=2, spark=spark, verbose=0)


def test_no_session() -> None:
    script = "import spark_hvd\nspark_hvd.run(print, num_proc=1)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "there is no active Spark session" in done.stderr
    assert "run_local" in done.stderr


def wait_for(file: Path, work: threading.Thread) -> None:
    """Wait until the work has created a file, however long its processes take to start."""
    while not file.exists():
        assert work.is_alive(), "it ended without"
        time.sleep(0.05)


@pytest.mark.parametrize("with_hub", [True, False])
def test_busy_slots_end_in_a_start_timeout_that_says_so(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_hub: bool
) -> None:
    if not with_hub:  # as if there were no free port
        monkeypatch.setattr(attempt_module.Attempt, "_open_hub", lambda *_: None)
    begun, over = tmp_path / "begun", tmp_path / "over"

    def occupy(batches: Any) -> Any:
        begun.touch()
        while not over.exists():
            time.sleep(0.05)
        yield from batches

    busy = threading.Thread(target=lambda: spark.range(0, 1, 1, 1).mapInArrow(occupy, "id long").collect())
    busy.start()
    try:
        wait_for(begun, busy)
        with pytest.raises(StartTimeoutError, match=r"0 of 2 ranks had started after start_timeout=1 s"):
            run(lambda: 1, num_proc=2, spark=spark, start_timeout=1)
    finally:
        over.touch()
        busy.join()
    assert run(reduce_one, num_proc=2, spark=spark) == [2.0, 2.0]


def test_a_second_run_waits_for_the_slots_of_the_first(spark: SparkSession, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"

    def slow() -> None:
        begun.touch()
        time.sleep(1)
        ended.touch()

    first = threading.Thread(target=lambda: run(slow, num_proc=2, spark=spark))
    first.start()
    wait_for(begun, first)
    assert run(lambda: (reduce_one(), ended.exists()), num_proc=2, spark=spark) == [(2.0, True)] * 2
    first.join()


def test_spark_itself_cannot_travel(spark: SparkSession) -> None:
    context, frame = spark.sparkContext, spark.range(3)
    with pytest.raises(
        UnpicklableError, match=r"closure variable 'context' is a SparkContext of Spark.*\nRanks have no"
    ):
        run(lambda: context.parallelize([1]), num_proc=2, spark=spark)
    with pytest.raises(UnpicklableError, match=r"args\[0\] is a DataFrame of Spark.*\n.*Parquet"):
        run(print, args=(frame,), num_proc=2, spark=spark)
    sent, count = context.broadcast([1]), context.accumulator(0)
    with pytest.raises(UnpicklableError, match=r"closure variable 'sent' is a Broadcast of Spark.*\n.*Pass the value"):
        run(lambda: sent.value, num_proc=2, spark=spark)
    with pytest.raises(UnpicklableError, match=r"closure variable 'count' is a Accumulator of Spark.*\n.*return what"):
        run(lambda: count.add(1), num_proc=2, spark=spark)
    assert spark.range(2).rdd.map(lambda row: count.add(sent.value[0])).count() == 2  # type: ignore[func-returns-value]
    assert count.value == 2


def blocking_python(tmp_path: Path, module: str, error: str) -> str:
    """Make a Python interpreter in which importing one module raises, as on an executor that lacks it."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import sys

            class Missing:
                def find_spec(self, name, path=None, target=None):
                    if name == {module!r}:
                        raise {error}

            sys.meta_path.insert(0, Missing())
        """)
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.night
def test_spark_hvd_missing_on_an_executor(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = blocking_python(tmp_path, "spark_hvd", """ModuleNotFoundError("No module named 'spark_hvd'")""")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python)
    told = rf"would run {python}, .* No module named 'spark_hvd'\. This program runs {sys.executable}"
    with pytest.raises(SetupError, match=told):
        run(lambda: 1, num_proc=2, spark=spark)
    for place in (job, on_spark):  # as on a cluster whose hosts are unknown
        monkeypatch.setattr(place, "choose_python", lambda spark: None)
    with pytest.raises(
        SetupError, match=rf"No module named 'spark_hvd'; Python {sys.version.split()[0]} \(.*\) on host"
    ):
        run(lambda: 1, num_proc=2, spark=spark)
    monkeypatch.undo()
    assert run(reduce_one, num_proc=2, spark=spark) == [2.0, 2.0]


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'torch'",
        "OSError: libcudart.so.12: cannot open shared object file",  # a torch for CUDA raises this without CUDA
    ],
)
@pytest.mark.slow
def test_torch_missing_on_an_executor(
    error: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, text = error.split(": ", 1)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", blocking_python(tmp_path, "torch", f"{kind}({text!r})"))
    told = rf"torch cannot be imported by .* \(Python {sys.version.split()[0]}\): {error}"
    with daemon_of(spark, "pyspark.daemon"), pytest.raises(RankFailedError, match=told):
        run(lambda: 1, num_proc=2, spark=spark, verbose=0)


def cut_off(*partitions: int) -> Any:
    """Make a task unable to reach the driver's published port, as behind a firewall, and to notice soon."""

    def make(module: str, function: str, spec: bytes, payload: bytes, **_: Any) -> Any:
        def wrapped(batches: Any) -> Any:
            import dataclasses
            import pickle
            from unittest import mock

            from pyspark import BarrierTaskContext

            from spark_hvd.runner.supervise import task, team

            told = pickle.loads(spec)
            context = BarrierTaskContext.get()
            assert isinstance(context, BarrierTaskContext)
            if context.partitionId() in partitions:
                told = dataclasses.replace(told, hub=dataclasses.replace(told.hub, port=1))
            list(batches)
            with mock.patch.object(team, "_CONNECT_WAIT", 2.0):
                yield from task.run_task(told, payload)

        return wrapped

    return make


@pytest.mark.slow
def test_executors_that_cannot_reach_the_driver_meet_without_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "task_of", cut_off(0, 1))
    assert run(reduce_one, num_proc=2, spark=spark) == [2.0, 2.0]

    def fail() -> None:
        if hvd().rank() == 1:
            raise ValueError("seen without the driver's hub")
        reduce_one()

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 .*seen without the driver's hub"):
        run(fail, num_proc=2, spark=spark)


@pytest.mark.night
def test_one_executor_that_cannot_reach_the_driver_makes_all_meet_without_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt_module, "task_of", cut_off(1))
    with caplog.at_level(logging.WARNING, logger="spark_hvd"):
        assert run(reduce_one, num_proc=2, spark=spark) == [2.0, 2.0]
    assert "ranks [1] cannot reach this program" in caplog.text


@pytest.mark.parametrize(
    ("host", "warns"),
    [("localhost", False), ("192.0.2.77", True), pytest.param("no-such-host.invalid", True, marks=pytest.mark.slow)],
)
def test_a_driver_host_that_is_a_name_or_no_address_of_the_driver(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, warns: bool
) -> None:
    real = attempt_module.on_spark.conf
    changed = {"spark.driver.host": host, "spark.driver.bindAddress": None}
    monkeypatch.setattr(attempt_module.on_spark, "conf", lambda session, key: changed.get(key, real(session, key)))
    with caplog.at_level(logging.WARNING, logger="spark_hvd"):
        assert run(reduce_one, num_proc=2, spark=spark) == [2.0, 2.0]
    assert ("spark.driver.bindAddress" in caplog.text) is warns


LIBRARY = "def train():\n    import spark_hvd.torch as hvd\n    return hvd.rank() + 40\n"


def test_files_of_the_session_reach_the_ranks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirlib.py").write_text(LIBRARY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spark.sparkContext.addPyFile(str(tmp_path / "theirlib.py"))
    import theirlib  # type: ignore[import-not-found]

    assert run(theirlib.train, num_proc=2, spark=spark) == [40, 41]


@pytest.mark.night  # by day: a program under spark-submit in test_command_line.py, and files of a session above
def test_run_under_spark_submit_with_py_files(tmp_path: Path) -> None:
    import pyspark

    (tmp_path / "mylib.py").write_text(LIBRARY)
    job = tmp_path / "job.py"
    job.write_text(
        textwrap.dedent("""
            from pyspark.sql import SparkSession
            import mylib, spark_hvd

            spark = SparkSession.builder.getOrCreate()
            print("values", spark_hvd.run(mylib.train, num_proc=2))
            spark.stop()
        """)
    )
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(submit), "--master", "local[2]", "--py-files", str(tmp_path / "mylib.py")]
    for setting in ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"):
        command += ["--conf", setting]
    done = subprocess.run([*command, str(job)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "values [40, 41]" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_large_arguments_and_values_go_around_the_heap(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    import pyspark.serializers

    sent: list[int] = []
    real = pyspark.serializers.CloudPickleSerializer.dumps

    def dumps(self: Any, value: Any) -> bytes:
        data: bytes = real(self, value)
        sent.append(len(data))
        return data

    monkeypatch.setattr(pyspark.serializers.CloudPickleSerializer, "dumps", dumps)
    data = os.urandom(17 << 20)
    start = run_elastic if elastic else run
    values = start(lambda given: given[::-1], (data,), num_proc=2, spark=spark)
    assert [value == data[::-1] for value in values] == [True, True]
    assert max(sent) < 1 << 20


def test_nothing_is_alive_when_run_returns(spark: SparkSession) -> None:
    run(reduce_one, num_proc=2, spark=spark)
    assert ranks_alive() == []


def test_no_spark_in_the_ranks(spark: SparkSession) -> None:
    assert run(lambda: [name for name in sys.modules if name.split(".")[0] == "pyspark"], num_proc=1, spark=spark) == [
        []
    ]
