"""Checks the application's settings: PySpark, slots, barrier stages, memory, and the size of results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spark_hvd.runner.diagnosis.report import Finding, Level, error, ok, warning
from spark_hvd.runner.spark.slots import AT_ONCE

SETTINGS = (
    "spark.master",
    "spark.executor.cores",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.memoryOverheadFactor",
    "spark.executor.pyspark.memory",
    "spark.executor.resource.gpu.amount",
    "spark.executor.resource.gpu.discoveryScript",
    "spark.task.resource.gpu.amount",
    "spark.dynamicAllocation.enabled",
    "spark.local.dir",
)
"""The application's settings that the checks use."""

_RANK_BYTES = 1 << 30
"""The minimum that a rank needs besides the executor's Java heap, for torch, a small model and buffers."""
_MIB = 1 << 20
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkFacts:
    """The application as its driver sees it.

    Attributes:
        version: Spark's version.
        pyspark: The version of this program's PySpark, and its directory.
        installed: The installed packages that provide a ``pyspark``, with their versions.
        master: The URL of the master.
        local: Whether all tasks run in the driver's JVM.
        connect: Whether the session is a Spark Connect client.
        slots: Tasks that can run at once, busy slots included; None if Spark does not say.
        asked: Tasks wanted, of ``procs_per_task`` ranks each; None means every slot.
        lacking: The message with which a run would report too few slots; "" if there are enough, or Spark does not say.
        procs_per_task: Ranks per task.
        task_cpus: Cores per task.
        busy: Tasks of other jobs that run now.
        result_bytes: How much all ranks together may return, in bytes; None if Spark does not say.
        settings: Those of SETTINGS that are set.
    """

    version: str
    pyspark: tuple[str, str]
    installed: tuple[str, ...]
    master: str
    local: bool
    connect: bool
    slots: int | None
    asked: int | None
    lacking: str
    procs_per_task: int
    task_cpus: int
    busy: int
    result_bytes: int | None
    settings: Mapping[str, str]

    def get(self, key: str, default: str = "") -> str:
        """Return the value of a setting, or the default if it is not set."""
        return self.settings.get(key, default)


def check_spark(facts: SparkFacts) -> Iterator[Finding]:
    """Yield all findings that follow from the settings alone."""
    for check in (check_pyspark, check_slots, check_barrier, check_memory, check_results):
        yield from check(facts)


def check_pyspark(facts: SparkFacts) -> Iterator[Finding]:
    """Check that there is only one PySpark, and that its version matches Spark's."""
    version, where = facts.pyspark
    here, there = ([int(part) for part in each.split(".")[:2]] for each in (version, facts.version))
    found = f"PySpark {version} ({where})"
    if len(facts.installed) > 1:
        names = [each.split()[0] for each in facts.installed]
        yield error(
            "PySpark",
            f"{found} comes from {len(facts.installed)} packages, which overwrite each other's files: "
            f"{', '.join(facts.installed)}",
            f"pip uninstall -y {' '.join(names)}   # then install the one that your cluster needs",
        )
    elif here != there and not facts.connect:
        yield error(
            "PySpark",
            f"two PySparks are on the path: {found}, and the one of Spark {facts.version}, to which SPARK_HOME points",
            f"Unset SPARK_HOME, or pip install pyspark=={facts.version}",
        )
    elif here > there:
        yield warning(
            "PySpark",
            f"{found} is newer than the Spark Connect server, {facts.version}: Spark supports only older clients",
            f"pip install 'pyspark-client=={'.'.join(map(str, there))}.*'",
        )
    else:
        yield ok("PySpark", f"{found}, Spark {facts.version}")


