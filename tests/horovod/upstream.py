"""Horovod's own test files, unchanged, on us: ``PYTHONPATH=. python tests/horovod/upstream.py CHECKOUT [FILE ...]``.

CHECKOUT is a clone of horovod/horovod; nothing of it is kept here. Each file is run by pytest on two ranks (those below
test/single on one) in which ``horovod`` is ours, and what became of its tests is printed, failures by a line.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tempfile
import time
import types
import xml.etree.ElementTree as ET
from pathlib import Path

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
)
SECONDS = 850


def main(checkout: str, *files: str) -> None:
    """Run the files and print what became of them."""
    root = Path(checkout).resolve() / "test"
    for name in files or FILES:
        path = next(path for path in (root / name, *root.glob(f"*/{Path(name).name}")) if path.exists())
        ranks = 1 if path.parent.name == "single" else 2
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__]
            env = os.environ | {"KERAS_BACKEND": "tensorflow", "SPARK_HVD_DIALECT": "horovod", "OMP_NUM_THREADS": "1"}
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
    """One rank's pytest."""
    import pytest

    from spark_hvd.horovod.start import switch_on

    switch_on()
    for name, content in helpers().items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    for rank_name, theirs in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE")):
        os.environ[f"HOROVOD_{theirs}"] = os.environ[rank_name]
    sys.dont_write_bytecode = True
    out = f"--junitxml={folder}/{os.environ['RANK']}.xml"
    here = [str(Path(path).parent), str(Path(path).parents[1] / "utils")]
    sys.path[:0] = here
    options = ["-v", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=120", "--rootdir", here[0], out]
    return int(pytest.main([path, *options]))


def helpers() -> dict[str, dict[str, object]]:
    """What the test files' own support imports of Horovod's launcher and of packages that are not installed."""
    import threading
    import unittest.mock

    def in_thread(target: object, args: tuple[object, ...] = (), daemon: bool = True) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=daemon)  # type: ignore[arg-type]
        thread.start()
        return thread

    def place() -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return {
        "horovod.runner.util": {"__path__": []},
        "horovod.runner.util.threads": {"in_thread": in_thread},
        "horovod.runner.common": {"__path__": []},
        "horovod.runner.common.util": {"__path__": []},
        "horovod.runner.common.util.env": {"get_env_rank_and_size": place},
        **({} if installed("mock") else {"mock": vars(unittest.mock) | {"version_info": (9,)}}),
    }


def installed(name: str) -> bool:
    """Whether a module can be found."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.exit(rank(*sys.argv[2:]))
    main(*sys.argv[1:])
