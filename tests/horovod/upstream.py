"""Horovod's own test files, unchanged, on us: ``PYTHONPATH=. python tests/horovod/upstream.py CHECKOUT [FILE ...]``.

CHECKOUT is a clone of horovod/horovod; none of it is kept here. pytest runs each file on two ranks (those below
test/single on one, those of test/integration in a Spark driver) with ``horovod`` replaced by ours, and the results
are printed, failures on one line each. A test that calls Horovod's internal functions is skipped, and says which.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

FILES = (
    "single/test_torch_elastic.py",
    "parallel/test_common.py",
    "parallel/test_torch.py",
    "parallel/test_adasum_pytorch.py",
    "parallel/test_tensorflow.py",
    "parallel/test_tensorflow_process_sets.py",
    "parallel/test_tensorflow_process_sets_dynamic.py",
    "parallel/test_adasum_tensorflow.py",
    "parallel/test_tensorflow2_keras.py",
    "integration/test_spark_torch.py",
    "integration/test_spark_keras.py",
    "integration/test_spark_lightning.py",
    "integration/test_elastic_spark_torch.py",
)
EXCLUDED = {
    "*::test_restore_from_checkpoint": "replaces a private method, _load_checkpoint or _read_checkpoint",
    "*::test_legacy_restore_from_checkpoint": "replaces a private method, _read_checkpoint",
    "*::test_torch_param_serialize": "is about a private function",
    "*::test_serialize_param_value": "is about a private function",
    "SparkLightningTests::test_fit_model": "gives mp_start_method, which there is not: ranks are forked",
    "*::test_legacy_fit_model": "gives a Lightning estimator what is no LightningModule, with an optimizer and a loss",
    "*::test_train_with_custom_data_module": "gives data_module, which there is not",
    "*::test_model_override_trainer_args": "gives stochastic_weight_avg, which Lightning 2 has not",
    "SparkKerasTests::test_fit_model": "makes SGD(lr=), which Keras 3 refuses",
    "*::test_fit_model_with_tensorflow_dataset_prefetch_buffer_size": "makes SGD(lr=), which Keras 3 refuses",
    "*::test_keras_direct_parquet_train": "replaces TFKerasUtil.fit_fn, which is Horovod's own",
    "*::test_keras_model_checkpoint_callback": "replaces TFKerasUtil.fit_fn, which is Horovod's own",
    "*::test_model_serialization": "replaces remote.RemoteTrainer, which is Horovod's own",
    "*::test_fault_tolerance_spark_blacklist_*": "wants Spark to exclude an executor; the run excludes hosts itself",
    "*::test_fault_tolerance_exception_with_min_hosts_timeout": "wants Spark to exclude an executor",
    "*::test_auto_scale_spark_blacklist_*": "wants Spark to exclude an executor, and the world smaller for it",
    "*::test_auto_scale_no_spark_black_list": "wants an epoch without a rank that failed; it is replaced sooner",
    "*::test_auto_scale_down_by_exception": "wants the world smaller after an exception; a rank is replaced",
}
"""Tests that cannot pass, by patterns of class and name, and why."""
SECONDS = int(os.environ.get("UPSTREAM_SECONDS", "850"))
"""Time limit per file; UPSTREAM_SECONDS raises it for a slow machine."""
PATIENCE = float(os.environ.get("UPSTREAM_PATIENCE", "1"))
"""Factor for the waiting times of the integration tests, 5 to 30 s, on a busy machine."""


def main(checkout: str, *files: str) -> None:
    """Run the files and print the results."""
    root = Path(checkout).resolve() / "test"
    for name in files or FILES:
        path = next(path for path in (root / name, *root.glob(f"*/{Path(name).name}")) if path.exists())
        ranks = 1 if path.parent.name == "single" else 2
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__]
            if path.parent.name == "integration":
                command = [sys.executable, __file__]
            env = os.environ | {"KERAS_BACKEND": "tensorflow", "SPARK_HVD_DIALECT": "horovod", "OMP_NUM_THREADS": "1"}
            env |= cluster_variables(folder)
            start = time.monotonic()
            with open(f"{folder}/log", "w+") as log:
                try:
                    subprocess.run(
                        [*command, "--rank", str(path), folder], env=env, stdout=log, stderr=log, timeout=SECONDS
                    )
                except subprocess.TimeoutExpired:
                    print(f"{path.name}: not over after {SECONDS} s")
                log.seek(0)
                report(path.name, [*Path(folder).glob("*.xml")], time.monotonic() - start, log.read())


def report(name: str, results: list[Path], seconds: float, log: str) -> None:
    """Print a line for the file, and one for each test that was not passed on every rank."""
    worst: dict[str, tuple[int, str, str]] = {}
    for result in results:
        for case in ET.parse(result).iter("testcase"):
            found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            level = 0 if found is None else 1 if found.tag == "skipped" else 2
            text = "" if found is None else (found.get("message") or "").strip().split("\n")[0][:200]
            label = ("passed", "skipped", "failed")[level]
            key = f"{case.get('classname')}.{case.get('name')}"
            worst[key] = max(worst.get(key, (0, "passed", "")), (level, label, text))
    counts = collections.Counter(label for _, label, _ in worst.values())
    print(f"{name}: {dict(counts)} of {len(worst)} on {len(results)} rank(s), {seconds:.0f} s", flush=True)
    for (label, text), number in collections.Counter((e[1], e[2]) for e in worst.values() if e[0] == 1).items():
        print(f"  {number} {label}: {text}")
    for test, (level, label, text) in sorted(worst.items()):
        if level == 2:
            print(f"  {label} {test.rpartition('.')[2]}: {text}", flush=True)
    if not worst:
        print(log[-3000:])


def rank(path: str, folder: str) -> int:
    """Run one rank's pytest."""
    import pytest

    from spark_hvd.horovod.start import switch_on

    switch_on()
    for name, content in helpers().items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    for rank_name, theirs in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE")):
        if rank_name in os.environ:
            os.environ[f"HOROVOD_{theirs}"] = os.environ[rank_name]
    if "RANK" not in os.environ:  # a driver
        add_insides()
    sys.dont_write_bytecode = True
    out = f"--junitxml={folder}/{os.environ.get('RANK', 0)}.xml"
    here = [str(Path(path).parent), str(Path(path).parents[1] / "utils")]
    sys.path[:0] = here
    seconds = 120 if "RANK" in os.environ else SECONDS
    options = ["-v", "-p", "no:cacheprovider", "-o", "addopts=", f"--timeout={seconds}", "--rootdir", here[0], out]
    return int(pytest.main([path, *options], plugins=[Adapted(Path(path).parents[1])]))


