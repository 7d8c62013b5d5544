"""How our jobs appear in the Spark UI: in a group, with a description, their stages named after the user's line."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.spark.private import CALL_SITE, CALL_STACK, keeping_call_site
from spark_hvd.runner.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)
_GROUP, _DESCRIPTION = "spark.jobGroup.id", "spark.job.description"
_NOT_THE_USERS = {"spark_hvd", "pyspark", "py4j", "mlflow", "threading", "concurrent", "contextlib", "functools"}


@contextmanager
def job_group(spark: SparkSession, group: str) -> Iterator[None]:
    """Put this thread's jobs into a group, unless the user has set one, by which they may want to cancel the jobs.

    Spark Connect has no groups; there this does nothing.
    """
    with _properties(spark, {} if _property(spark, _GROUP) else {_GROUP: group}):
        yield


@contextmanager
def jobs_tagged(spark: SparkSession, tag: str, description: str) -> Iterator[None]:
    """Tag all jobs that this thread starts, so that they can be cancelled, and describe them.

    Spark Connect has no descriptions.
    """
    tagged: Any = spark if is_connect(spark) else spark.sparkContext
    add, remove = (tagged.addTag, tagged.removeTag) if tagged is spark else (tagged.addJobTag, tagged.removeJobTag)
    add(tag)
    try:
        with _properties(spark, {} if tagged is spark else {_DESCRIPTION: description}):
            yield
    finally:
        remove(tag)


@contextmanager
def job_named(frame: DataFrame, description: str, place: str | None = None, stack: str = "") -> Iterator[None]:
    """Name the jobs that this thread starts to compute `frame`, then restore the thread's previous names.

    Ours is appended to a description that the user has set. ``frame`` must be one that we have made, and its action
    must be called in this context. ``place`` names the stages, as :func:`call_site` returns it; None means the line
    that called us.
    """
    if is_connect(frame.sparkSession):  # the server describes jobs by their plans
        yield
        return
    if place is None:
        place, stack = call_site(description)
    own = _property(frame.sparkSession, _DESCRIPTION)
    description = f"{own} ({description})" if own else description
    named = {_DESCRIPTION: description, CALL_SITE: place, CALL_STACK: stack}
    with keeping_call_site(frame), _properties(frame.sparkSession, named):
        yield


def call_site(description: str) -> tuple[str, str]:
    """Return a name for stages that contains the user's line, and the stack that led there."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return f"{description.removeprefix('spark_hvd: ')} at {place}", "".join(traceback.format_stack(frame))


def _property(spark: SparkSession, name: str) -> str | None:
    return None if is_connect(spark) else spark.sparkContext.getLocalProperty(name)


@contextmanager
def _properties(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    """Set local properties of this thread, and restore them afterwards."""
    before = {name: _property(spark, name) for name in values}
    for name, value in values.items():
        _set(spark, name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            _set(spark, name, old)


def _set(spark: SparkSession, name: str, value: str | None) -> None:
    try:
        spark.sparkContext.setLocalProperty(name, value)  # type: ignore[arg-type] # None unsets it
    except Exception as error:  # the context may have been stopped; a missing name is no reason to fail
        _log.debug("cannot set %s: %s", name, error)
