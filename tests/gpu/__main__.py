"""Half an hour on a machine with GPUs, the most important checks first: `make gpu`. Prints a table for docs/gpus.md.

SPARK_HVD_TEST_DEVICE=cpu tries the scripts themselves. Without pyspark, the tests that need it fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from shutil import which

from tests.gpu.conftest import DEVICE

MEMCHECK = ("compute-sanitizer", "--tool", "memcheck")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        what: What it proves.
        arguments: Arguments of Python.
        limit: Time limit in seconds.
        env: Changes to the environment.
        under: A command that runs Python.
    """

    what: str
    arguments: tuple[str, ...]
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    under: tuple[str, ...] = ()


STEPS = [
    Step("streams, waits, optimizers, NCCL's abort", ("-m", "tests.gpu.alone"), 240),
    Step("the same, as elastic ranks are", ("-m", "tests.gpu.alone"), 240, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}),
    Step("ranks that share a GPU", ("-m", "tests.gpu.sharing"), 120),
    Step("collectives and commits", (*PYTEST, "tests/gpu/test_collectives.py", "tests/gpu/test_elastic_state.py"), 420),
    Step("training", (*PYTEST, "tests/gpu/test_training.py"), 240),
    Step("torch's own race detector", ("-m", "tests.gpu.alone"), 240, {"TORCH_CUDA_SANITIZER": "1"}),
    Step("ranks as one process", (*PYTEST, "tests/oracle/test_training.py"), 300, {"SPARK_HVD_TEST_DEVICE": DEVICE}),
    Step("what a step costs", ("-m", "benchmarks.gpu_step", "--rounds", "3"), 240),
    # NCCL first requests kernels of other GPUs, which is not an error of ours.
    Step("memory errors", ("-m", "tests.gpu.alone"), 300, under=(*MEMCHECK, "--report-api-errors", "no")),
]


def run(step: Step) -> str:
    """Run it, and return how it ended."""
    if step.under and which(step.under[0]) is None:
        return f"not run: there is no {step.under[0]}"
    command = [*step.under, sys.executable, *step.arguments]
    print(f"\n== {step.what}: {' '.join(command)}", flush=True)
    try:
        code = subprocess.run(command, env={**os.environ, **step.env}, timeout=step.limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {step.limit:.0f} s"
    return "passed" if code == 0 else f"FAILED ({code})"


def main() -> int:
    """Run all steps, even if one fails; return how many have not passed."""
    rows = []
    for step in STEPS:
        began = time.monotonic()
        end = run(step)
        rows.append((step.what, end, f"{time.monotonic() - began:.0f} s"))
    print("\n| what | result | time |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return sum(not end.startswith(("passed", "not run")) for _, end, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
