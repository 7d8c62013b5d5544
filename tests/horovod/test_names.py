"""The package ``horovod`` made of our modules: in drivers, in ranks, next to a real one, and its command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_hvd.runner.cli import main
from spark_hvd.runner.cli.command_horovodrun import main as horovodrun
from tests.conftest import not_activated

WHEEL = Path(__file__).parents[2] / "examples" / "horovod_package"
SCRIPT = """
import os, sys
import torch
from horovod.torch.mpi_ops import allreduce_
import horovod.torch as hvd
hvd.init()
value = allreduce_(torch.full((2,), float(hvd.rank())), op=hvd.Sum)
rank, size = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
sys.stdout.write(f"rank {rank} of {size} {value.tolist()} {sys.argv[1:]}\\n")  # in one piece, beside the other rank
"""


def python(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = not_activated() | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [sys.executable, *arguments, "-c", code], capture_output=True, text=True, env=env, timeout=110
    )


@pytest.mark.slow
def test_every_name_is_found_and_says_what_is_not_there() -> None:
    """In its own process: all modules of the table, all of their names, and what is refused."""
    done = python("""
import importlib, sys
import spark_hvd.horovod
from spark_hvd.horovod.names import REFUSED, TABLE
assert not {"torch", "horovod", "pyspark"} & sys.modules.keys(), "names cost nothing before they are asked for"
for name, served in TABLE.items():
    if name in REFUSED or "tensorflow" in name or "keras" in name:
        continue  # theirs are in tests/contract/test_tensorflow.py; MXNet is not installed
    module = importlib.import_module(name)
    for attribute in dir(module):
        getattr(module, attribute)
    for attribute in served.names.keys() - {'__version__'}:
        assert attribute in dir(module), (name, attribute)
import horovod, horovod.torch as hvd, spark_hvd.torch
from horovod.spark.common.store import LocalStore
from horovod.common.exceptions import HorovodInternalError
from horovod.spark.common.backend import SparkBackend
assert SparkBackend(2, stdout=sys.stdout, nics="lo", prefix_output_with_timestamp=False)
assert hvd.elastic.run is spark_hvd.torch.elastic.run and hvd.allreduce is spark_hvd.torch.allreduce
assert HorovodInternalError is hvd.HorovodInternalError and horovod.run and LocalStore("/tmp/x").url == "/tmp/x"
try:
    hvd.check_that_it_is_told
except AttributeError as error:
    assert "docs/migrating-from-horovod.md" in str(error) and "horovod.torch.check_that_it_is_told" in str(error)
for name in [*REFUSED, "horovod.nothing", "horovod.ray.runner"]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "docs/migrating-from-horovod.md" in str(error), error
        assert name == "horovod.nothing" or any(why in str(error) for why in REFUSED.values()), error
    else:
        assert name == "horovod.mxnet", name
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_another_horovod_is_not_shadowed_silently(tmp_path: Path) -> None:
    real = tmp_path / "horovod"
    (real / "common").mkdir(parents=True)
    (real / "__init__.py").write_text("theirs = True\n")
    done = python("import spark_hvd.horovod, horovod; print(hasattr(horovod, 'theirs'))", path=tmp_path)
    assert done.stdout == "False\n"
    assert str(real) in done.stderr
    assert "pip uninstall horovod" in done.stderr
    done = python("import horovod, spark_hvd.horovod", path=tmp_path)
    assert "ImportError" in done.stderr
    assert str(real) in done.stderr
    # Our own package is not mistaken for another one, and finds everything by itself.
    ours = WHEEL
    done = python("import horovod.torch as hvd, horovod; hvd.init(); print(hvd.size(), horovod.__version__)", path=ours)
    assert (done.stdout, done.stderr) == ("1 0.28.1\n", "")


@pytest.mark.slow
def test_a_script_runs_on_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    wanted = {f"[{rank}] rank {rank} of 2 [1.0, 1.0] ['--epochs', '1']" for rank in (0, 1)}
    for command, options in ((main, ["run"]), (horovodrun, ["-H", "localhost:2", "--gloo"])):
        done = CliRunner().invoke(command, [*options, "-np", "2", "python", str(script), "--epochs", "1"])
        assert done.exit_code == 0, done.output
        assert wanted <= {*done.output.splitlines()}, done.output
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "spark_hvd.horovod"]
    torchrun = subprocess.run([*command, str(script)], capture_output=True, text=True, env=not_activated(), timeout=110)
    assert sorted(torchrun.stdout.splitlines()) == [f"rank {rank} of 2 [1.0, 1.0] []" for rank in (0, 1)], torchrun