class Adapted:
    """Adapts test files to this environment, and removes tests that cannot pass.

    What they define is pickled by value: Spark's workers find neither them nor what they import. Their
    LightningModules lose a hook that Lightning 2 refuses, and that they do not need.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Process their modules, which are loaded now."""
        import cloudpickle
        import pytest

        for item in items:
            name = f"{getattr(item.cls, '__name__', '')}::{item.name}"
            whys = [why for tests, why in EXCLUDED.items() if fnmatch.fnmatch(name, tests)]
            if whys:
                item.add_marker(pytest.mark.skip(f"is excluded: {whys[0]}"))
        for module in [*sys.modules.values()]:
            if self._root in Path(getattr(module, "__file__", None) or "/").parents or module.__name__ == SHELL:
                cloudpickle.register_pickle_by_value(module)
                for each in vars(module).values():
                    if isinstance(each, type) and "validation_epoch_end" in vars(each):
                        del each.validation_epoch_end


class Insides(types.ModuleType):
    """A module internal to Horovod: any call of it skips the test."""

    def __getattr__(self, name: str) -> Any:
        import pytest

        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: pytest.skip(f"calls {self.__name__}.{name}, which is Horovod's own")


SHELL = "horovod.runner.common.util.safe_shell_exec"
INSIDES = {
    "horovod.runner.mpi_run": (),
    "horovod.runner.common.util.secret": (),
    "horovod.spark.common.constants": (),
    "horovod.spark.driver": (),
    "horovod.spark.driver.driver_service": (),
    "horovod.spark.task.task_service": (),
    "horovod.spark.torch.remote": (),
    "horovod.spark.keras.remote": (),
    "horovod.spark.keras.util": (),
    "horovod.spark.lightning.remote": (),
    "horovod.spark.lightning.legacy": (),
    "horovod.spark.torch.estimator": ("EstimatorParams", "_torch_param_serialize"),
    "horovod.spark.keras.estimator": ("EstimatorParams",),
    "horovod.spark.lightning.estimator": ("EstimatorParams", "_torch_param_serialize"),
    "horovod.spark.common.util": (
        "_wait_file_available_on_dbfs",
        "_get_spark_df_saved_file_list",
        "_get_metadata",
        "_has_vector_column",
        "to_petastorm_fn",
    ),
}
"""Return modules that the test files import; with names, only these, in our modules."""


