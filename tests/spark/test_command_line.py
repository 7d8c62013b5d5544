"""The command line from outside: programs that are started and interrupted, and their exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from spark_hvd.runner import cli
from tests.conftest import not_activated, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "spark_hvd.runner.cli"]
LOOPBACK = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.ui.enabled=false"]
CONF = [part for setting in [*LOOPBACK, "spark.log.level=ERROR"] for part in ("--conf", setting)]

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(300)]


def environment() -> dict[str, str]:
    settings = {"PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return {**not_activated(), **settings}


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    process = start(arguments, folder)
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


SCRIPT = """
import sys
import torch
import helper
import spark_hvd.torch as hvd

class Mine:
    pass

print(__name__, sys.argv[1:], helper.NAME, float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
hvd.allgather_object(Mine())     # pickles by name: this is the main module
if sys.argv[1] == "exit" and hvd.rank() == 1:
    sys.exit(3)
sys.exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'beside'")
    return tmp_path


@pytest.mark.slow
def test_a_script_that_leaves_with_a_code_on_one_rank(folder: Path) -> None:
    code, out, err = finish([*PROGRAM, "run", "-np", "2", "train.py", "exit", "--lr", "0.1"], folder)
    assert code == 3, err
    assert sorted(out.splitlines()) == [f"[{rank}] __main__ ['exit', '--lr', '0.1'] beside 2.0" for rank in (0, 1)]
    assert err.startswith("spark-hvd: rank 1 of 2 failed on host 127.0.0.1: the script called sys.exit(3)\n")
    assert f'File "{folder / "train.py"}", line 13, in <module>\n    sys.exit(3)' in err
    assert "runner/" not in err, "no frame of ours"


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, time, pathlib, spark_hvd.torch as hvd\n"
        "pathlib.Path(f'pid-{hvd.rank()}').write_text(str(os.getpid()))\n"
        "time.sleep(200)\n"
    )
    process = start([*PROGRAM, "run", "-np", "2", "wait.py"], tmp_path)
    wait_until(lambda: sum(bool(path.read_text()) for path in tmp_path.glob("pid-*")) == 2, 120)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=250)
    assert (process.returncode, err) == (130, "spark-hvd: interrupted; all ranks were stopped\n")
    ranks = [Path("/proc", path.read_text()) for path in tmp_path.glob("pid-*")]
    wait_until(lambda: not any(rank.exists() for rank in ranks), 10)


@pytest.mark.parametrize("elastic", [[], ["--min-np", "1"]])
@pytest.mark.night
def test_data_of_a_path(tmp_path: Path, elastic: list[str]) -> None:
    pq.write_table(pa.table({"row": range(10)}), tmp_path / "rows.parquet")
    (tmp_path / "read.py").write_text(
        "import spark_hvd.torch as hvd\n"
        "for batch in hvd.get_dataset_shard('train').numpy_batches(5):\n"
        "    print(batch['row'].sum())\n"
    )
    code, out, err = finish(
        [*PROGRAM, "run", "-np", "2", *elastic, "--data", "train=rows.parquet", "read.py"], tmp_path
    )
    assert (code, sorted(out.splitlines())) == (0, ["[0] 10", "[1] 35"]), err
    code, _, err = finish([*PROGRAM, "run", "-np", "2", *elastic, "--data", "train=none.parquet", "read.py"], tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("spark-hvd: there is no "), err
    assert "none.parquet: expected a Parquet file or a directory of such files" in err


@pytest.mark.slow
def test_a_script_that_is_well_or_raises_or_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    def ran(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.main, ["run", "-np", "2", *arguments])  # in this process, which has torch
        return done.exit_code, done.output

    assert ran("--quiet", "train.py", "ok") == (0, "")
    Path("bad.py").write_text("def f():\n    raise KeyError('distance')\nf()\n")
    code, said = ran("python", "bad.py")
    assert code == 1
    assert "failed on host 127.0.0.1: KeyError: 'distance'" in said
    assert "line 2, in f" in said
    Path("killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert ran("killed.py")[0] == 137


@pytest.mark.night
def test_a_module_and_sigterm(folder: Path) -> None:
    code, out, err = finish([*PROGRAM, "run", "-np", "1", "-m", "train", "ok"], folder)
    assert (code, out) == (0, "[0] __main__ ['ok'] beside 1.0\n"), err
    (folder / "wait.py").write_text("import time; open('up', 'w').close(); time.sleep(200)")
    process = start([*PROGRAM, "run", "-np", "1", "wait.py"], folder)
    wait_until((folder / "up").exists, 120)
    process.terminate()
    process.communicate(timeout=250)
    assert process.returncode == 143


@pytest.mark.night
def test_a_script_on_spark_with_files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with zipfile.ZipFile(elsewhere / "lib.zip", "w") as archive:
        archive.writestr("helper.py", "NAME = 'shipped'")
    (folder / "helper.py").unlink()
    arguments = ["run", "-np", "2", "--py-files", str(elsewhere / "lib.zip"), *CONF, "train.py", "exit"]
    code, out, err = finish([*PROGRAM, *arguments[:3], "--master", "local[2]", *arguments[3:]], folder)
    assert code == 3, err
    assert sorted(out.splitlines()) == [f"[{rank}] __main__ ['exit'] shipped 2.0" for rank in (0, 1)]
    assert "rank 1 of 2 failed" in err


@pytest.mark.slow
def test_under_spark_submit(folder: Path) -> None:
    submit = str(Path(sys.executable).parent / "spark-submit")
    arguments = ["--master", "local[2]", *CONF, str(cli.__file__), "run", "-np", "2", "train.py", "exit"]
    # Spark's own script looks for a Python with pyspark before it runs any program of ours
    code, out, err = finish(["env", f"PYSPARK_PYTHON={sys.executable}", submit, *arguments], folder)
    assert code == 3, err
    assert "[0] __main__ ['exit'] beside 2.0" in out


@pytest.mark.night
def test_the_doctor_as_json_and_an_unreachable_master(tmp_path: Path) -> None:
    arguments = ["doctor", "-np", "3", "--master", "local[2]", *CONF]
    code, out, _ = finish([*PROGRAM, *arguments, "--json"], tmp_path)
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    (error,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert (error["check"], 'master("local[3]")' in error["remedy"]) == ("slots", True)
    code, out, err = finish([*PROGRAM, "doctor", "--master", "nonsense://x", *CONF], tmp_path)
    assert (code, out) == (1, "")
    assert "spark-hvd: no Spark session at nonsense://x: " in err
    assert "Traceback" not in err.rpartition("spark-hvd: ")[2]


@pytest.mark.night
def test_check_build(tmp_path: Path) -> None:
    code, out, _ = finish([*PROGRAM, "--check-build"], tmp_path)
    assert code == 0
    for line in ("[X] PyTorch 2.", "[X] Gloo", "[X] Spark 4.", "[X] Java 1", "[X] pyarrow"):
        assert line in out
