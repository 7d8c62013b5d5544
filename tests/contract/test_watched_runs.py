"""What the caller of a run learns from real ranks: steps, speeds, generations; never at the ranks' expense."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import RankFailedError, Reporting, run_elastic_local, run_local
from spark_hvd.runner.watch.hang.watch import HangWatch
from spark_hvd.runner.watch.history import RunHistory
from spark_hvd.runner.watch.view import RunView
from spark_hvd.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(steps: int, pause: float = 0.0) -> list[str]:
    """Written like a Horovod program: only the optimizer reports progress.

    Returns:
        The modules that this process has imported.
    """
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        time.sleep(pause)
    return list(sys.modules)


def loop(steps: int, pause: float) -> int:
    progress = hvd.progress([torch.zeros(16, 1)] * steps, epoch=0, epochs=1)
    for number, _ in enumerate(progress):
        hvd.allreduce(torch.ones(1), name="x")
        time.sleep(pause)
        progress.report(loss=1.0 / (1 + number))
    return hvd.rank()


def test_a_run_tells_how_it_went() -> None:
    stream = io.StringIO()
    result = run_local(loop, [30, 0.1], reporting=Reporting(progress="json", stdout=stream))
    assert result == [0, 1]
    summary = result.summary
    assert summary is not None
    assert (summary.ranks, summary.steps, summary.samples, summary.restarts) == (2, 30, 2 * 30 * 16, 0)
    assert summary.metrics == {"loss": pytest.approx(1 / 30)}
    assert result.history.ranks == [0, 1]
    *_, last = points = result.history.points(1)
    assert len({point.total_steps for point in points}) >= 15  # within three seconds
    assert (last.epoch, last.step, last.metrics["loss"]) == (0, 30, pytest.approx(1 / 30))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {event["event"] for event in events} >= {"progress", "summary"}


@pytest.mark.slow
def test_horovods_programs_are_seen_by_their_optimizers_steps() -> None:
    result = run_local(train, [20], verbose=0, env={"TZ": "UTC"})  # by a real fork server, no fork of the tests' own
    assert result.summary is not None
    assert result.summary.steps == 20
    for modules in result:  # the server imports pandas last, and each rank imports what comes later
        own = modules[modules.index("pandas") :]
        assert not {"encodings.idna", "torch.profiler._cupti_monitor"} & set(own)


def test_a_rank_that_cannot_be_read_fails_at_once_all_the_same() -> None:
    def fn() -> None:
        hvd.progress(10, loss=lambda: time.sleep(300))
        time.sleep(0.5)
        raise ValueError("mine")

    before = time.monotonic()
    with pytest.raises(RankFailedError, match="ValueError: mine"):
        run_local(fn, verbose=0)
    assert time.monotonic() - before < 60


def test_members_that_change_are_part_of_the_story() -> None:
    def counted(faults: FaultPlan) -> tuple[int, int]:
        from spark_hvd.world.activity import activity  # its lock does not go to ranks

        state: Any = hvd.elastic.ObjectState(step=0)

        @hvd.elastic.run
        def go(state: Any) -> None:
            progress = hvd.progress(None, stage="train")
            while state.step < 20:
                faults.at(state.step)
                hvd.allreduce(torch.ones(1), name="x")
                time.sleep(0.05)
                state.step += 1
                progress.step(loss=state.step)
                if state.step % 5 == 0:
                    state.commit()

        go(state)
        return hvd.generation(), activity.lost_steps

    faults = FaultPlan.random(1, 1, ["kill"], size=2, min_step=12, max_step=12)
    result = run_elastic_local(counted, [faults], num_proc=2, verbose=0, timeout=90)
    assert sorted(result) == [(1, 0), (1, 2)]  # the survivor made the steps after the tenth twice
    assert result.summary is not None
    assert (result.summary.changes, result.summary.steps) == (1, 22)
    assert result.summary.effective_training_time is not None
    assert result.summary.lost_training_time is not None
    assert 0 < result.summary.lost_training_time < result.summary.effective_training_time < 1
    assert [each.number for each in result.history.generations] == [0, 1]


def test_a_defect_in_what_observes_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("injected")

    for observer, method in ((RunView, "take"), (RunHistory, "take"), (HangWatch, "tick")):
        monkeypatch.setattr(observer, method, fails)
    result = run_local(loop, [20, 0.1], verbose=0)
    assert result == [0, 1]
    assert result.summary.ranks == 2
    assert caplog.text.count("has failed (KeyError('injected')); the run continues without it") == 3