def add_insides() -> None:
    """Make imports of Horovod's internals succeed."""
    import importlib

    from spark_hvd.runner import RunError

    spark = importlib.import_module("horovod.spark")
    elastic = spark.run_elastic

    def run_elastic(
        *args: Any, start_timeout: float | None = None, elastic_timeout: float = 600.0, **kwargs: Any
    ) -> Any:
        start_timeout = start_timeout and PATIENCE * start_timeout
        try:
            return elastic(*args, start_timeout=start_timeout, elastic_timeout=PATIENCE * elastic_timeout, **kwargs)
        except RunError as error:
            words = "Horovod detected that one or more processes exited with non-zero status"
            raise RuntimeError(f"{words}; in our words: {error}") from error

    spark.run_elastic = run_elastic
    for name, attributes in INSIDES.items():
        module = Insides(name)
        if attributes:
            ours = importlib.import_module(name)
            for attribute in attributes:
                setattr(ours, attribute, getattr(module, attribute))
            ours.MIN_PL_VERSION = "1.3.8"  # type: ignore[attr-defined]
        else:
            module.__path__ = []
            module.TOTAL_BUFFER_MEMORY_CAP_GIB = 4  # GiB; by which a test chooses one more rank
            sys.modules[name] = module
            above, _, last = name.rpartition(".")
            setattr(sys.modules.get(above) or importlib.import_module(above), last, module)


def helpers() -> dict[str, dict[str, object]]:
    """Provide what the test files' support imports of Horovod's launcher and of packages that are not installed."""
    import threading
    import unittest.mock

    def in_thread(target: object, args: tuple[object, ...] = (), daemon: bool = True) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=daemon)  # type: ignore[arg-type]
        thread.start()
        return thread

    def place() -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    packages = ("util", "common", "common.util", "elastic")
    return {f"horovod.runner.{name}": {"__path__": []} for name in packages} | {
        "horovod.runner.util.threads": {"in_thread": in_thread},
        "horovod.runner.common.util.env": {"get_env_rank_and_size": place},
        "horovod.runner.common.util.tiny_shell_exec": {"execute": in_shell},
        SHELL: {"execute": in_rank},
        "horovod.runner.elastic.driver": {"DISCOVER_HOSTS_FREQUENCY_SECS": 1.0},  # tests replace it
        "horovod.runner.gloo_run": {"_get_min_start_hosts": None},  # tests replace it
        **({} if installed("mock") else {"mock": vars(unittest.mock) | {"version_info": (9,)}}),
    }


def cluster_variables(folder: str) -> dict[str, str]:
    """Return the variables that a standalone cluster of the wheel's own scripts needs; it writes below ``folder``."""
    import pyspark

    from tests.jvm import SHORT_LIVED

    names = ("SPARK_LOG_DIR", "SPARK_PID_DIR", "SPARK_WORKER_DIR")
    home = str(Path(pyspark.__file__).parent)
    where = {name: f"{folder}/cluster" for name in names}
    return where | {"SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "JDK_JAVA_OPTIONS": SHORT_LIVED}


def in_shell(command: str) -> tuple[str, int]:
    """Return a command's output and exit code; one that starts a daemon has ended once the daemon works.

    The tests wait 5 seconds for a daemon's output, but a busy machine may need longer to start a JVM.
    """
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = done.stdout.rpartition("logging to ")[2].strip()
    until = time.monotonic() + 120
    while " start org.apache" in command and log and time.monotonic() < until:
        if re.search("Starting Spark master at|Successfully registered with master", Path(log).read_text()):
            break
        time.sleep(0.1)
    return done.stdout, done.returncode


def in_rank(command: str) -> int:
    """Run ``python SCRIPT ARGUMENTS`` in this process, which is the rank, where Horovod starts another one."""
    import shlex

    from spark_hvd.elastic.state import State
    from spark_hvd.runner.rank.script import Script, ScriptExitError, run_script
    from spark_hvd.world import launcher

    class Messages:
        """Has ``empty``, like the queue in which Horovod's states find the driver's messages."""

        @staticmethod
        def empty() -> bool:
            installed = launcher.installed()
            return installed is None or not installed.update_wanted

    State._host_messages = Messages()  # type: ignore[attr-defined]
    # Each attempt of a task is a host for Horovod's driver.
    os.environ["HOROVOD_HOSTNAME"] = f"{os.uname().nodename}-{os.getpid()}"
    _, script, *arguments = shlex.split(command)
    if "--discovery-wait" in arguments:
        wait = arguments.index("--discovery-wait") + 1
        arguments[wait] = str(int(PATIENCE * int(arguments[wait])))
    try:
        run_script(Script.read(script, arguments))
    except ScriptExitError as left:
        return left.code
    return 0


def installed(name: str) -> bool:
    """Return whether a module can be found."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.exit(rank(*sys.argv[2:]))
    main(*sys.argv[1:])
