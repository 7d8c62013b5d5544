"""Translates Spark's error for a failed job into one of our errors."""

from __future__ import annotations

import re

from spark_hvd.runner.outcome.errors import ClusterError, ExecutorLostError, ResultTooLargeError, RunError, SetupError
from spark_hvd.runner.spark.reach import Placement


def _marked(kind: str) -> re.Pattern[str]:
    # A traceback also shows the line of code that makes the text. There, a quote is before the marker.
    return re.compile(rf'(?<!")SPARK_HVD_{kind}: (.*?):END', re.DOTALL)


_SETUP = _marked("SETUP")
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(pyarrow|pandas|numpy|spark_hvd|pyspark)[.\w]*'")
_PYTHON = re.compile(r'.*(PYTHON_VERSION_MISMATCH|Python in worker has different version|Cannot run program ").*')
_LOST = re.compile(r"(ExecutorLostFailure|Lost executor|executor heartbeat timed out|Worker lost|ExecutorExit).*")
_EXECUTOR = re.compile(r"\(executor (\S+) ")
_SILENT = _marked("LOST")
_UNREACHABLE = _marked("UNREACHABLE")
_CRASHED = re.compile(r"Python worker exited unexpectedly|Python worker failed to connect back")
_CANCELLED = re.compile(r"Job \d+ cancelled[^\n]*|\[SPARK_JOB_CANCELLED\][^\n]*")
_TOO_LARGE = re.compile(r"(Total size of serialized results.*?maxResultSize[^\n]*)")
_HEAP = re.compile(r"java\.lang\.OutOfMemoryError[^\n]*")
_FRAME = re.compile(r"\s+(at \S+\(.*\)|\.\.\. \d+ more)$")
_MESSAGE = re.compile(r"message larger than max \([^)]*\)")

_INSTALL = (
    "Install spark_hvd (with pyarrow and pyzmq) for that Python on every executor, or point PYSPARK_PYTHON at one that "
    "has it."
)
_ONE_PYTHON = (
    "The driver and all executors need one minor version of Python: set PYSPARK_PYTHON, or spark.pyspark.python, to a "
    "path that every host has."
)
_LOG = (
    "Look in the executor's log. The usual reason is a lack of memory: ranks use that of spark.executor.memoryOverhead."
)
_SILENT_HOST = (
    "The host may be down, suspended or cut off from the driver. Spark itself notices after spark.network.timeout "
    "(120 s); a run that you start before then may wait for that host."
)


def silent(lost: str) -> ExecutorLostError:
    """Return the error for tasks from which the hub no longer hears."""
    return ExecutorLostError(f"lost {lost}; all other ranks were stopped. {_SILENT_HOST}")


def heap_full(error: Exception) -> ClusterError | None:
    """Return the error to raise if the driver's JVM ran out of memory; None if ``error`` has another cause."""
    if (match := _HEAP.search(str(error))) is None:
        return None
    return ClusterError(
        f"the driver's JVM is out of memory: {match[0]}. fn and its arguments pass through it, and its results may, "
        "too. Put large data where the ranks can read it and pass fn the path, or start the application with a larger "
        "spark.driver.memory."
    )


def translate(error: Exception, size: int, placement: Placement | None = None) -> RunError:
    """Return one of our errors, which names a remedy, for one of Spark's."""
    text = str(error)
    if match := _SETUP.search(text):
        return SetupError(f"{match[1]} {_INSTALL}")
    if match := _PYTHON.search(text):
        return SetupError(f"{match[0].strip()[:400]}. {_ONE_PYTHON}")
    if match := _MISSING.search(text):  # PySpark imports some of them itself, before our code runs
        return SetupError(f"{match[0]}, in the Python of an executor. {_INSTALL}")
    if match := _SILENT.search(text):
        return ExecutorLostError(f"{match[1]}. {_SILENT_HOST}")
    if match := _UNREACHABLE.search(text):
        return ClusterError(match[1])
    if match := _TOO_LARGE.search(text):
        return ResultTooLargeError(
            f"the values that fn returned are too large to collect: {match[1]}. Return less (save the model from rank "
            "0 and return its path), or raise spark.driver.maxResultSize."
        )
    if match := _MESSAGE.search(text):
        return ClusterError(
            f"fn and its arguments are too large for Spark Connect: {match[0]} bytes. Put large data where the ranks "
            "can read it, and pass fn the path."
        )
    if match := _LOST.search(text):
        executor = _EXECUTOR.search(text)
        where = placement.on_executor(executor[1], size) if placement and executor else None
        what = f"the executor of {where}" if where else "an executor"
        return ExecutorLostError(
            f"Spark lost {what} while {size} ranks were running; all were stopped: {match[0].strip()[:500]}. {_LOG}"
        )
    if _CRASHED.search(text):
        return ExecutorLostError(
            f"a Spark Python worker was killed while {size} ranks were running; all were stopped. {_LOG}"
        )
    if "SPARK-24820" in text or "SPARK-24819" in text or "SPARK-24942" in text:
        return ClusterError(f"Spark refused the barrier stage: {text.splitlines()[0]}")
    if match := _CANCELLED.search(text):
        return RunError(f"the Spark job of this run was cancelled, but not by spark_hvd: {match[0].strip()}")
    return RunError(f"the Spark job of this run failed: {_first_lines(text)}")


def translate_elastic(error: Exception) -> RunError:
    """Do the same for the job of an elastic run, which Spark ends once a single task has failed too often."""
    text = str(error)
    made = translate(error, 1)
    if isinstance(made, ExecutorLostError):
        return ExecutorLostError(
            f"Spark gave up the job of this elastic run because one of its tasks was lost too often: "
            f"{_first_lines(text, 3)}. Start the application with a larger spark.task.maxFailures: Spark counts the "
            "lost executors of each task."
        )
    return made


def _first_lines(text: str, count: int = 40) -> str:
    """Return the first lines, without the JVM's stacks, behind which a Python exception comes."""
    return "\n".join([line for line in text.strip().splitlines() if not _FRAME.match(line)][:count])