def check_slots(facts: SparkFacts) -> Iterator[Finding]:
    """Check that there are enough slots for the tasks, and enough free slots for them now."""
    slots, requested = facts.slots, facts.asked
    kind = "local mode: all ranks share this machine" if facts.local else f"master {facts.master}"
    if facts.lacking:
        found, _, remedy = facts.lacking.partition(AT_ONCE)
        yield error("slots", f"{found}{AT_ONCE}", remedy.strip())
    elif slots is None:
        found = f"Spark Connect cannot say how many tasks can run at once ({kind})"
        remedy = "run(..., num_proc=4)   # set the number of ranks; doctor(num_proc=4) tries that many"
        yield ok("slots", found) if requested else warning("slots", f"{found}; one was tried", remedy)
    else:
        yield ok("slots", f"{slots} available{'' if requested is None else f', {requested} needed'} ({kind})")
    if slots and facts.busy:
        enough = slots - facts.busy >= (requested or slots)
        yield Finding(
            "busy slots",
            Level.OK if enough else Level.WARNING,
            f"{facts.busy} of {slots} slots are held by tasks of other jobs now",
            "" if enough else "Wait for those jobs, or stop them: a run starts once all its slots are free together",
        )


def check_barrier(facts: SparkFacts) -> Iterator[Finding]:
    """Check that Spark can run a barrier stage."""
    if facts.get("spark.dynamicAllocation.enabled") == "true" and not facts.local:
        yield error(
            "dynamic allocation",
            "spark.dynamicAllocation.enabled=true: Spark refuses barrier stages with it (SPARK-24942), and ranks need "
            "one",
            "--conf spark.dynamicAllocation.enabled=false --conf spark.executor.instances="
            f"{max(1, facts.asked or facts.slots or 1)}",
        )
    else:
        yield ok("dynamic allocation", "off, as barrier stages require")


def check_memory(facts: SparkFacts) -> Iterator[Finding]:
    """Check that ranks have enough memory outside the executor's Java heap."""
    limit = size_of(facts.get("spark.executor.pyspark.memory"), _MIB)
    if limit and limit < 4 << 30:
        yield warning(
            "Python memory",
            f"spark.executor.pyspark.memory={facts.get('spark.executor.pyspark.memory')} limits the address space of "
            "Python processes; torch maps several GiB of it that it never uses",
            "--conf spark.executor.pyspark.memory=8g, or leave it unset",
        )
    if facts.local or not facts.master.startswith(("yarn", "k8s")):
        return  # other cluster managers do not enforce the overhead
    ranks = max(1, int(facts.get("spark.executor.cores", "1")) // facts.task_cpus) * facts.procs_per_task
    heap = size_of(facts.get("spark.executor.memory", "1g"), _MIB)
    factor = float(facts.get("spark.executor.memoryOverheadFactor", "0.1"))
    overhead = size_of(facts.get("spark.executor.memoryOverhead"), _MIB) or max(384 * _MIB, int(heap * factor))
    found = f"{overhead // _MIB} MiB besides the Java heap of an executor, for {ranks} ranks"
    if overhead < ranks * _RANK_BYTES:
        yield warning(
            "memory overhead",
            f"{found}: the cluster manager kills an executor that takes more, and torch alone takes 300 MB a rank",
            f"--conf spark.executor.memoryOverhead={ranks * 2}g",
        )
    else:
        yield ok("memory overhead", found)


def check_results(facts: SparkFacts) -> Iterator[Finding]:
    """Check how much the ranks may return."""
    if facts.result_bytes is None or facts.local:  # in local mode, large values pass through files
        return
    found = f"all ranks together may return {facts.result_bytes // _MIB} MiB"
    if facts.result_bytes < 128 * _MIB:
        yield warning(
            "return values",
            f"{found} (the lesser of spark.driver.maxResultSize and a fifth of the driver's Java heap)",
            "--conf spark.driver.maxResultSize=1g --driver-memory 4g",
        )
    else:
        yield ok("return values", found)


def size_of(text: str, unit: int = 1) -> int:
    """Parse one of Spark's sizes, such as "512m", into bytes. A bare number counts in ``unit``; other texts give 0."""
    match = re.fullmatch(r"(\d+)\s*([bkmgt]?)b?", text.strip().lower())
    if match is None:
        return 0
    return int(match[1]) * (_UNITS[match[2]] if match[2] else unit)
