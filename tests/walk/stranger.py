"""A user who calls the interpreter by its full path, in an own folder, without activating an environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import not_activated
from tests.jvm import SHORT_LIVED

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    # One daemon for SQL and RDDs, with torch, as in the sessions of the other tests.
    "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    "spark.python.daemon.module": "tests.warm_daemon",
    "spark.log.level": "OFF",
    # Each query would be compiled, by Janino and by the JVM, for a few rows.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings that pages leave to a cluster's own configuration."""


def configure(folder: Path, *but_for: str) -> None:
    """Write the settings, except for some, where Spark looks if SPARK_CONF_DIR names this folder."""
    lines = [f"{name} {value}\n" for name, value in SETTINGS.items() if name not in but_for]
    (folder / "spark-defaults.conf").write_text("".join(lines))


def typed(folder: Path, *arguments: str, timeout: float) -> str:
    """Return Python's output, called with `arguments` in `folder`; it must succeed."""
    configure(folder)
    environment = {
        **not_activated(),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_CONF_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{done.stdout[-10_000:]}"
    return done.stdout
