"""Code written for CUDA, run without a GPU: see tests/gpu_sim/device.cpp."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.gpu_sim.library import compiled, compiler
from tests.gpu_sim.order import Launch, as_launches, faults_of_order
from tests.gpu_sim.reached import ROOT, files, written_for_cuda

HERE = Path(__file__).resolve().parent
MODULES = ["steps", "named", "worlds", "lines", "around"]
RANKS = 2
NEVER = 10
"""Number of lines written for CUDA that may remain without a run; it only falls."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def library() -> Path:
    """The simulated devices, compiled."""
    if (by := compiler()) is None:
        if os.environ.get("CI"):
            pytest.fail("there is no C++ compiler, and CI must run the simulated devices: install g++")
        pytest.skip("there is no C++ compiler for the simulated devices: install g++")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA itself: run tests/gpu instead")
    return compiled(by)


def names_of(module: str) -> list[str]:
    """Return the names of a module's cases. Importing it here would load torch without the devices."""
    return re.findall(r"^@(?:case|mutant\(.*\))\ndef (\w+)", (HERE / f"{module}.py").read_text(), re.MULTILINE)


CASES = [name for module in MODULES for name in names_of(module)]


class Told(NamedTuple):
    """The results of all cases.

    Attributes:
        verdicts: What is wrong with each, by rank, and by the comparison of ranks.
        reached: The lines written for CUDA that ran on some rank.
    """

    verdicts: dict[str, list[str | None]]
    reached: set[tuple[str, int]]


@pytest.fixture(scope="session")
def told(library: Path) -> Told:
    """Return the ranks' results: two processes run all cases, as imports take most of their time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_sim.rank", *MODULES],
            cwd=HERE.parents[1],
            env={**os.environ, **shared, "RANK": str(rank), "GPU_SIM_LIBRARY": str(library)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    with ThreadPoolExecutor(RANKS) as pool:  # read both, otherwise one might wait for its reader and the other for it
        ends = list(pool.map(subprocess.Popen.communicate, ranks))
    said: dict[str, list[str | None]] = {}
    launched: dict[str, list[list[Launch]]] = {}
    reached: set[tuple[str, int]] = set()
    for out, err in ends:
        reached.update(
            (file, line)
            for text in re.findall('^{"reached": .*', out, re.M)
            for file, line in json.loads(text)["reached"]
        )
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        answers = {name: (fault, as_launches(launches)) for name, fault, launches in lines}
        for name in CASES:
            fault, launches = answers.get(name, (f"it did not come so far:\n{err}", []))
            said.setdefault(name, []).append(fault)
            launched.setdefault(name, []).append(launches)
    for name, ranks_launches in launched.items():
        if not any(said[name]):
            said[name] += faults_of_order(ranks_launches)
    return Told(said, reached)


@pytest.mark.timeout(600)  # the first one compiles, and runs everything, next to other tests
@pytest.mark.parametrize("case", CASES)
def test_on_simulated_devices(case: str, told: Told) -> None:
    for rank, fault in enumerate(told.verdicts[case]):
        assert fault is None, f"rank {rank}: {fault}" if rank < RANKS else fault


def test_lines_that_never_run(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    every = {(file, line.lineno) for file in files() for line in written_for_cuda(ROOT / file)}
    never = sorted(every - told.reached)
    with capsys.disabled():
        print(f"\n{len(never)} of {len(every)} lines written for CUDA never run:")
        for file, line in never:
            print(f"  {file}:{line}: {(ROOT / file).read_text().splitlines()[line - 1].strip()}")
    assert told.reached <= every
    assert len(never) <= NEVER
