"""Ranks that wait for each other in real runs: which one is named, with what it does, and when nothing is reported."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import Network, RankFailedError, RunTimeoutError, run_local
from spark_hvd.runner.watch.hang.verdict import Kind

_LOG = logging.getLogger("spark_hvd.runner.launch.monitor")
WARNING = 2.0
LONG = 12.0  # more than a warning, a look at all ranks and one more record from each


def _together(name: str) -> None:
    hvd.allreduce(torch.ones(4), name=name)


def _run(fn: Any, size: int, *, stall_warning: float = WARNING, **options: Any) -> Any:
    return run_local(
        fn, num_proc=size, verbose=0, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_warning)}, **options
    )


def _verdicts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == _LOG.name]


@pytest.mark.slow
def test_a_run_that_is_ended_while_it_hangs_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        _together("step")
        if hvd.rank() == 1:
            time.sleep(600)  # here
        _together("loss")

    with caplog.at_level(logging.INFO), pytest.raises(RunTimeoutError) as caught:
        _run(train, 2, stall_warning=1.0, timeout=10.0)
    hang = caught.value.hang
    assert hang is not None
    assert (hang.kind, hang.ranks) == (Kind.HANG, (1,))
    assert "rank 0 waits in allreduce 'loss' for rank 1, which has not entered it: rank 1 is idle" in str(caught.value)
    assert "time.sleep(600)  # here" in hang.headline
    assert _verdicts(caplog)[-1] == hang.text  # reported again after twice the time
    assert set(hang.stacks) == {0, 1}
    assert "Stacks of rank 1" in str(caught.value)


@pytest.mark.slow
def test_each_way_to_keep_others_waiting_and_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """One run goes through them all, each until it is reported; the reports are checked afterwards."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()).count("'") > 1 and "continues" not in text:
                (tmp_path / text.split("'")[1]).touch()

    begun = time.monotonic()

    def told(name: str) -> bool:
        return (tmp_path / name).exists() or time.monotonic() > begun + 100

    def slow_data() -> Iterator[torch.Tensor]:
        while not told("data"):
            time.sleep(0.2)
        yield torch.ones(1)

    def other(name: str) -> None:
        while not told("this"):
            time.sleep(0.2)
        _together(name)

    def train() -> None:
        me = hvd.rank()
        _together("start")
        # All work, or sleep, for longer than the warning: nobody waits.
        end = time.monotonic() + 3 * WARNING
        while me != 2 and time.monotonic() < end:
            pass
        if me == 2:
            time.sleep(3 * WARNING)
        _together("healthy")
        while me == 1 and not told("spinning"):
            pass
        _together("spinning")
        while me == 2 and not told("sleeping"):
            time.sleep(0.5)  # here
        _together("sleeping")
        if me == 1:
            for _ in hvd.progress(slow_data()):
                pass
        _together("data")
        # Ranks wait in two collectives until a thread of each reaches the other one.
        names = ["this", "that"] if me == 0 else ["that", "this"]
        later = threading.Thread(target=other, args=[names[1]])
        later.start()
        _together(names[0])
        later.join()

    with caplog.at_level(logging.INFO):
        _LOG.addHandler(handler := Told())
        try:
            _run(train, 3)
        finally:
            _LOG.removeHandler(handler)
    verdicts = _verdicts(caplog)
    # Once for each, or again if it lasted twice as long as at the first report.
    first = {text.split("'")[1]: text.splitlines()[0] for text in reversed(verdicts) if "continues" not in text}
    assert [*first][::-1] == ["spinning", "sleeping", "data", "this"]
    headlines = [*first.values()][::-1]
    assert "rank 1 keeps ranks 0, 2 waiting in allreduce 'spinning'" in headlines[0]
    assert "rank 1 is working (" in headlines[0]
    assert (
        "ranks 0, 1 wait in allreduce 'sleeping' for rank 2, which has not entered it: rank 2 is idle" in headlines[1]
    )
    assert "time.sleep(0.5)  # here" in headlines[1]
    assert "ranks 0, 2 wait in allreduce 'data' for rank 1" in headlines[2]
    assert "rank 1 is waiting for its next batch" in headlines[2]
    assert "different collectives, rank 0 in allreduce 'this', ranks 1, 2 in allreduce 'that'" in headlines[3]
    ends = [text for text in verdicts if "continues" in text]
    # If one ends just when the next is reported, nothing more is reported about it.
    assert 1 <= len(ends) <= 4
    assert verdicts[-1] in ends
    assert all("has ended after" in text for text in ends)


@pytest.mark.slow
def test_a_collective_that_times_out_says_who_hung(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(5):
            if step == 3 and hvd.rank() == 1:
                time.sleep(600)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    with caplog.at_level(logging.INFO), pytest.raises(RankFailedError) as caught:
        _run(train, 2, network=Network(collective_timeout=LONG))
    hang = caught.value.hang
    assert hang is not None, str(caught.value)
    assert hang.ranks == (1,)
    assert "of the gradients" in hang.headline
    assert "What the ranks did before" in str(caught.value)
    assert "time.sleep(600)" in str(caught.value)


@pytest.mark.slow
def test_a_stopped_process_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    with caplog.at_level(logging.INFO), pytest.raises(RunTimeoutError) as caught:
        _run(train, 2, timeout=14.0)
    assert caught.value.hang is not None
    assert "rank 1 is stopped by a signal" in caught.value.hang.headline
    assert _verdicts(caplog)[0] == caught.value.hang.text
