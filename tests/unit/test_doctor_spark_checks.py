"""Each finding that follows from the application's settings, and its remedy."""

from __future__ import annotations

import pytest

from spark_hvd.runner.diagnosis.report import Level
from spark_hvd.runner.diagnosis.spark_checks import check_spark, size_of
from spark_hvd.runner.spark.slots import AT_ONCE
from tests.doctor_cases import GIB, application, levels, of


def test_an_application_that_is_well_has_no_remedies() -> None:
    found = list(check_spark(application(settings={"spark.executor.memoryOverhead": "2g"})))
    assert levels(found) == {Level.OK}
    assert not any(finding.remedy for finding in found)


def test_two_pysparks_on_the_path() -> None:
    both = ("pyspark 4.3.0", "databricks-connect 17.2.0")
    finding = of("PySpark", check_spark(application(pyspark=("4.3.0", "/x/pyspark"), installed=both)))
    assert finding.level is Level.ERROR
    assert finding.found == (
        "PySpark 4.3.0 (/x/pyspark) comes from 2 packages, which overwrite each other's files: pyspark 4.3.0, "
        "databricks-connect 17.2.0"
    )
    assert finding.remedy.startswith("pip uninstall -y pyspark databricks-connect")
    finding = of("PySpark", check_spark(application(pyspark=("4.3.0", "/x/pyspark"), version="3.5.9")))
    assert finding.level is Level.ERROR
    paths = "two PySparks are on the path: PySpark 4.3.0 (/x/pyspark), and the one of Spark 3.5.9"
    assert finding.found.startswith(paths)
    assert finding.remedy == "Unset SPARK_HOME, or pip install pyspark==3.5.9"


@pytest.mark.parametrize(("server", "level"), [("4.2.1", Level.WARNING), ("4.10.0", Level.OK), ("4.3.1", Level.OK)])
def test_a_client_newer_than_its_server_and_the_reverse(server: str, level: Level) -> None:
    finding = of("PySpark", check_spark(application(pyspark=("4.3.0", "/x"), version=server, connect=True)))
    assert (finding.level, "pip install 'pyspark-client==4.2.*'" in finding.remedy) == (level, level is Level.WARNING)


def test_too_few_slots_are_what_a_run_says_of_them() -> None:
    lacking = f"num_proc=10: 10 slots needed, 4 available (master yarn). {AT_ONCE} Ask for fewer ranks."
    finding = of("slots", check_spark(application(asked=10, lacking=lacking)))
    assert finding.level is Level.ERROR
    assert finding.found == f"num_proc=10: 10 slots needed, 4 available (master yarn). {AT_ONCE}"
    assert finding.remedy == "Ask for fewer ranks."


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
    assert finding.found.startswith("819 MiB besides the Java heap of an executor, for 4 ranks")
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