def test_the_dialect_is_the_runs(tmp_path: Path) -> None:
    """A script that imports horovod uses it; mixing both names raises; a script's module may import it."""
    show = "import os; print('dialect', os.environ.get('SPARK_HVD_DIALECT'))\n"
    (tmp_path / "helper.py").write_text("import horovod.torch as hvd\n")
    for text, dialect, words in (
        ("import torch\n", None, ""),
        ("def late():\n    from horovod import torch\n", "horovod", ""),
        ("import horovod.torch\nimport spark_hvd.torch\n", "horovod", "imports horovod.torch and spark_hvd.torch"),
        ("import helper\nhelper.hvd.init()\n", "horovod", ""),
    ):
        script = tmp_path / "train.py"
        script.write_text(text + show)
        done = CliRunner().invoke(main, ["run", "-np", "1", str(script)])
        assert "spark_hvd.horovod" not in sys.modules, "it stays on in this process, and runs have its dialect"
        assert f"[0] dialect {dialect}" in done.output, done.output
        assert words in done.output
        assert bool(words) == ("one dialect" in done.output)


@pytest.mark.slow
def test_options_of_horovodrun(tmp_path: Path) -> None:
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(
        "import os, logging, horovod.torch as hvd\nprint(hvd.size(), os.environ['HOROVOD_AUTOTUNE'])\n"
        "print(logging.getLogger('spark_hvd').level)\n"
    )
    hosts.write_text("localhost slots=1  # this machine\n")
    given = ["-np", "1", "--hostfile", str(hosts), "--autotune", "--log-level", "DEBUG", str(script)]
    done = CliRunner().invoke(horovodrun, given)
    assert (done.exit_code, done.output.splitlines()) == (0, ["[0] 1 1", "[0] 10"]), done.output
    for options, words in (
        (["-H", "elsewhere:2"], "elsewhere is not this machine"),
        (["-H", "localhost:1"], "expected 2 slots or more"),
        (["-H", "localhost:many"], "expected a number of slots"),
        (["-H", "localhost:2", "--hostfile", "x"], "expected one of"),
        (["--hostfile", str(tmp_path / "none")], "No such file"),
        (["--host-discovery-script", "exit 3"], "non-zero exit status 3"),
        (["-H", "localhost:2", "--master", "spark://host:7077"], "Leave -H"),
        (["--ssh-port", "22"], "No ssh is used"),
        (["--thread-affinity", "0"], "not bound to cores"),
    ):
        done = CliRunner().invoke(horovodrun, ["-np", "2", *options, str(script)])
        assert done.exit_code == 2, done.output
        assert words in done.output
    assert "PyTorch" in CliRunner().invoke(horovodrun, ["--check-build"]).output


def test_run_of_horovod(capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, since a run finds the function to start in its driver's modules."""
    from spark_hvd.runner.compat.horovod import run_here

    def train(scale: float) -> Any:
        import horovod.torch as hvd
        import torch

        return hvd.allreduce(torch.ones(1) * hvd.rank() * scale, op=hvd.Sum).item(), hvd.size()

    assert run_here(train, (2.0,), np=2, hosts="localhost:2", use_gloo=True) == [(2.0, 2)] * 2
    for options, words in (
        ({"hosts": "a:1"}, "a is not this machine"),
        ({"hostfile": "x"}, "Spark decides"),
        ({"mpi_args": "-x"}, "without mpirun"),
        ({"use_mpi": True, "use_gloo": True}, "expected one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            run_here(train, (2.0,), np=1, **options)  # type: ignore[arg-type]


def test_loaders() -> None:
    from spark_hvd.horovod.loaders import AsyncDataLoaderMixin, BaseDataLoader

    class Numbers(BaseDataLoader):
        def __len__(self) -> int:
            return 3

        def _iterate(self) -> Any:
            yield from range(3)

        def _process_batch(self, batch: Any) -> Any:
            return batch * 2

    class Ahead(AsyncDataLoaderMixin, Numbers):
        pass

    class Broken(Ahead):
        def _iterate(self) -> Any:
            yield 1
            raise OSError("the disk is gone")

    class Exits(Ahead):
        def _iterate(self) -> Any:
            yield 1
            sys.exit("no more")

    assert [*Numbers()] == [*Ahead(async_loader_queue_size=0)] == [0, 2, 4]
    loader = Ahead(async_loader_queue_size=2)
    assert [[*loader] for _ in range(3)] == [[0, 2, 4]] * 3
    loader.close_async_loader()
    assert [*loader] == [0, 2, 4]
    loader.close_async_loader()
    with pytest.raises(OSError, match="the disk is gone"):
        [*Broken()]
    with pytest.raises(SystemExit, match="no more"):
        [*Exits()]


@pytest.mark.night
def test_the_small_wheel_is_built_and_installed(tmp_path: Path) -> None:
    folder = shutil.copytree(WHEEL, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, folder], check=True, timeout=110
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=110)
    assert sorted(path.name for path in (tmp_path / "site" / "horovod").glob("*.*")) == ["__init__.py", "ours.txt"]
    done = python("import horovod.torch as hvd; hvd.init(); print(hvd.size())", path=tmp_path / "site")
    assert (done.stdout, done.stderr) == ("1\n", "")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [tmp_path / "site" / "bin" / "horovodrun", "-np", "2", "python", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.stdout.count("of 2 [1.0, 1.0]") == 2, ran
