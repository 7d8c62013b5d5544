"""One of two ranks with simulated devices: runs the cases of some modules, and prints each result.

    python -m tests.gpu_sim.rank steps named worlds:commits    # all of two modules, and one case of another

A case fails by an exception, and by anything that a real device would punish at some time: see ``Observed``.
A mutant is a case that breaks the product on purpose: it fails if that is not noticed.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.gpu_sim.device import DEVICES, observed, stop_listening

from tests.gpu_sim import kernels, nccl, reached  # noqa: F401  isort: skip

import torch  # isort: skip

LIMIT = 220
"""Time limit of all cases, in seconds."""
EACH = DEVICES // 2
"""Devices per rank: rank r has those from r * EACH."""

Case = Callable[[], Any]
cases: list[tuple[str, Case, str | None]] = []


def case(call: Case) -> Case:
    """A case that must run without a fault."""
    cases.append((call.__name__, call, None))
    return call


def mutant(expected: str) -> Callable[[Case], Case]:
    """A case that must end with a fault or an error that contains `expected`; any, if that is empty."""

    def decorate(call: Case) -> Case:
        cases.append((call.__name__, call, expected))
        return call

    return decorate


def first_device() -> torch.device:
    """This rank's first device."""
    return torch.device("cuda", int(os.environ["RANK"]) * EACH)


def verdict(call: Case, expected: str | None) -> str | None:
    """Run a case, and return what is wrong; None: nothing."""
    first = first_device().index
    torch.cuda.set_device(first)
    observed.begin(set(range(first, first + EACH)))
    nccl.forget()
    error = ""
    try:
        call()
    except Exception:
        error = traceback.format_exc()
    found = "\n".join([*observed.all_faults, *([error] if error else [])])
    if expected is None:
        return found or None
    if found and expected in found:
        return None
    return f"the mutant was not noticed; expected {expected!r}, found {found or 'nothing'}"


def main(modules: Sequence[str]) -> None:
    """Run the cases of some modules in the world that torchrun's variables describe."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    reached.watch()
    import spark_hvd.torch as hvd
    from spark_hvd.torch.optimizer import recipe

    hvd.init()
    recipe.carries = lambda group: True
    # The module that cases import, which differs from this one while it is __main__.
    from tests.gpu_sim import rank as shared

    for module in modules:
        importlib.import_module(f"tests.gpu_sim.{module.partition(':')[0]}")
    for name, call, expected in shared.cases:
        module = call.__module__.rpartition(".")[2]
        if {module, f"{module}:{name}"} & set(modules):  # others exist because these import from them
            began = time.monotonic()
            fault = verdict(call, expected)
            print(json.dumps([name, fault, [] if expected is not None else nccl.launches]), flush=True)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    hvd.shutdown()
    print(json.dumps({"reached": sorted(reached.reached)}), flush=True)
    stop_listening()


if __name__ == "__main__":
    main(sys.argv[1:])
