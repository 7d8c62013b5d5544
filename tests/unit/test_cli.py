"""What the command line accepts, before anything starts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from spark_hvd import __version__
from spark_hvd.runner import RankFailedError
from spark_hvd.runner.cli import exit_code_of, main
from spark_hvd.runner.cli.horovodrun import REFUSED, TUNING
from spark_hvd.runner.config import HERE, Network, Reporting
from spark_hvd.runner.diagnosis.build import describe
from spark_hvd.runner.diagnosis.facts import Package
from spark_hvd.runner.elastic import local as elastic_local
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.launch import local
from spark_hvd.runner.options import options_of
from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.runner.rank.process import exit_code
from spark_hvd.runner.rank.script import Script, ScriptExitError
from spark_hvd.world.env import read_config


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of `run_local` instead of starting ranks."""
    seen: list[dict[str, Any]] = []
    for module, name in ((local, "run_local"), (elastic_local, "run_elastic_local")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, functools.wraps(original)(lambda fn, **kwargs: seen.append(kwargs)))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    return seen


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import sys\n")
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_version() -> None:
    assert invoke("--version").output == f"spark-hvd, version {__version__}\n"


def test_arguments_after_the_script_are_the_scripts(calls: list[dict[str, Any]], script: str) -> None:
    done = invoke("run", "-np", "2", "--backend", "gloo", "--env", "A=b=c", script, "-np", "7", "--env", "x", "--help")
    assert done.exit_code == 0, done.output
    (call,) = calls
    (program,) = call.pop("args")
    assert program.arguments == ("-np", "7", "--env", "x", "--help")
    assert call == {"num_proc": 2, "backend": "gloo", "env": {"A": "b=c"}, "verbose": 1}


