"""Starts the fork server early, before Spark's tasks ask for it, if this program can."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.supervise.processes import ForkServer, Interpreter, fork_server_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def torch_loading(session: SparkSession, env: Mapping[str, str | None]) -> Iterator[None]:
    """On a local master, import torch for ranks while Spark plans their stage and starts its Python workers.

    Tasks then find the server as if one of them had started it.

    Raises:
        SetupError: The Python of Spark's workers lacks modules that they need.
        ForkServerError: This machine does not run Linux.
    """
    server = _started(session, env) if on_spark.is_local(session) else None
    try:
        yield
    finally:
        if server is not None:
            server.close()


def _started(session: SparkSession, env: Mapping[str, str | None]) -> ForkServer | None:
    on_spark.choose_python(session)
    python = shutil.which(session.sparkContext.pythonExec)
    if python is None or os.path.abspath(python) != os.path.abspath(sys.executable):
        return None  # only the workers know the settings of another Python
    try:
        jvm, environ, path = spark_private.local_workers(session)
    except Exception as error:
        lost = "First runs of a session take a second or two longer."
        spark_private.does_not_tell(session, "how it starts Python workers", lost, error)
        return None
    return fork_server_of(Interpreter(python, environ, path), env, jvm)
