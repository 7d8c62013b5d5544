"""Each finding that follows from the application's settings, and its remedy."""

from __future__ import annotations

import pytest

from spark_hvd.runner.diagnosis.report import Level
from spark_hvd.runner.diagnosis.spark_checks import check_spark, explain_job_failure, size_of
from tests.doctor_cases import GIB, application, levels, of


def test_an_application_that_is_well_has_no_remedies() -> None:
    found = list(check_spark(application(settings={"spark.executor.memoryOverhead": "2g"})))
    assert levels(found) == {Level.OK}
    assert not any(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("master", "settings", "remedy"),
    [
        ("local[4]", {}, 'master("local[10]")'),
        ("yarn", {"spark.executor.cores": "4", "spark.task.cpus": "2"}, "--conf spark.executor.instances=5"),
        ("spark://h:7077", {"spark.task.cpus": "2"}, "--conf spark.cores.max=20"),
    ],
)
def test_too_few_slots_name_the_setting(master: str, settings: dict[str, str], remedy: str) -> None:
    finding = of("slots", check_spark(application(master, asked=10, settings=settings)))
    assert finding.level is Level.ERROR
    assert "num_proc=10: 10 slots wanted, 4 there" in finding.found
    assert remedy in finding.remedy
    assert finding.remedy.startswith("run(..., num_proc=4)")


def test_tasks_of_several_ranks() -> None:
    finding = of("slots", check_spark(application(asked=5, procs_per_task=2)))
    assert "num_proc=10: 5 slots wanted, 4 there" in finding.found
    assert finding.remedy.startswith("run(..., num_proc=8)")


def test_no_slot_at_all_is_an_error_whatever_was_asked_for() -> None:
    finding = of("slots", check_spark(application(slots=0, asked=None)))
    assert finding.level is Level.ERROR
    assert "run(" not in finding.remedy, "there is no number of ranks that would work"


def test_slots_held_by_others() -> None:
    assert of("busy slots", check_spark(application(busy=1))).level is Level.WARNING
    assert of("busy slots", check_spark(application(busy=1, asked=3))).level is Level.OK


def test_connect_cannot_say() -> None:
    assert "cannot say" in of("slots", check_spark(application(slots=None, connect=True))).found
    finding = of("slots", check_spark(application(slots=None, connect=True, asked=None)))
    assert (finding.level, "num_proc=4" in finding.remedy) == (Level.WARNING, True)


def test_dynamic_allocation() -> None:
    finding = of("dynamic allocation", check_spark(application(settings={"spark.dynamicAllocation.enabled": "true"})))
    assert finding.level is Level.ERROR
    assert finding.remedy == "--conf spark.dynamicAllocation.enabled=false --conf spark.executor.instances=4"


def test_overhead_where_it_is_enforced() -> None:
    settings = {"spark.executor.cores": "4", "spark.executor.memory": "8g"}
    finding = of("memory overhead", check_spark(application(settings=settings)))
    assert finding.level is Level.WARNING
    assert finding.found.startswith("819 MiB beside the Java heap of an executor, for 4 ranks")
    assert finding.remedy == "--conf spark.executor.memoryOverhead=8g"
    assert not [
        f for f in check_spark(application("spark://h:7077", settings=settings)) if f.check == "memory overhead"
    ]


def test_a_limit_on_the_address_space() -> None:
    finding = of("Python memory", check_spark(application(settings={"spark.executor.pyspark.memory": "2g"})))
    assert finding.level is Level.WARNING
    assert "spark.executor.pyspark.memory=8g" in finding.remedy


def test_little_room_for_values() -> None:
    finding = of("return values", check_spark(application(result_bytes=50 << 20)))
    assert finding.level is Level.WARNING
    assert "may return 50 MiB" in finding.found
    assert "spark.driver.maxResultSize" in finding.remedy


@pytest.mark.parametrize(
    ("text", "bytes_"), [("2g", 2 * GIB), ("512m", 512 << 20), ("512mb", 512 << 20), ("100", 100), ("x", 0), ("", 0)]
)
def test_sizes(text: str, bytes_: int) -> None:
    assert size_of(text) == bytes_


@pytest.mark.parametrize(
    ("text", "check", "part"),
    [
        (
            "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.2 executor 1): [PYTHON_VERSION_MISMATCH] Python in worker has "
            "different version: 3.10 than that in driver: 3.11\n at x",
            "Python version",
            "10.0.0.2: PYTHON_VERSION_MISMATCH] Python in worker",
        ),
        (
            'Lost task 0.0 (TID 3) (10.0.0.2 executor 1): java.io.IOException: Cannot run program "/opt/py": error=2',
            "Python executable",
            "10.0.0.2 cannot start /opt/py",
        ),
        ("ModuleNotFoundError: No module named 'pyarrow'\n", "packages", "No module named 'pyarrow'"),
        (
            "ModuleNotFoundError: No module named 'spark_hvd.runner.x'",
            "packages",
            "has another spark_hvd than the driver",
        ),
        ("\n  something else\nat x", "executors", "the Spark job failed: something else"),
    ],
)
def test_what_spark_says_of_a_job_that_failed(text: str, check: str, part: str) -> None:
    finding = explain_job_failure("executors", text)
    assert (finding.check, finding.level) == (check, Level.ERROR)
    assert part in finding.found
    assert finding.remedy
