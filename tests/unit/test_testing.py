"""FaultPlan: what it contains, what it refuses, and when its faults happen; the faults themselves in processes."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import cloudpickle
import psutil
import pytest

import spark_hvd.torch as hvd
from spark_hvd.context import basics
from spark_hvd.runner import run_local
from spark_hvd.testing import KINDS, Fault, FaultPlan, InjectedFaultError
from spark_hvd.world.errors import NotInitializedError
from tests.conftest import wait_until
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set this process's position, as far as a plan uses it."""
    where = {"rank": 0, "size": 2, "generation": 0}
    for name in where:
        monkeypatch.setattr(basics, name, lambda name=name: where[name])
    return where


def test_a_plan_grows_without_changing() -> None:
    empty = FaultPlan()
    plan = empty.kill(1, 30).stop(0, 40, 1).raises(1, 2, None, error=KeyError, message="gone").exit(0, 1, code=3)
    plan = plan.segfault(0, 5).partition(1, 6).notice(1, 7)
    assert empty == FaultPlan()
    assert plan.faults == (
        Fault("kill", 1, 30, 0),
        Fault("stop", 0, 40, 1),
        Fault("raise", 1, 2, None, KeyError, "gone"),
        Fault("exit", 0, 1, 0, code=3),
        Fault("segfault", 0, 5, 0),
        Fault("partition", 1, 6, 0),
        Fault("notice", 1, 7, 0),
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    error = pickle.loads(pickle.dumps(InjectedFaultError("on purpose")))
    assert (type(error), str(error)) == (InjectedFaultError, "on purpose")


def test_a_fault_strikes_at_its_generation_rank_and_step(place: dict[str, int]) -> None:
    plan = FaultPlan().raises(rank=1, step=3).raises(rank=0, step=3, generation=1, error=KeyError, message="second")
    plan.at(3)
    place["rank"] = 1
    plan.at(2)
    plan.at(4)
    with pytest.raises(InjectedFaultError, match="on purpose"):
        plan.at(3)
    place["generation"] = 1
    plan.at(3)
    place["rank"] = 0
    with pytest.raises(KeyError, match="second"):
        plan.at(3)


@pytest.mark.usefixtures("no_leaks")
def test_a_fault_that_never_struck_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    plan = FaultPlan().exit(1, 3).kill(0, 5).stop(2, 7).kill(1, 9, generation=2).raises(0, 8)

    def train(faults: FaultPlan) -> None:
        hvd.init()
        for step in range(6, 10):
            with suppress(InjectedFaultError):
                faults.at(step)

    run_local(train, [plan], num_proc=2)
    assert sorted(line for line in capfd.readouterr().err.splitlines() if "never" in line) == [
        "[0] rank 0, generation 0, step 5: kill was planned and never struck: its steps there were 6 to 9",
        "[0] rank 1, generation 2, step 9: kill was planned and never struck: generation 0 was the last",
        "[0] rank 2, generation 0, step 7: stop was planned and never struck: there was no such rank among 2",
        "[1] rank 1, generation 0, step 3: exit was planned and never struck: its steps there were 6 to 9",
    ]


def test_a_fault_of_every_generation(place: dict[str, int]) -> None:
    plan = FaultPlan().raises(rank=0, step=3, generation=None)
    for place["generation"] in (0, 1, 7):
        plan.at(2)
        with pytest.raises(InjectedFaultError):
            plan.at(3)


def test_random_faults_follow_from_seed_and_generation(place: dict[str, int]) -> None:
    plan = FaultPlan.random(7, 100, size=4, max_step=10, min_step=2)
    assert plan == FaultPlan.random(7, 100, size=4, max_step=10, min_step=2)
    assert plan.faults[:50] == FaultPlan.random(7, 50, size=4, max_step=10, min_step=2).faults
    assert plan != FaultPlan.random(8, 100, size=4, max_step=10, min_step=2)
    assert [fault.generation for fault in plan.faults] == list(range(100))
    assert {fault.kind for fault in plan.faults} == set(KINDS)
    assert {fault.rank for fault in plan.faults} == {0, 1, 2, 3}
    assert {fault.step for fault in plan.faults} == set(range(2, 11))


def test_random_faults_count_the_steps_of_their_generation(place: dict[str, int]) -> None:
    plan = pickle.loads(pickle.dumps(FaultPlan.random(0, 2, ["raise"], size=1, max_step=4, min_step=4)))
    for place["generation"] in (0, 1):
        for step in (90, 91, 92, 93):
            plan.at(step)
        with pytest.raises(InjectedFaultError):
            plan.at(94)
    place["generation"] = 2
    for step in range(9):
        plan.at(step)


def test_a_random_fault_finds_a_rank_in_a_smaller_world(place: dict[str, int]) -> None:
    plan = FaultPlan((Fault("raise", 3, 1, 0, counted=True),))
    place["rank"] = 1
    plan.at(0)
    with pytest.raises(InjectedFaultError):
        plan.at(1)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"rank": -1, "step": 1}, ValueError, "rank=-1: expected 0 or more"),
        ({"rank": 0, "step": 1.5}, TypeError, "step=1.5: expected a whole number, 0 or more"),
        ({"rank": True, "step": 1}, TypeError, "rank=True: expected a whole number"),
        ({"rank": 0, "step": 1, "generation": "0"}, TypeError, "generation='0': .* None for every generation"),
        ({"rank": 0, "step": 1, "code": 256}, ValueError, "code=256: expected an exit code, 0 to 255"),
    ],
)
def test_wrong_faults_are_refused(wrong: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FaultPlan().exit(**wrong)  # type: ignore[arg-type]


def test_wrong_random_plans_and_errors_are_refused() -> None:
    with pytest.raises(TypeError, match="error='no': expected a class of exceptions"):
        FaultPlan().raises(0, 1, error="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind='fire': expected one of kill, stop"):
        Fault("fire", 0, 0)
    for kinds in (["fire"], [], "kill"):
        with pytest.raises(ValueError, match=r"kinds=.*: expected a list of some of kill, stop"):
            FaultPlan.random(0, 1, kinds, size=2)
    with pytest.raises(ValueError, match="size=0: expected at least 1 rank"):
        FaultPlan.random(0, 1, size=0)
    with pytest.raises(ValueError, match="min_step=3, max_step=2: expected min_step <= max_step"):
        FaultPlan.random(0, 1, size=1, min_step=3, max_step=2)


def test_it_needs_a_world_but_an_empty_plan_none() -> None:
    FaultPlan().at(0)
    with pytest.raises(NotInitializedError, match=r"hvd.init\(\)"):
        FaultPlan().kill(0, 0).at(0)


def strike(kind: str, log: Path) -> bytes:
    """Return, in a world of one, a connection's error after the fault."""
    near, far = socket.socket(), socket.create_server(("127.0.0.1", 0))
    near.connect(far.getsockname())
    near.settimeout(0.1)
    plan = getattr(FaultPlan(), kind)(rank=0, step=2)
    for step in range(2):
        plan.at(step)
    log.write_text("before")
    plan.at(2)
    log.write_text("after")
    try:
        return near.recv(1)
    except TimeoutError:
        return b"whole"


@pytest.mark.parametrize(
    ("kind", "outcome", "wrote"),
    [
        ("kill", (False, f"ended with exit code -{signal.SIGKILL}"), "before"),
        ("segfault", (False, f"ended with exit code -{signal.SIGSEGV}"), "before"),
        ("exit", (False, "ended with exit code 1"), "before"),
        ("notice", (False, f"ended with exit code -{signal.SIGTERM}"), "before"),
        ("partition", (True, b""), "after"),
    ],
)
def test_what_strikes_a_world_of_one(kind: str, outcome: tuple[bool, object], wrote: str, tmp_path: Path) -> None:
    with ranks(1) as rank:
        assert rank.outcomes(strike, kind, tmp_path / "log") == [outcome]
    assert (tmp_path / "log").read_text() == wrote


def test_stop_lasts_until_it_is_continued(tmp_path: Path) -> None:
    with ranks(1) as rank:
        process = psutil.Process(rank.processes[0].pid)
        with ThreadPoolExecutor(1) as pool:
            outcomes = pool.submit(rank.outcomes, strike, "stop", tmp_path / "log")
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
            assert (tmp_path / "log").read_text() == "before"
            process.resume()
            assert outcomes.result(30) == [(True, b"whole")]


def test_making_a_plan_needs_no_torch() -> None:
    text = (
        "import sys; from spark_hvd.testing import FaultPlan; FaultPlan().kill(0, 1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
