"""What is said of each mistake: its value, its place and the next step; and the session goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHORT_LIVED, not_activated
from tests.walk.mistakes import MISTAKES, NEVER

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("walk")
    (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in SETTINGS.items()))
    environment = {
        **not_activated(),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_CONF_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.walk.talk", str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_where_and_what_next(told: dict[str, dict[str, Any]], name: str) -> None:
    mistake, said = MISTAKES[name], told[name]["said"]
    assert (told[name]["message"] is not None) == mistake.fails, said
    missing = [part for part in (mistake.value, mistake.place, mistake.step) if part not in said]
    assert missing == [], said
    message = told[name]["message"] or said
    assert [word for word in NEVER if word in message] == [], message
    assert told[name]["runs"] == [2, 2]