def test_a_variables_value_need_not_be_on_the_command_line(
    calls: list[dict[str, Any]], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine can read command lines."""
    monkeypatch.setenv("TOKEN", "x=y z")
    done = invoke("run", "-np", "2", "--env", "TOKEN", "--env", "A=TOKEN", "--env", "EMPTY=", script)
    assert done.exit_code == 0, done.output
    assert calls[0]["env"] == {"TOKEN": "x=y z", "A": "TOKEN", "EMPTY": ""}
    assert "in ps" in " ".join(invoke("run", "--help").output.split())


@pytest.mark.parametrize("command", [["python", "-u"], ["python3.11"], ["/usr/bin/python3"]])
def test_horovodruns_way_to_name_a_script(calls: list[dict[str, Any]], script: str, command: list[str]) -> None:
    assert invoke("run", "-np", "2", *command, script, "--epochs", "3").exit_code == 0
    (program,) = calls[0]["args"]
    assert (program.name, program.arguments) == (script, ("--epochs", "3"))


@pytest.mark.parametrize("arguments", [["-m", "package.train"], ["python", "-m", "package.train"]])
def test_a_module(calls: list[dict[str, Any]], arguments: list[str]) -> None:
    assert invoke("run", "-np", "2", *arguments, "x").exit_code == 0
    assert calls[0]["args"] == (Script("package.train", ("x",), os.getcwd(), None),)


def test_options_reach_the_run(calls: list[dict[str, Any]], script: str) -> None:
    done = invoke(
        "run", "--num-proc", "4", "--procs-per-task", "2", "--mpi", "--mpi-library", "mpich", "--network-interfaces",
        "eth0, 10.0.0.0/8", "--start-timeout", "30", "--max-restarts", "3", "--quiet", "--data", "train=a=b", "--data",
        "val=s3://b/c", script,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    del calls[0]["args"]
    assert calls[0] == {
        "num_proc": 4, "backend": "mpi", "start_timeout": 30.0,
        "network": Network(mpi="mpich", interfaces=["eth0", "10.0.0.0/8"]),
        "max_restarts": 3, "env": {}, "verbose": 0, "data": {"train": "a=b", "val": "s3://b/c"},
    }  # fmt: skip


def test_a_page_is_a_flag_before_the_script(calls: list[dict[str, Any]], script: str) -> None:
    assert invoke("run", "-np", "2", "--page", script).exit_code == 0
    assert calls[0]["reporting"] == Reporting(page=True)
    assert invoke("run", "-np", "2", script).exit_code == 0
    assert "reporting" not in calls[1]  # the variable decides


def test_every_option_of_an_elastic_run_reaches_it(calls: list[dict[str, Any]], script: str) -> None:
    done = invoke(
        "run", "-np", "2", "--min-np", "1", "--max-np", "3", "--elastic-timeout", "9", "--reset-limit", "4",
        "--rejoin-timeout", "5", "--host-failure-limit", "6", "--blacklist-cooldown-range", "7", "8", script,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    given = {name: calls[0][name] for name in options_of(ElasticConfig) if name in calls[0]}
    assert given == {
        "num_proc": 2, "min_num_proc": 1, "max_num_proc": 3, "elastic_timeout": 9.0, "reset_limit": 4,
        "rejoin_timeout": 5.0, "host_failure_limit": 6, "cooldown_range": (7.0, 8.0), "backend": None, "env": {},
        "verbose": 1,
    }  # fmt: skip


def test_every_option_has_its_place_on_the_command_line() -> None:
    assert isinstance(main, click.Group)
    assert {each.name for each in main.commands["run"].params} >= options_of(ElasticConfig).keys() - {
        "env",
        "verbose",
        *HERE,
    }


HOROVODRUN = """
--num-proc -np --start-timeout --verbose --network-interfaces --network-interface --output-filename --config-file
--disable-cache -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity
--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
--torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc
--max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range
--timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles --stall-check --no-stall-check
--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable
--mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile
--hostfile --host-discovery-script --gloo --mpi --jsrun
"""


def test_every_option_of_horovodrun_is_known() -> None:
    """It works, or the message says what to do instead."""
    assert isinstance(main, click.Group)
    known = {flag for each in main.commands["run"].params for flag in [*each.opts, *each.secondary_opts]}
    assert set(HOROVODRUN.split()) <= known


def test_horovods_options_become_variables_that_the_core_reads(calls: list[dict[str, Any]], script: str) -> None:
    done = invoke(
        "run", "-np", "2", "--fusion-threshold-mb", "32", "--autotune", "--timeline-filename", "/tmp/t.json",
        "--stall-check-warning-time-seconds", "5", "--autotune-log-file", "x.csv", "--env", "MINE=1", script,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    config = read_config(calls[0]["env"])
    assert (config.fusion_threshold, config.autotune, config.timeline) == (32 << 20, True, "/tmp/t.json")
    assert (config.stall_warning, config.autotune_log) == (5.0, "x.csv")
    assert calls[0]["env"]["MINE"] == "1"


def test_every_tuning_option_is_known_to_the_core() -> None:
    default = read_config({})
    texts = {int: "7", float: "7", str: "x", None: "1"}
    for name, tuning in TUNING.items():
        text = "0" if "/" in name else texts[tuning.kind]
        assert read_config({tuning.variable: text}) != default, tuning.variable


@pytest.mark.parametrize(("option", "on"), [("--hierarchical-allreduce", True), ("--no-hierarchical-allreduce", False)])
def test_hierarchical_allreduce_is_as_the_command_line_says(
    option: str, on: bool, calls: list[dict[str, Any]], script: str
) -> None:
    assert invoke("run", "-np", "2", option, script).exit_code == 0
    assert calls[0]["env"]["HOROVOD_HIERARCHICAL_ALLREDUCE"] == str(int(on))
    assert read_config(calls[0]["env"]).hierarchical_allreduce is on


@pytest.mark.parametrize("names", REFUSED)
def test_options_without_a_place_here_say_why(names: tuple[str, ...], script: str) -> None:
    values, reason = REFUSED[names]
    for name in names:
        done = invoke("run", "-np", "2", name, *(["1"] * values), script)
        assert done.exit_code == 2
        assert f"Error: {names[0]}: {reason}" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-np", "3", "--procs-per-task", "2", "SCRIPT"], "expected -np to be a multiple of it"),
        (["run", "SCRIPT"], "-np is missing: how many ranks?"),
        (["run", "-np", "0", "SCRIPT"], "0 is not in the range"),
        (["run", "-np", "2", "--gpus-per-proc", "1", "SCRIPT"], "--gpus-per-proc is for a Spark cluster"),
        (["run", "-np", "2", "--max-restarts", "1", "--min-num-proc", "1", "SCRIPT"], "--min-num-proc is for a Spark"),
        (
            ["run", "-np", "2", "--max-np", "3", "--cpus-per-proc", "1", "SCRIPT"],
            "--cpus-per-proc is for a Spark cluster",
        ),
        (["run", "-np", "2", "--max-np", "3", "--max-restarts", "1", "SCRIPT"], "--max-num-proc is for elastic runs"),
        (["run", "-np", "2", "--env", "NONE_SUCH", "SCRIPT"], "'NONE_SUCH': expected NAME=VALUE, or the name of a"),
        (["run", "-np", "2", "--data", "/tmp/x", "SCRIPT"], "'/tmp/x': expected NAME=PATH, such as train=s3://"),
        (["run", "-np", "2", "--data", "train=", "SCRIPT"], "'train=': expected NAME=PATH"),
        (["run", "-np", "2", "--data", "a=x", "--data", "a=y", "SCRIPT"], "'a' is given twice: expected one path for"),
        (["run", "-np", "2", "nowhere.py"], "nowhere.py: No such file or directory. Expected a Python script"),
        (["run", "-np", "2", "python"], "Expected a Python script"),
        (["run", "-np", "2"], "Missing argument 'SCRIPT'"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, script: str, calls: list[Any]) -> None:
    done = invoke(*[script if argument == "SCRIPT" else argument for argument in arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert not calls


def test_a_syntax_error_shows_before_anything_is_started(tmp_path: Path, calls: list[Any]) -> None:
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    done = invoke("run", "-np", "2", str(tmp_path / "bad.py"))
    assert done.exit_code == 1
    assert "bad.py, line 2" in done.output
    assert not calls


def test_exit_codes() -> None:
    def error(cause: Exception | None, code: int | None) -> RankFailedError:
        made = RankFailedError("x", (Failed(1, "h", FailureKind.EXIT, "x", exitcode=code),))
        made.__cause__ = cause
        return made

    assert exit_code_of(error(ScriptExitError(3), None)) == 3
    assert exit_code_of(error(ValueError(), None)) == 1
    assert exit_code_of(error(None, 5)) == 5
    assert exit_code_of(error(None, -9)) == 137
    assert [exit_code(code) for code in (None, 0, 3, True, -1, 256)] == [0, 0, 3, 1, 255, 0]


def test_text_given_to_exit_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("no data") == 1
    assert capsys.readouterr().err == "no data\n"


def test_what_is_available_and_how_to_get_the_rest() -> None:
    torch = Package("2.5.0", detail={"gloo": True, "nccl": False})
    missing = Package(error="ModuleNotFoundError: x", missing=True)
    broken = Package(error="ImportError: libmpi.so.12: cannot open shared object file")
    found = {
        "torch": torch,
        "lightning": missing,
        "mpi4py": broken,
        "pyspark": Package("4.0"),
        "pyarrow": Package("18"),
    }
    text = describe(found, "17.0.1", {}, None)
    for line in (
        "[X] PyTorch 2.5.0", "[ ] Lightning: pip install lightning", "[X] Gloo", "[ ] NCCL: comes with torch for CUDA",
        "[ ] MPI: ImportError: libmpi.so.12", "[ ] MPI process manager: pip install mpich", "[X] Spark 4.0",
        "[X] Java 17.0.1", "[ ] Petastorm: pip install",
    ):  # fmt: skip
        assert line in text


def test_help_loads_neither_spark_nor_torch() -> None:
    program = (
        "import sys; from spark_hvd.runner.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: print([name for name in ('pyspark', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "spark-hvd run -np 2 train.py --epochs 3" in done.stdout


def test_every_command_has_help() -> None:
    assert isinstance(main, click.Group)
    for name, command in main.commands.items():
        assert command.help, name
